"""Layer states by the time a layer needs them: loading runs ahead of computing.

A pass asks for one layer's states after another. What lies in memory on the model's device is
handed over as it is. Pages of states mapped from files are read by a thread that stays ahead of
the pass; states in the host's memory are copied to a GPU on a stream of their own, through pinned
memory.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from hypic_rag.operators import AffineMap, Dense, Elementwise
from hypic_rag.states import AttentionState, LayerState, LinearState, SegmentState

__all__ = ["StateFeed", "feed_for"]

AHEAD = 2
"""Layers that are copied to a GPU ahead of the one that is computed."""

_WORTH_READING = 1 << 20
"""Bytes from which a thread that reads ahead pays."""

_MADV_POPULATE_READ = 22


class StateFeed(Protocol):
    """Hands out one layer's states at a time, in the order of the layers."""

    def layer(self, index: int) -> Sequence[LayerState]:
        """The states of layer ``index``, one per cached interior."""

    def close(self) -> None:
        """Stop what still runs ahead."""


def feed_for(states: Sequence[SegmentState], device: torch.device) -> StateFeed:
    """The feed that suits where ``states`` lie and where they're needed."""
    if device.type == "cuda" and any(
        tensor.device != device for state in states for tensor in _tensors(state.layers[0])
    ):
        return _CopyFeed(states, device)
    if device.type == "cpu" and sum(state.nbytes for state in states) >= _WORTH_READING:
        return _ReadAheadFeed(states)
    return _DirectFeed(states)


class _DirectFeed:
    """States that are where they're needed."""

    def __init__(self, states: Sequence[SegmentState]) -> None:
        self._states = states

    def layer(self, index: int) -> Sequence[LayerState]:
        return [state.layers[index] for state in self._states]

    def close(self) -> None:
        """Nothing runs."""


class _ReadAheadFeed(_DirectFeed):
    """States that may be mapped from files: a thread brings their pages in, layer by layer."""

    def __init__(self, states: Sequence[SegmentState]) -> None:
        super().__init__(states)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="hypic-read-ahead", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        layers = min((len(state.layers) for state in self._states), default=0)
        for index in range(layers):
            for state in self._states:
                for tensor in _tensors(state.layers[index]):
                    if self._stop.is_set():
                        return
                    _populate(tensor)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class _CopyFeed:
    """States in the host's memory, copied to a GPU a few layers ahead."""

    def __init__(self, states: Sequence[SegmentState], device: torch.device) -> None:
        self._states = states
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hypic-copy-ahead")
        self._count = min((len(state.layers) for state in states), default=0)
        self._copies: dict[int, Future[tuple[list[LayerState], torch.cuda.Event]]] = {}
        for index in range(AHEAD):
            self._start(index)

    def _start(self, index: int) -> None:
        if index < self._count:
            self._copies[index] = self._pool.submit(self._copy, index)

    def _copy(self, index: int) -> tuple[list[LayerState], torch.cuda.Event]:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            copied = [_to_gpu(state.layers[index], self._device) for state in self._states]
            return copied, self._stream.record_event()

    def layer(self, index: int) -> Sequence[LayerState]:
        self._start(index + AHEAD)
        copied, ready = self._copies.pop(index).result()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        for layer in copied:
            for tensor in _tensors(layer):
                # The allocator mustn't reuse it before the pass is done with it.
                tensor.record_stream(current)
        return copied

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _to_gpu(layer: LayerState, device: torch.device) -> LayerState:
    def copy(tensor: Tensor) -> Tensor:
        staged = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        return staged.to(device, non_blocking=True)

    if isinstance(layer, AttentionState):
        return AttentionState(copy(layer.keys), copy(layer.values))
    transition = layer.map.transition
    moved = (
        Dense(copy(transition.matrix))
        if isinstance(transition, Dense)
        else Elementwise(copy(transition.factor))
    )
    return LinearState(AffineMap(moved, copy(layer.map.offset)), copy(layer.conv_tail))


def _tensors(layer: LayerState) -> tuple[Tensor, ...]:
    if isinstance(layer, AttentionState):
        return layer.keys, layer.values
    transition = layer.map.transition
    first = transition.matrix if isinstance(transition, Dense) else transition.factor
    return first, layer.map.offset, layer.conv_tail


def _populate(tensor: Tensor) -> None:
    """Bring a tensor's pages into memory; where the system can't, they come when touched."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or tensor.device.type != "cpu":
        return
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_READ)
