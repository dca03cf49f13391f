"""Compressed segment states with an error bound that's recorded with them.

Transitions: per head the cheapest of three forms whose error stays within a tolerance in the
spectral norm: nothing (``T`` has decayed), ``γ I - Uᵀ V`` of low rank (few directions have been
erased, or with ``γ = 0`` nearly all), or dense. End states, factors, keys and values are quantised
with scales. Arithmetic stays float32: a compressed state is expanded before it's used.

The bound holds for every state ``h`` in front of a segment:

    ||(T' h + e') - (T h + e)|| <= transition ||h|| + offset                      (per layer)

It follows from what was dropped and from the formats' rounding, not from comparing results, and
tests hold the measured error against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypic_rag.errors import ConfigError, StateMismatchError
from hypic_rag.operators import Dense
from hypic_rag.states import AttentionState, LayerState, LinearState, SegmentState

__all__ = ["LEVELS", "CompressedState", "LayerBound", "Precision", "compress"]

_FORMATS = {"float32": 0.0, "bfloat16": 2.0**-8, "float8": 2.0**-4}
"""Formats of operators and the largest relative rounding error of each."""
_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = 448.0
_FLOAT8_TINY = 2.0**-10
"""Half of the smallest subnormal: the largest error of values near zero, before scaling."""
_SLACK = 1e-5
"""Room for the rounding of float32 arithmetic on the way."""


@dataclass(frozen=True)
class Precision:
    """How states are compressed.

    Attributes:
        tolerance: largest error of a transition in the spectral norm before quantisation; 0 keeps
            all dense.
        operators: format of ``T``'s factors and of ``e``: float32, bfloat16 or float8.
        kv: format of keys and values: ``model`` (as the model computes them) or ``int8``.
    """

    tolerance: float = 0.0
    operators: str = "float32"
    kv: str = "model"

    def __post_init__(self) -> None:
        if not 0.0 <= self.tolerance <= 1.0:
            raise ConfigError(f"The tolerance must lie in [0, 1], but is {self.tolerance!r}.")
        if self.operators not in _FORMATS:
            raise ConfigError(
                f"Unknown format of operators {self.operators!r}: expected one of "
                f"{', '.join(_FORMATS)}."
            )
        if self.kv not in ("model", "int8"):
            raise ConfigError(f"Unknown format {self.kv!r}: expected 'model' or 'int8'.")


LEVELS = {
    "exact": Precision(),
    "half": Precision(0.0, "bfloat16"),
    "low rank": Precision(0.05, "bfloat16"),
    "compact": Precision(0.1, "float8", "int8"),
    "smallest": Precision(0.3, "float8", "int8"),
}
"""Levels by name, the largest first."""


@dataclass(frozen=True)
class LayerBound:
    """Largest errors of one layer's state.

    Attributes:
        transition: of ``T``, in the spectral norm, over all heads; 0 for attention layers.
        offset: of ``e``, in the Frobenius norm; 0 for attention layers.
        keys, values: in the Frobenius norm; 0 for linear layers.
    """

    transition: float = 0.0
    offset: float = 0.0
    keys: float = 0.0
    values: float = 0.0


@dataclass(frozen=True, eq=False)
class CompressedState:
    """A segment state in fewer bytes.

    Attributes:
        tensors: by name, for safetensors.
        description: everything else that :meth:`expand` needs, as text.
        bounds: one per layer.
    """

    tensors: Mapping[str, Tensor]
    description: Mapping[str, str]
    bounds: tuple[LayerBound, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def expand(self) -> SegmentState:
        """The state, in float32 operators and the model's keys and values.

        Raises:
            StateMismatchError: parts are missing.
        """
        plain: dict[str, Tensor] = {}
        try:
            for index in range(int(self.description["layers"])):
                parts = {
                    name.partition(".")[2]: tensor
                    for name, tensor in self.tensors.items()
                    if name.partition(".")[0] == str(index)
                }
                dtype = getattr(torch, self.description["dtype"])
                plain |= {f"{index}.{k}": v for k, v in _expand_layer(parts, dtype).items()}
        except (KeyError, ValueError, AttributeError) as error:
            raise StateMismatchError(
                f"The compressed segment state lacks a part ({error}); encode the segment again."
            ) from error
        return SegmentState.from_tensors(plain, self.description)


def compress(state: SegmentState, precision: Precision) -> CompressedState:
    """Compress a state; its bounds say what that costs at most."""
    tensors: dict[str, Tensor] = {}
    bounds = []
    dtype = torch.float32
    for index, layer in enumerate(state.layers):
        if isinstance(layer, AttentionState):
            dtype = layer.keys.dtype
            parts, bound = _compress_attention(layer, precision)
        else:
            parts, bound = _compress_linear(layer, precision)
        tensors |= {f"{index}.{name}": tensor for name, tensor in parts.items()}
        bounds.append(bound)
    description: dict[str, Any] = dict(state.metadata())
    description["dtype"] = str(dtype).removeprefix("torch.")
    return CompressedState(tensors, description, tuple(bounds))


# -- linear layers -----------------------------------------------------------------------------


def _compress_linear(
    layer: LinearState, precision: Precision
) -> tuple[dict[str, Tensor], LayerBound]:
    offset = layer.map.offset.float()
    parts, off = _quantize("offset", offset, precision.operators)
    parts["conv_tail"] = layer.conv_tail
    transition = layer.map.transition
    if not isinstance(transition, Dense):
        parts["factor"] = transition.factor
        return parts, LayerBound(offset=off)
    matrices, error = _compress_matrices(transition.matrix.float(), precision)
    return parts | matrices, LayerBound(transition=error, offset=off)


def _compress_matrices(matrix: Tensor, precision: Precision) -> tuple[dict[str, Tensor], float]:
    """Per head nothing, low rank, or dense: parts, and a bound on the spectral error.

    ``matrix [H, K, K]``. Parts: ``gamma [H]``, ``rank [H]`` (-1: dense), the factors of all
    low-rank heads behind one another ``left, right [sum of ranks, K]``, and ``dense [D, K, K]``.
    """
    heads, size, _ = matrix.shape
    if precision.tolerance == 0.0:
        parts, error = _quantize("dense", matrix, precision.operators)
        parts |= {
            "gamma": torch.zeros(heads),
            "rank": torch.full((heads,), -1, dtype=torch.int16),
            "left": torch.empty(0, size),
            "right": torch.empty(0, size),
        }
        return parts, error
    eye = torch.eye(size, dtype=torch.float64, device=matrix.device)
    exact = matrix.double()
    # γ times a product of contractions: the largest singular value is γ unless all directions have
    # been erased, and then T is small anyway.
    gammas = torch.linalg.matrix_norm(exact, ord=2)
    left, right, dense, ranks, kept, worst = [], [], [], [], [], 0.0
    for head in range(heads):
        gamma = float(gammas[head])
        if gamma <= precision.tolerance:
            ranks.append(0)
            kept.append(0.0)
            worst = max(worst, gamma)
            continue
        gamma = float(torch.tensor(gamma, dtype=torch.float32))
        # Few directions erased: γ I - T has a low rank; nearly all: T itself has.
        gamma, (u, s, v) = min(
            ((shift, torch.linalg.svd(shift * eye - exact[head])) for shift in (gamma, 0.0)),
            key=lambda found: int((found[1][1] > precision.tolerance).sum()),
        )
        rank = int((s > precision.tolerance).sum())
        if 2 * rank >= size:
            ranks.append(-1)
            kept.append(0.0)
            dense.append(matrix[head])
            continue
        ranks.append(rank)
        kept.append(gamma)
        worst = max(worst, float(s[rank]) if rank < size else 0.0)
        scale = s[:rank].sqrt()
        left.append((u[:, :rank] * scale).T.float())
        right.append((v[:rank] * scale.unsqueeze(-1)).float())
    parts = {
        "gamma": torch.tensor(kept, dtype=torch.float32),
        "rank": torch.tensor(ranks, dtype=torch.int16),
    }
    rounding = 0.0
    empty = matrix.new_empty(0, size)
    for name, factors in (("left", left), ("right", right)):
        found, _ = _quantize(name, torch.cat(factors) if factors else empty, precision.operators)
        parts |= found
    if left:
        rounding = _product_error(left, right, parts, precision.operators)
    if dense:
        found, error = _quantize("dense", torch.stack(dense), precision.operators)
        parts |= found
        rounding = max(rounding, error)
    else:
        parts["dense"] = matrix.new_empty(0, size, size)
    # A head is either cut or dense, so the largest of both errors bounds each.
    return parts, (worst + rounding) * (1 + _SLACK) + _SLACK


def _product_error(
    left: list[Tensor], right: list[Tensor], parts: dict[str, Tensor], operators: str
) -> float:
    """Bound on how far quantising the factors moves any head's product, in the spectral norm."""
    offsets = _rounding_error(torch.cat(left), operators), _rounding_error(
        torch.cat(right), operators
    )  # fmt: skip
    worst, start = 0.0, 0
    for u, v in zip(left, right, strict=True):
        rows = slice(start, start + u.shape[0])
        start += u.shape[0]
        if not u.shape[0]:
            continue
        off_u = float(offsets[0][rows].square().sum().sqrt())
        off_v = float(offsets[1][rows].square().sum().sqrt())
        norm_u, norm_v = (float(torch.linalg.matrix_norm(x.double(), ord=2)) for x in (u, v))
        worst = max(worst, norm_u * off_v + off_u * (norm_v + off_v))
    return worst


