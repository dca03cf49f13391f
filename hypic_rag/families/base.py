"""What a model family has to say about its layers.

A family is one file named for its ``model_type``. It names the library's own submodules
(projections, norms, feed-forward) in the order in which they run, and leaves out the two places
where history enters: the recurrence and the attention. The engine supplies those. Nothing of a
loaded model is patched, so the library's own forward stays the reference.

All activations are packed: ``x [N, hidden]`` holds the tokens of all rows of all requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

__all__ = [
    "AttentionInputs",
    "AttentionSpec",
    "Family",
    "LayerSpec",
    "LinearInputs",
    "LinearSpec",
    "Recurrence",
]


@dataclass(frozen=True)
class LinearSpec:
    """A linear-attention layer: recurrent state ``[heads, key_dim, value_dim]``, float32.

    ``transition`` is ``"dense"`` or ``"elementwise"``. The short convolution has ``channels``
    inputs and looks at ``kernel`` tokens.
    """

    heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int
    transition: str = "dense"

    def state_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes that a segment with ``tokens`` interior tokens keeps of this layer."""
        per_head = self.key_dim * (self.key_dim + self.value_dim) * 4
        return self.heads * per_head + self.channels * min(tokens, self.kernel - 1) * itemsize


@dataclass(frozen=True)
class AttentionSpec:
    """A full-attention layer: keys and values ``[kv_heads, n, head_dim]`` in the model's dtype."""

    kv_heads: int
    head_dim: int
    rotary_dim: int

    def state_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes that a segment with ``tokens`` interior tokens keeps of this layer."""
        return 2 * self.kv_heads * self.head_dim * tokens * itemsize


LayerSpec = LinearSpec | AttentionSpec


@dataclass(frozen=True, eq=False)
class LinearInputs:
    """What a linear-attention layer computes from hidden states without any history.

    Attributes:
        raw: inputs of the short convolution, before it, ``[N, C]``.
        decay: log decays g, ``[N, H]``, float32.
        beta: write strengths, ``[N, H]``, float32.
        gate: output gate, ``[N, H, V]``.
    """

    raw: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Inputs of the recurrence behind the convolution: q, k ``[N, H, K]``, v ``[N, H, V]``.

    Float32; q and k normalised and, with grouped heads, repeated to the value heads; q scaled.
    """

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """What a full-attention layer computes from hidden states without any history.

    Attributes:
        queries: before rotation, ``[Hq, N, D]``, or of some tokens only.
        keys: before rotation, ``[Hkv, N, D]``.
        values: ``[Hkv, N, D]``.
        gate: output gate ``[N, Hq * D]``, or None.
        scaling: factor of the scores.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    gate: Tensor | None
    scaling: float


class Family(ABC):
    """One model family: how its layers map onto the engine's two mixers."""

    model_types: ClassVar[tuple[str, ...]]
    """Every ``model_type`` this family serves."""

    @abstractmethod
    def unsupported(self, config: Any) -> str | None:
        """Why a text configuration of this family can't be served, or None."""

    @abstractmethod
    def layers(self, config: Any) -> tuple[LayerSpec, ...]:
        """The layers of a text configuration, in order."""

    def embed(self, decoder: nn.Module, token_ids: Tensor) -> Tensor:
        """Hidden states ``[N, hidden]`` in front of the first layer."""
        embedding: nn.Module = decoder.get_submodule("embed_tokens")
        embedded: Tensor = embedding(token_ids)
        return embedded

    def rotary(self, decoder: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``cos, sin [n, R]`` for ``positions [n]``; ``R = 0`` where nothing is rotated."""
        embedding = getattr(decoder, "rotary_emb", None)
        if embedding is None:
            empty = like.new_empty(positions.shape[0], 0)
            return empty, empty
        x, places = like.unsqueeze(0), positions.unsqueeze(0)
        try:
            cos, sin = embedding(x, places)
        except IndexError:
            # transformers 5.17 wants one row of positions per axis here.
            cos, sin = embedding(x, places.expand(3, 1, -1))
        return cos[0], sin[0]

    @abstractmethod
    def run_layer(
        self,
        layer: nn.Module,
        x: Tensor,
        mix: Callable[[nn.Module, Tensor], Tensor],
        keep: Tensor | None = None,
    ) -> Tensor:
        """One decoder layer on ``x [N, hidden]``; ``mix(mixer, normed)`` replaces its mixer.

        With ``keep [n]`` the mixer's result is of these tokens only, and so is the layer's.
        """

    @abstractmethod
    def linear_inputs(self, mixer: nn.Module, x: Tensor) -> LinearInputs:
        """Projections of a linear-attention layer."""

    @abstractmethod
    def conv_weight(self, mixer: nn.Module) -> Tensor:
        """Weights ``[C, k]`` of the short convolution; the last column meets the current token."""

    @abstractmethod
    def recurrence(self, mixer: nn.Module, convolved: Tensor) -> Recurrence:
        """Split the convolution's output ``[N, C]`` (before its activation) into q, k, v."""

    @abstractmethod
    def linear_output(self, mixer: nn.Module, out: Tensor, gate: Tensor) -> Tensor:
        """Output norm, gate and projection of ``out [N, H, V]``: ``[N, hidden]``."""

    @abstractmethod
    def attention_inputs(
        self, mixer: nn.Module, x: Tensor, keep: Tensor | None = None
    ) -> AttentionInputs:
        """Projections of a full-attention layer.

        With ``keep [n]`` there are queries and a gate for these tokens only.
        """

    @abstractmethod
    def attention_output(self, mixer: nn.Module, out: Tensor, gate: Tensor | None) -> Tensor:
        """Gate and projection of ``out [N, Hq * D]``: ``[N, hidden]``."""
