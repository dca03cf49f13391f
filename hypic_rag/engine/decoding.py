"""Decoding several answers together: one forward brings the next token of each.

Most of what a token costs is reading the model's weights, and several rows read them once. Requests
join behind their own finished contexts and leave at any step. Projections and feed-forward layers
see one packed row per request; recurrent states are stacked, and every request attends to keys and
values of its own, which grow in place. Nothing depends on who else is in the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypic_rag.config import Sampling
from hypic_rag.engine.context import (
    Context,
    attention_kv,
    linear_state,
    set_attention_kv,
    set_linear_state,
)
from hypic_rag.engine.generate import Chooser
from hypic_rag.families.base import LinearSpec
from hypic_rag.families.model import HybridModel
from hypic_rag.ops.attention import attend_run
from hypic_rag.ops.gated_delta_rule import step
from hypic_rag.ops.rope import rotate
from hypic_rag.ops.short_conv import convolve_windows

__all__ = ["DecodeBatch"]

_log = logging.getLogger(__name__)

_GROWTH_TOKENS = 128
"""Tokens that a full buffer of keys and values grows by, at least."""


class DecodeBatch:
    """Answers that are decoded together.

    :meth:`generate` is used like :func:`~hypic_rag.engine.generate.generate_tokens`, for any number
    of contexts at a time. Whoever asks for a token that isn't there yet advances everyone who has
    taken the last one, so consumers that take turns share every forward.

    Not for several threads at once: all consumers run in one.
    """

    def __init__(self, model: HybridModel) -> None:
        self.model = model
        self._rows: list[_Row] = []
        self._linear: dict[int, _LinearRows] = {}

    def __len__(self) -> int:
        """Answers in the batch."""
        return len(self._rows)

    def generate(
        self,
        context: Context,
        sampling: Sampling,
        stops: Collection[int] | None = None,
    ) -> Generator[int]:
        """Yield answer tokens one by one, the stop token excluded; see :func:`generate_tokens`.

        The request joins the batch with its first token and leaves it when the iterator ends or is
        closed. In between the context's cache lags behind; afterwards it holds what was yielded,
        except perhaps the last token.
        """
        row = self._join(context, Chooser(self.model, context, sampling, stops))
        try:
            while (token := self._next(row)) is not None:
                yield token
        finally:
            self._leave(row)

    # -- tokens ----------------------------------------------------------------------------------

    def _next(self, row: _Row) -> int | None:
        """The next token of ``row``, or None behind the last one; its error is raised here."""
        if row.waits and row.unfed is None:
            row.choose()
        elif row.waits:
            self._advance([row for row in self._rows if row.waits])
        if row.error is not None:
            raise row.error
        row.untold, token = None, row.untold
        row.unfed = token
        return token

    def _advance(self, rows: Sequence[_Row]) -> None:
        """One more token for each of ``rows``, as far as they have any left."""
        feeding = [row for row in rows if row.chooser.wants_more]
        if feeding:
            self._feed(feeding)
        for row in rows:
            if row.error is None:
                row.choose()

    def _feed(self, rows: Sequence[_Row]) -> None:
        """Run the last tokens of ``rows``; if that fails, one by one, to see whose fault it is."""
        try:
            self._forward(rows)
        except Exception as error:
            if len(rows) == 1:
                rows[0].error = error
                return
            _log.exception("A step of %d answers failed; each is tried alone", len(rows))
            for row in rows:
                self._feed([row])

    # -- joining and leaving ---------------------------------------------------------------------

    def _join(self, context: Context, chooser: Chooser) -> _Row:
        linear, buffers = dict(self._linear), {}
        with torch.inference_mode():
            for index, spec in enumerate(self.model.layers):
                if isinstance(spec, LinearSpec):
                    conv, state = linear_state(context.cache, index)
                    one = _LinearRows.single(conv, state, spec.kernel)
                    linear[index] = linear[index].add(one) if index in linear else one
                else:
                    buffers[index] = _KeyValues(*attention_kv(context.cache, index))
            for index, buffer in buffers.items():
                # What the context has held so far needn't be kept beside the buffer.
                set_attention_kv(context.cache, index, *buffer.view(context.length))
        row = _Row(context, chooser, buffers)
        self._linear = linear
        self._rows.append(row)
        return row

    def _leave(self, row: _Row) -> None:
        """Take ``row`` out and put what it has come to into its context's cache."""
        place = self._rows.index(row)
        cache = row.context.cache
        with torch.inference_mode():
            for index, held in self._linear.items():
                set_linear_state(cache, index, *held.row(place))
                self._linear[index] = held.without(place)
            for index, buffer in row.buffers.items():
                set_attention_kv(cache, index, *buffer.view(row.length))
        del self._rows[place]

    # -- the forward -----------------------------------------------------------------------------

    def _forward(self, rows: Sequence[_Row]) -> None:
        """Run the last token of each of ``rows``, a subsequence of all.

        Nothing that counts is changed before the end, so a failure leaves the batch as it was.
        """
        model = self.model
        everyone = len(rows) == len(self._rows)
        places = None if everyone else [self._rows.index(row) for row in rows]
        with torch.inference_mode():
            run = _Step(model, rows, self._linear, places)
            logits = run.run()
            for index, (conv, state) in run.advanced.items():
                self._linear[index] = self._linear[index].replaced(places, conv, state)
        for row, of_row in zip(rows, logits, strict=True):
            row.logits, row.unfed = of_row, None
            row.length += 1


