"""Finished caches: what the library's own cache holds behind a prompt."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypic_rag.errors import ConfigError

__all__ = [
    "Context",
    "LazyContext",
    "attention_kv",
    "forward",
    "forward_rows",
    "linear_state",
    "new_cache",
    "set_attention_kv",
    "set_linear_state",
]


@dataclass(frozen=True, eq=False)
class Context:
    """A prompt that has been prefilled.

    Attributes:
        token_ids: the whole prompt.
        cache: the library's cache behind it (a ``DynamicCache`` of batch 1), keys rotated to their
            true positions. Contexts are shared between requests: clone before decoding
            (:meth:`clone`).
        logits: of the next token, ``[vocab]``.
    """

    token_ids: tuple[int, ...]
    cache: Any
    logits: Tensor

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    def clone(self) -> Context:
        """A copy whose cache may be decoded from without changing this one."""
        return Context(self.token_ids, copy.deepcopy(self.cache), self.logits)


class LazyContext:
    """A prompt whose tokens are known, and whose context is made when it's first asked for.

    Safe to use from several threads: those that ask while it's being made wait for it.

    Args:
        token_ids: the whole prompt.
        make: gives the context, and how many tokens ran for it.
    """

    def __init__(self, token_ids: tuple[int, ...], make: Callable[[], tuple[Context, int]]) -> None:
        self.token_ids = token_ids
        self._make = make
        self._lock = threading.Lock()
        self._held: Context | None = None

    @classmethod
    def of(cls, context: Context) -> LazyContext:
        """One that's there already."""
        return cls(context.token_ids, lambda: (context, 0))

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    def get(self) -> tuple[Context, int]:
        """The context, and how many tokens ran for it in this call: none if it was there."""
        with self._lock:
            if self._held is not None:
                return self._held, 0
            self._held, computed = self._make()
            return self._held, computed


def new_cache(config: Any) -> Any:
    """An empty cache of the library for a text configuration."""
    from transformers import DynamicCache

    return DynamicCache(config=config)


def linear_state(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Convolution inputs ``[C, k]`` and recurrent state ``[H, K, V]`` of a linear layer."""
    held = cache.layers[layer]
    return held.conv_states[0][0], held.recurrent_states[0][0]


def attention_kv(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Rotated keys and values ``[Hkv, n, D]`` of a full-attention layer."""
    held = cache.layers[layer]
    return held.keys[0], held.values[0]


def set_linear_state(cache: Any, layer: int, conv: Tensor, recurrent: Tensor) -> None:
    """Put ``conv [C, k]`` and ``recurrent [H, K, V]`` into a linear layer of ``cache``.

    The layer is marked as filled: without that the library ignores what it holds.
    """
    held = cache.layers[layer]
    held.conv_states[0] = conv.unsqueeze(0)
    held.recurrent_states[0] = recurrent.unsqueeze(0)
    held.is_conv_states_initialized[0] = True
    held.is_recurrent_states_initialized[0] = True
    held.has_previous_state[0] = True
    held.dtype, held.device = conv.dtype, conv.device
    if hasattr(held, "conv_kernel_size"):
        held.conv_kernel_size[0] = conv.shape[-1]


def set_attention_kv(cache: Any, layer: int, keys: Tensor, values: Tensor) -> None:
    """Make ``keys`` and ``values [Hkv, n, D]`` what a full-attention layer of ``cache`` holds.

    The tensors are taken as they are, where the cache's own ``update`` would copy them.
    """
    held = cache.layers[layer]
    held.dtype, held.device = keys.dtype, keys.device
    held.keys, held.values = keys.unsqueeze(0), values.unsqueeze(0)
    held.is_initialized = True


def forward(
    model: Any,
    token_ids: Sequence[int] | Tensor,
    start: int,
    cache: Any,
    *,
    all_logits: bool = False,
) -> Tensor:
    """The library's own forward of ``token_ids`` at positions from ``start`` on ``cache``.

    Returns logits ``[n, vocab]`` of all tokens, or ``[1, vocab]`` of the last one. The cache grows
    in place.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=device).view(1, -1)
    return _run(model, ids, start, cache, keep=0 if all_logits else 1)[0]


def forward_rows(model: Any, rows: Sequence[Sequence[int]], context: Context) -> list[Tensor]:
    """The library's own forward of several continuations of one context, side by side.

    Returns:
        Per row the logits ``[n, vocab]`` of all its tokens. The context isn't changed.

    Raises:
        ConfigError: there are no rows, or one has no tokens.
    """
    if not rows or not all(rows):
        raise ConfigError("Every continuation needs at least one token, and there must be one.")
    device = model.get_input_embeddings().weight.device
    # Rows are filled up behind their end, which no token of theirs looks at.
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=device)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.as_tensor(row, dtype=torch.long, device=device)
    cache = copy.deepcopy(context.cache)
    cache.reorder_cache(torch.zeros(len(rows), dtype=torch.long, device=device))
    logits = _run(model, ids, context.length, cache, keep=0)
    return [logits[place, : len(row)] for place, row in enumerate(rows)]


def _run(model: Any, ids: Tensor, start: int, cache: Any, keep: int) -> Tensor:
    """Logits ``[B, n, vocab]`` of ids ``[B, n]``: all of them (0) or the last ``keep``."""
    positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape)
    # The argument was called past_key_values before transformers called it cache.
    names = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in names else "past_key_values"
    with torch.inference_mode():
        output = model(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            **{argument: cache},
        )
    logits: Tensor = output.logits
    return logits
