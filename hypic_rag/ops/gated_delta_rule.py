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

__all__ = [
    "CHUNK",
    "ChunkFactors",
    "advance_",
    "chunk_factors",
    "chunk_map",
    "l2_normalize",
    "scan",
    "step",
]

CHUNK = 64
"""Tokens of one chunk: the size the library uses."""

_STEP_BYTES = 1 << 19
"""Bytes of states that :func:`step` takes at once on a CPU, so that they stay in its cache."""


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x²) + eps)`` over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


@dataclass(frozen=True, eq=False)
class ChunkFactors:
    """What equation (3) needs of chunks, whatever the state in front of them.

    Shapes, float32: ``writes`` u ``[R, H, L, V]``, ``probes [R, H, 2 L, K]``: reads w above
    queries, ``scores [R, H, L, L]``, ``keys [R, H, K, L]``, ``decay [R, H, 1, 1]``.
    """

    writes: Tensor
    probes: Tensor
    scores: Tensor
    keys: Tensor
    decay: Tensor

    @property
    def length(self) -> int:
        """Tokens of a chunk, padding included."""
        return self.writes.shape[-2]

    def select(self, rows: Tensor | slice) -> ChunkFactors:
        """The factors of the chunks ``rows``."""
        return ChunkFactors(
            self.writes[rows],
            self.probes[rows],
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
    pairwise = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()
    growth = total.exp().unsqueeze(-1)
    strength = beta.unsqueeze(-1)
    gram = torch.cat((k, q), dim=-2) @ k.transpose(-1, -2)
    # Only the strictly lower part is read: the diagonal counts as ones.
    system = gram[..., :length, :].mul_(pairwise).mul_(strength)
    right = torch.cat((v * strength, k * (strength * growth)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    end = total[..., -1:]
    return ChunkFactors(
        writes=solved[..., :values].contiguous(),
        probes=torch.cat((solved[..., values:], q * growth), dim=-2),
        scores=gram[..., length:, :] * pairwise,
        keys=(k * (end - total).exp_().unsqueeze(-1)).transpose(-1, -2),
        decay=end.exp().unsqueeze(-1),
    )


def advance_(factors: ChunkFactors, state: Tensor, out: Tensor) -> None:
    """Let ``R`` chunks act on the columns in front of them, in place (equation 3).

    Args:
        factors: of ``R`` chunks.
        state: ``[R, H, K, V]``, or ``[R, H, K, V + K]`` to carry a transition along; contiguous.
        out: ``[R, H, L, V]``, contiguous; receives the outputs.
    """
    length, values = factors.length, factors.writes.shape[-1]
    probes, columns = factors.probes.flatten(0, 1), state.flatten(0, 1)
    writes, scores = factors.writes.flatten(0, 1), factors.scores.flatten(0, 1)
    if columns.shape[-1] == values:
        probed = torch.bmm(probes, columns)
        change = torch.sub(writes, probed[:, :length])
        answers = probed[:, length:]
    else:
        change = torch.bmm(probes[:, :length], columns).neg_()
        change[..., :values] += writes
        answers = torch.bmm(probes[:, length:], columns[..., :values])
    torch.baddbmm(answers, scores, change[..., :values], out=out.flatten(0, 1))
    columns.mul_(factors.decay.flatten(0, 1))
    columns.baddbmm_(factors.keys.flatten(0, 1), change)


def chunk_map(factors: ChunkFactors) -> AffineMap:
    """``T [R, H, K, K]`` and ``e [R, H, K, V]`` of whole chunks (equation 1)."""
    reads = factors.probes[..., : factors.length, :]
    eye = torch.eye(reads.shape[-1], dtype=reads.dtype, device=reads.device)
    matrix = factors.decay * eye - factors.keys @ reads
    return AffineMap(Dense(matrix), factors.keys @ factors.writes)


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


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Equation (2) for one token of each of ``R`` rows, with one read of the states.

    From ``o = qᵀ h`` behind the token and ``h`` in front of it:
    ``o = exp(g) qᵀ h + (qᵀ k) change`` with ``change = β (v - exp(g) kᵀ h)``.

    Args:
        q: ``[R, H, K]``, normalised and scaled, float32.
        k: ``[R, H, K]``, normalised, float32.
        v: ``[R, H, V]``, float32.
        g: log decays ``[R, H]``, <= 0.
        beta: write strengths ``[R, H]``.
        state: in front of the token, ``[R, H, K, V]``, float32; not changed.

    Returns:
        Outputs ``[R, H, V]`` and the states behind the token, ``[R, H, K, V]``.
    """
    after, out = torch.empty_like(state), torch.empty_like(v)
    decay = g.exp()[..., None, None]
    probes, overlap = torch.stack((k, q), dim=-2), (q * k).sum(-1, keepdim=True)
    count = _rows_at_once(state)
    for start in range(0, state.shape[0], count):
        some = slice(start, start + count)
        before = state[some]
        probed = probes[some] @ before * decay[some]
        change = (v[some] - probed[..., 0, :]) * beta[some].unsqueeze(-1)
        torch.addcmul(probed[..., 1, :], overlap[some], change, out=out[some])
        torch.mul(before, decay[some], out=after[some])
        after[some].addcmul_(k[some].unsqueeze(-1), change.unsqueeze(-2))
    return out, after


def _rows_at_once(state: Tensor) -> int:
    """How many rows of ``state [R, H, K, V]`` :func:`step` takes at once."""
    rows = state.shape[0]
    if rows == 0 or state.device.type != "cpu":
        return max(1, rows)
    return max(1, _STEP_BYTES // state[0].nbytes)