class _Row:
    """One answer in the batch.

    Attributes:
        length: tokens that its states and buffers hold.
        logits: of the token behind those, ``[vocab]``.
        unfed: the token that was told last, unless it has run already.
        untold: the next token, chosen but not told yet.
        error: why there are no further tokens.
    """

    def __init__(self, context: Context, chooser: Chooser, buffers: dict[int, _KeyValues]) -> None:
        self.context = context
        self.chooser = chooser
        self.buffers = buffers
        self.length = context.length
        self.logits = context.logits
        self.unfed: int | None = None
        self.untold: int | None = None
        self.error: Exception | None = None

    @property
    def waits(self) -> bool:
        """Whether another token has to be made before one can be told."""
        return self.untold is None and not self.chooser.ended and self.error is None

    def choose(self) -> None:
        """Choose the next token; an error concerns this row only."""
        try:
            self.untold = self.chooser.next(self.logits)
        except Exception as error:
            self.error = error


class _KeyValues:
    """Keys and values ``[Hkv, n, D]`` of one request and layer, with room to grow."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = _grown(keys), _grown(values)

    def put(self, place: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[Hkv, D]`` behind the first ``place`` ones; returns everything up to there."""
        if place == self._keys.shape[1]:
            self._keys, self._values = _grown(self._keys), _grown(self._values)
        self._keys[:, place], self._values[:, place] = key, value
        return self.view(place + 1)

    def view(self, length: int) -> tuple[Tensor, Tensor]:
        """The first ``length`` keys and values."""
        return self._keys[:, :length], self._values[:, :length]


