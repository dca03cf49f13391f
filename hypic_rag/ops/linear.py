"""Linear layers of loaded models, by the fastest matrix product at hand.

On x86 processors PyTorch multiplies float32 matrices with MKL, which is slow on those of other
makers: for the few dozen rows of a packed pass oneDNN, which ships with PyTorch too, was measured
3 to 5 times faster on an AMD EPYC. It reads the same weights; nothing is copied or converted.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["accelerate", "apply_linear", "gated_feed_forward", "multiply"]

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_POINTWISE = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_LEAST_WORK = 1 << 16
"""Multiplications below which the choice doesn't matter."""


def _onednn_serves(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and _IS_X86
        and _POINTWISE is not None
        and bool(torch.backends.mkldnn.enabled)
        and weight.is_contiguous()
        and x.numel() * weight.shape[0] >= _LEAST_WORK
    )


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., K] @ weightᵀ [K, N] + bias``, as :func:`torch.nn.functional.linear`.

    ``torch.backends.mkldnn.enabled = False`` makes this plain PyTorch.
    """
    # An operator of PyTorch's own compiler; it has no gradient, and none is needed here.
    if not torch.is_grad_enabled() and _onednn_serves(x, weight):
        assert _POINTWISE is not None
        product: Tensor = _POINTWISE(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``; a plain linear layer without hooks goes through :func:`multiply`.

    Adapters, quantised layers and everything else that isn't exactly ``nn.Linear`` run as they are.
    """
    if type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks:
        return multiply(x, module.weight, module.bias)
    result: Tensor = module(x)
    return result


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return multiply(input, self.weight, self.bias)


def accelerate(model: nn.Module) -> None:
    """Let every plain linear layer of ``model`` run through :func:`multiply`, whoever calls it.

    For models that run whole through their library; the weights stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear


def gated_feed_forward(mlp: nn.Module, x: Tensor) -> Tensor | None:
    """``down(act(gate(x)) * up(x))`` for ``x [N, hidden]``.

    None if ``mlp`` isn't made of exactly these parts, as sparse layers aren't.
    """
    parts = dict(mlp.named_children())
    if set(parts) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    if mlp._forward_hooks or mlp._forward_pre_hooks:
        return None
    inner = parts["act_fn"](apply_linear(parts["gate_proj"], x))
    return apply_linear(parts["down_proj"], inner.mul_(apply_linear(parts["up_proj"], x)))