# -- full attention ----------------------------------------------------------------------------


def _compress_attention(
    layer: AttentionState, precision: Precision
) -> tuple[dict[str, Tensor], LayerBound]:
    if precision.kv == "model":
        return {"keys": layer.keys, "values": layer.values}, LayerBound()
    parts: dict[str, Tensor] = {}
    errors = []
    # Keys have channels of very different size, values don't (KIVI, arXiv 2402.02750).
    for name, tensor, dim in (("keys", layer.keys, 1), ("values", layer.values, 2)):
        exact = tensor.float()
        scale = exact.abs().amax(dim, keepdim=True).clamp_min(1e-12) / 127
        parts[name] = (exact / scale).round().clamp(-127, 127).to(torch.int8)
        parts[f"{name}_scale"] = scale
        half = (scale * (0.5 + _SLACK)).expand_as(exact)
        # Expanding rounds once more, to the model's own format.
        half = half + exact.abs() * torch.finfo(tensor.dtype).eps
        errors.append(float(half.square().sum().sqrt()))
    return parts, LayerBound(keys=errors[0], values=errors[1])


# -- formats -----------------------------------------------------------------------------------


def _quantize(name: str, exact: Tensor, operators: str) -> tuple[dict[str, Tensor], float]:
    """A tensor in a format, by rows scaled where needed, and its largest Frobenius error."""
    error = float(_rounding_error(exact, operators).double().square().sum().sqrt())
    if operators == "float32":
        return {name: exact}, 0.0
    if operators == "bfloat16":
        return {name: exact.bfloat16()}, error * (1 + _SLACK)
    scale = _row_scale(exact)
    stored = (exact / scale).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(_FLOAT8)
    return {name: stored, f"{name}_scale": scale}, error * (1 + _SLACK)