def _grown(held: Tensor) -> Tensor:
    """A copy of ``held [Hkv, n, D]`` with room behind it."""
    heads, length, width = held.shape
    grown = held.new_empty(heads, length + max(_GROWTH_TOKENS, length // 8), width)
    grown[:, :length] = held
    return grown


@dataclass(frozen=True, eq=False)
class _LinearRows:
    """What a linear layer remembers of all requests.

    Attributes:
        conv: inputs of the convolution ``[N, k, C]``, the last one newest.
        state: recurrent states ``[N, H, K, V]``, float32, contiguous.
    """

    conv: Tensor
    state: Tensor

    @classmethod
    def single(cls, conv: Tensor, state: Tensor, kernel: int) -> _LinearRows:
        """One request's ``conv [C, k]`` (or fewer columns) and ``state [H, K, V]``."""
        inputs = conv.new_zeros(1, kernel, conv.shape[0])
        known = min(kernel, conv.shape[1])
        inputs[0, kernel - known :] = conv[:, conv.shape[1] - known :].transpose(0, 1)
        return cls(inputs, state.float().unsqueeze(0).contiguous())

    def add(self, other: _LinearRows) -> _LinearRows:
        """These rows and ``other`` behind them."""
        return _LinearRows(torch.cat((self.conv, other.conv)), torch.cat((self.state, other.state)))

    def row(self, place: int) -> tuple[Tensor, Tensor]:
        """``conv [C, k]`` and ``state [H, K, V]`` of one request, in memory of their own."""
        return self.conv[place].transpose(0, 1).contiguous(), self.state[place].clone()

    def without(self, place: int) -> _LinearRows:
        """All rows but one."""
        parts = [torch.cat((held[:place], held[place + 1 :])) for held in (self.conv, self.state)]
        return _LinearRows(*parts)

    def replaced(self, places: list[int] | None, conv: Tensor, state: Tensor) -> _LinearRows:
        """With new contents of the rows ``places``, or of all."""
        if places is None:
            return _LinearRows(conv, state)
        self.conv[places], self.state[places] = conv, state
        return self


class _Step:
    """One forward over the layers; holds only what the layers share."""

    def __init__(
        self,
        model: HybridModel,
        rows: Sequence[_Row],
        linear: dict[int, _LinearRows],
        places: list[int] | None,
    ) -> None:
        self.model = model
        self._family = model.family
        self._rows = rows
        self._linear_rows = linear
        self._places = places
        positions = torch.tensor([row.length for row in rows], device=model.device)
        self._cos, self._sin = self._family.rotary(model.decoder, model.embedding_like(), positions)
        self.advanced: dict[int, tuple[Tensor, Tensor]] = {}
        """Per linear layer what :attr:`_LinearRows.conv` and ``state`` of these rows become."""

    def run(self) -> Tensor:
        """Logits ``[n, vocab]`` of the tokens behind the rows' last ones."""
        model = self.model
        tokens = torch.tensor([row.unfed for row in self._rows], device=model.device)
        x = self._family.embed(model.decoder, tokens)
        for index, (layer, spec) in enumerate(zip(model.decoder_layers, model.layers, strict=True)):
            mix = self._linear if isinstance(spec, LinearSpec) else self._attention
            x = self._family.run_layer(
                layer,
                x,
                lambda mixer, normed, mix=mix, index=index: mix(  # type: ignore[misc]
                    index, mixer, normed
                ),
            )
        return model.logits(x)

    def _linear(self, index: int, mixer: nn.Module, x: Tensor) -> Tensor:
        held = self._linear_rows[index]
        conv, state = held.conv, held.state
        if self._places is not None:
            conv, state = conv[self._places], state[self._places]
        inputs = self._family.linear_inputs(mixer, x)
        conv = torch.cat((conv[:, 1:], inputs.raw.unsqueeze(1)), dim=1)
        convolved = convolve_windows(conv, self._family.conv_weight(mixer))
        parts = self._family.recurrence(mixer, convolved)
        out, state = step(parts.q, parts.k, parts.v, inputs.decay, inputs.beta, state)
        self.advanced[index] = conv, state
        return self._family.linear_output(mixer, out.to(x.dtype), inputs.gate)

    def _attention(self, index: int, mixer: nn.Module, x: Tensor) -> Tensor:
        inputs = self._family.attention_inputs(mixer, x)
        queries = rotate(inputs.queries, self._cos, self._sin)
        keys = rotate(inputs.keys, self._cos, self._sin)
        outputs = []
        for place, row in enumerate(self._rows):
            seen = row.buffers[index].put(row.length, keys[:, place], inputs.values[:, place])
            outputs.append(attend_run(queries[:, place : place + 1], *seen, inputs.scaling))
        return self._family.attention_output(mixer, torch.cat(outputs), inputs.gate)
