"""The gated delta rule: one token, a chunk of tokens, and the affine map of a chunk.

Per head, with key ``k [K]``, value ``v [V]``, write strength ``β`` and decay ``exp(g)``, one token
changes the recurrent state ``h [K, V]`` to

    h <- (I - β k kᵀ) exp(g) h + β k vᵀ,        o = qᵀ h                      (2)

(Yang et al., "Gated Delta Networks", arXiv 2412.06464). A chunk of L tokens is computed at once in
the WY form (same paper, section 3): with cumulative log decays ``c_i`` and
``A = I + strictly_lower(β_i k_iᵀ k_j exp(c_i - c_j))``,

    u = A⁻¹ (β v),   w = A⁻¹ (β exp(c) k),   v' = u - w h
    o = exp(c) q h + lower(qᵀk exp(c_i - c_j)) v'
    h <- exp(c_L) h + (exp(c_L - c) k)ᵀ v'                                    (3)

The last line is affine in ``h``. Run on columns ``[h | I]`` with ``u = 0`` for the right part, it
carries the transition ``T`` along with the state, so one pass gives outputs, end state and ``T``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypic_rag.operators import AffineMap, Dense

__all__ = ["CHUNK", "ChunkFactors", "advance", "chunk_factors", "chunk_map", "l2_normalize", "scan"]

CHUNK = 64
"""Tokens of one chunk: the size the library uses."""


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x²) + eps)`` over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


@dataclass(frozen=True, eq=False)
class ChunkFactors:
    """What equation (3) needs of chunks, whatever the state in front of them.

    Shapes, float32: ``writes`` u ``[R, H, L, V]``, ``reads`` w ``[R, H, L, K]``, ``queries``
    ``[R, H, L, K]``, ``scores [R, H, L, L]``, ``keys [R, H, L, K]``, ``decay [R, H, 1, 1]``.
    """

    writes: Tensor
    reads: Tensor
    queries: Tensor
    scores: Tensor
    keys: Tensor
    decay: Tensor

    def select(self, rows: Tensor | slice) -> ChunkFactors:
        """The factors of the chunks ``rows``."""
        return ChunkFactors(
            self.writes[rows],
            self.reads[rows],
            self.queries[rows],
            self.scores[rows],
            self.keys[rows],
            self.decay[rows],
        )


def chunk_factors(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> ChunkFactors:
    """Solve the triangular systems of ``R`` chunks of ``L`` tokens at once.

    Args:
        q: queries ``[R, H, L, K]``, normalised and scaled, float32.
        k: keys ``[R, H, L, K]``, normalised, float32.
        v: values ``[R, H, L, V]``, float32.
        g: log decays ``[R, H, L]``, <= 0.
        beta: write strengths ``[R, H, L]``.

    A token with ``beta = 0`` and ``g = 0`` changes no state: that's how chunks are padded.
    """
    length, values = k.shape[-2], v.shape[-1]
    total = g.cumsum(-1)
    later = torch.ones(length, length, dtype=torch.bool, device=k.device).triu(1)
    pairwise = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    growth = total.exp().unsqueeze(-1)
    # Only the strictly lower part is read: the diagonal counts as ones.
    system = (k_beta @ k.transpose(-1, -2)) * pairwise
    right = torch.cat((v * beta.unsqueeze(-1), k_beta * growth), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    end = total[..., -1:]
    return ChunkFactors(
        writes=solved[..., :values],
        reads=solved[..., values:],
        queries=q * growth,
        scores=(q @ k.transpose(-1, -2)) * pairwise,
        keys=k * (end - total).exp().unsqueeze(-1),
        decay=end.exp().unsqueeze(-1),
    )


def advance(factors: ChunkFactors, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the chunks and the columns behind them (equation 3).

    Args:
        factors: of ``R`` chunks.
        state: ``[R, H, K, V]``, or ``[R, H, K, V + K]`` to carry a transition along.

    Returns:
        outputs ``[R, H, L, V]`` and the new columns, shape of ``state``.
    """
    values = factors.writes.shape[-1]
    change = -(factors.reads @ state)
    change[..., :values] += factors.writes
    out = factors.queries @ state[..., :values] + factors.scores @ change[..., :values]
    return out, factors.decay * state + factors.keys.transpose(-1, -2) @ change


def chunk_map(factors: ChunkFactors) -> AffineMap:
    """``T [R, H, K, K]`` and ``e [R, H, K, V]`` of whole chunks (equation 1)."""
    keys = factors.keys.transpose(-1, -2)
    eye = torch.eye(factors.keys.shape[-1], dtype=keys.dtype, device=keys.device)
    return AffineMap(Dense(factors.decay * eye - keys @ factors.reads), keys @ factors.writes)


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Equation (2) token by token: the reference for everything above.

    Arguments as in :func:`chunk_factors`, ``state [R, H, K, V]``. Returns outputs
    ``[R, H, L, V]`` and the final state. With ``v = 0`` and ``state = I [K, K]`` the final state
    is the transition ``T``.
    """
    outputs = []
    for t in range(k.shape[-2]):
        state = state * g[..., t, None, None].exp()
        key = k[..., t, :].unsqueeze(-1)
        error = v[..., t, :] - (state * key).sum(-2)
        state = state + key * (beta[..., t, None] * error).unsqueeze(-2)
        outputs.append((state * q[..., t, :].unsqueeze(-1)).sum(-2))
    out = torch.stack(outputs, -2) if outputs else torch.zeros_like(v)
    return out, state