def _row_scale(exact: Tensor) -> Tensor:
    if not exact.numel():
        return exact.new_ones(*exact.shape[:-1], 1)
    return exact.abs().amax(-1, keepdim=True).clamp_min(1e-30) / _FLOAT8_MAX


def _rounding_error(exact: Tensor, operators: str) -> Tensor:
    """Per value the largest error of storing it."""
    if operators == "float8":
        return torch.maximum(
            exact.abs() * (_FORMATS[operators] + _SLACK), _row_scale(exact) * _FLOAT8_TINY
        )
    return exact.abs() * _FORMATS[operators]


def _restore(parts: Mapping[str, Tensor], name: str) -> Tensor:
    values = parts[name].float()
    scale = parts.get(f"{name}_scale")
    return values if scale is None else values * scale


def _expand_layer(parts: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    if "keys" in parts:
        return {name: _restore(parts, name).to(dtype) for name in ("keys", "values")}
    plain = {"offset": _restore(parts, "offset"), "conv_tail": parts["conv_tail"]}
    if "factor" in parts:
        return plain | {"factor": parts["factor"]}
    ranks = parts["rank"].tolist()
    left, right, dense = (_restore(parts, name) for name in ("left", "right", "dense"))
    size = left.shape[-1]
    eye = torch.eye(size, device=left.device)
    matrix = left.new_zeros(len(ranks), size, size)
    row = block = 0
    for head, rank in enumerate(ranks):
        if rank < 0:
            matrix[head] = dense[block]
            block += 1
            continue
        rows = slice(row, row + rank)
        row += rank
        matrix[head] = parts["gamma"][head] * eye - left[rows].T @ right[rows]
    return plain | {"matrix": matrix}


def transition_report(state: SegmentState) -> list[dict[str, Any]]:
    """Per linear layer with dense transitions: norms and the ranks
    that reach some tolerances, for planning."""
    rows = []
    for index, layer in enumerate(state.layers):
        if not isinstance(layer, LinearState) or not isinstance(layer.map.transition, Dense):
            continue
        matrix = layer.map.transition.matrix.double()
        norms = torch.linalg.matrix_norm(matrix, ord=2)
        eye = torch.eye(matrix.shape[-1], dtype=torch.float64, device=matrix.device)
        shifted = torch.linalg.svdvals(norms[:, None, None] * eye - matrix)
        plain = torch.linalg.svdvals(matrix)
        rows.append(
            {
                "layer": index,
                "norms": norms.tolist(),
                "ranks": {
                    str(t): torch.minimum((shifted > t).sum(-1), (plain > t).sum(-1)).tolist()
                    for t in (0.01, 0.05, 0.1, 0.3)
                },
            }
        )
    return rows


def measured_errors(state: SegmentState, expanded: SegmentState) -> tuple[LayerBound, ...]:
    """The true errors in the terms of :class:`LayerBound`."""
    found = []
    for exact, other in zip(state.layers, expanded.layers, strict=True):
        found.append(_layer_error(exact, other))
    return tuple(found)


def _layer_error(exact: LayerState, other: LayerState) -> LayerBound:
    if isinstance(exact, AttentionState) and isinstance(other, AttentionState):
        keys = float((exact.keys.double() - other.keys.double()).norm())
        return LayerBound(
            keys=keys, values=float((exact.values.double() - other.values.double()).norm())
        )
    if not isinstance(exact, LinearState) or not isinstance(other, LinearState):
        raise StateMismatchError("The two states have different kinds of layers.")
    offset = float((exact.map.offset.double() - other.map.offset.double()).norm())
    first, second = exact.map.transition, other.map.transition
    if isinstance(first, Dense) and isinstance(second, Dense):
        difference = first.matrix.double() - second.matrix.double()
        return LayerBound(float(torch.linalg.matrix_norm(difference, ord=2).max()), offset)
    return LayerBound(offset=offset)
