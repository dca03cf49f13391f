"""Plain scans by the chunk kernels of ``fla`` (flash-linear-attention), where it's installed.

Nothing needs it, and it's imported when a scan is first wanted. Before it serves a model, its
kernel is compared once, on the device and with the model's sizes, with
:func:`~hypic_rag.ops.gated_delta_rule.scan`; if it deviates or raises, one warning is logged and
this package's own operations do the work. It hasn't run on a GPU yet: only this module's use of it
has been tested, with a stand-in.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import threading
from typing import Protocol

import torch
from torch import Tensor

from hypic_rag.ops.gated_delta_rule import l2_normalize, scan

__all__ = ["TOLERANCE", "FlaKernel", "checked_kernel", "deviation", "has_fla", "load_kernel"]

_log = logging.getLogger(__name__)

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""By the dtypes that are served: the largest deviation, relative to the largest value.

Not float32: fla's older releases refuse it, and the others round it to TF32.
"""

_LENGTHS = (70, 3, 130)
"""Tokens of the sequences that are compared: less than a chunk, a few, and several chunks."""

_CHECKING = threading.Lock()


class FlaKernel(Protocol):
    """``fla.ops.gated_delta_rule.chunk_gated_delta_rule``, as far as it's used here.

    Heads stand behind tokens: ``q, k [1, N, H, K]``, ``v [1, N, H, V]``, ``g, beta [1, N, H]``;
    ``initial_state`` and the final one are ``[B, H, K, V]`` for the ``B`` sequences that lie behind
    one another, from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs ``[1, N, H, V]`` and the final states."""


@functools.cache
def has_fla() -> bool:
    """Whether ``fla`` is installed; it isn't imported."""
    return importlib.util.find_spec("fla") is not None


def load_kernel() -> FlaKernel:
    """Import the kernel; raises what the import raises."""
    kernel: FlaKernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return kernel


def scan_rows(
    kernel: FlaKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    bounds: Tensor,
    initial: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Equation (2) over sequences of any lengths that lie behind one another.

    Args:
        kernel: fla's.
        q, k: ``[N, H, K]``, normalised (and q scaled) already.
        v: ``[N, H, V]``.
        g, beta: ``[N, H]``, float32.
        bounds: where the sequences begin, and where the last one ends ``[B + 1]``, int64.
        initial: states in front ``[B, H, K, V]``, float32.
        dtype: in which the kernel multiplies.

    Returns:
        Outputs ``[N, H, V]`` and final states ``[B, H, K, V]``, float32.
    """

    def packed(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).unsqueeze(0).contiguous()

    out, states = kernel(
        packed(q, dtype),
        packed(k, dtype),
        packed(v, dtype),
        packed(g, torch.float32),
        packed(beta, torch.float32),
        scale=1.0,
        initial_state=initial.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=bounds,
    )
    return out.squeeze(0).float(), states.float()


def checked_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, keys: int, values: int
) -> FlaKernel | None:
    """The kernel for layers of this size, or None (with one warning) if it can't be trusted.

    The answer for a size is remembered. Dtypes that aren't in :data:`TOLERANCE` get None.
    """
    if dtype not in TOLERANCE:
        return None
    with _CHECKING:
        return _checked(device, dtype, heads, keys, values)


@functools.cache
def _checked(
    device: torch.device, dtype: torch.dtype, heads: int, keys: int, values: int
) -> FlaKernel | None:
    try:
        kernel = load_kernel()
        found = deviation(kernel, device, dtype, heads, keys, values)
    except Exception as error:  # whatever a foreign package may raise
        _log.warning("fla isn't used: its kernel raised %s: %s", type(error).__name__, error)
        return None
    if not found <= TOLERANCE[dtype]:
        _log.warning(
            "fla isn't used: on %s, its kernel's results for %d heads of %d x %d differ from the "
            "reference's by %.2g of the largest value (allowed: %g).",
            device,
            heads,
            keys,
            values,
            found,
            TOLERANCE[dtype],
        )
        return None
    return kernel


def deviation(
    kernel: FlaKernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    keys: int,
    values: int,
) -> float:
    """How far outputs and states are from the reference's on random inputs.

    Relative to the largest value of each; NaN if the kernel gives one.
    """
    generator = torch.Generator().manual_seed(0)
    count = sum(_LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    # Both get the inputs as the kernel reads them, so that only its own rounding counts.
    q = (l2_normalize(normal(count, heads, keys)) * keys**-0.5).to(dtype).float()
    k = l2_normalize(normal(count, heads, keys)).to(dtype).float()
    v = normal(count, heads, values).to(dtype).float()
    g = -0.1 * normal(count, heads).abs()
    beta = 2 * torch.sigmoid(normal(count, heads))
    initial = normal(len(_LENGTHS), heads, keys, values)
    ends = torch.tensor(_LENGTHS).cumsum(0).tolist()
    bounds = torch.tensor([0, *ends], device=device)
    out, states = scan_rows(kernel, q, k, v, g, beta, bounds, initial, dtype)
    worst = 0.0
    for row, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):

        def heads_first(x: Tensor, start: int = start, end: int = end) -> Tensor:
            return x[start:end].transpose(0, 1).unsqueeze(0)

        expected, final = scan(
            heads_first(q),
            heads_first(k),
            heads_first(v),
            heads_first(g),
            heads_first(beta),
            initial[row : row + 1],
        )
        mine = heads_first(out)
        for got, wanted in ((mine, expected), (states[row : row + 1], final)):
            error = float((got - wanted).abs().max() / wanted.abs().max())
            worst = error if not error <= worst else worst
            if worst != worst:
                return worst
    return worst
