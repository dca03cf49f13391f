"""Attention, convolution, rotation and linear layers against their plainest forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hypic_rag.ops import attention, linear
from hypic_rag.ops.attention import attend_reference, attend_run
from hypic_rag.ops.linear import accelerate, apply_linear, gated_feed_forward, multiply
from hypic_rag.ops.rope import rotate, rotate_
from hypic_rag.ops.short_conv import convolve, convolve_windows


@pytest.mark.parametrize(
    ("count", "length"), [(1, 1), (1, 90), (4, 4), (4, 5), (7, 130), (63, 63), (65, 200)]
)
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (6, 2, 24), (3, 3, 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_run_attends_to_what_precedes(
    count: int, length: int, heads: int, groups: int, width: int, masked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(count + length)
    queries = torch.randn(heads, count, width)
    keys, values = torch.randn(groups, length, width), torch.randn(groups, length, width)
    if masked:
        monkeypatch.setattr(attention, "_attend_in_two", attention._attend_masked)
        monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    got = attend_run(queries, keys, values, 0.3)
    expected = attend_reference(queries, keys, values, 0.3)
    assert got.shape == (count, heads * width)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_low_precision_attention_stays_close() -> None:
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(n, m, 32) for n, m in ((4, 9), (2, 300), (2, 300)))
    expected = attend_reference(queries, keys, values, 0.2)
    got = attend_run(queries.bfloat16(), keys.bfloat16(), values.bfloat16(), 0.2)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=0.03)


def test_no_queries_give_no_rows() -> None:
    assert attend_run(
        torch.zeros(4, 0, 8), torch.ones(2, 3, 8), torch.ones(2, 3, 8), 1.0
    ).shape == (
        0,
        32,
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5, 255, 256, 257, 600])
@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_convolution(count: int, kernel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    x, weight = torch.randn(count, 6, dtype=dtype), torch.randn(6, kernel, dtype=dtype)
    padded = F.pad(x.double().t(), (kernel - 1, 0)).unsqueeze(0)
    expected = F.conv1d(padded, weight.double().unsqueeze(1), groups=6)[0].t()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}[dtype]
    got = convolve(x, weight)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
    windows = torch.stack([padded[0, :, i : i + kernel].t() for i in range(count)]).to(dtype)
    torch.testing.assert_close(
        convolve_windows(windows, weight).double(), expected, rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
def test_rotation_in_place_is_the_same_to_the_bit(dtype: torch.dtype, table: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 11, 16).to(dtype)
    angle = torch.randn(11, 4)
    cos, sin = (torch.cat((f(angle), f(angle)), -1).to(table) for f in (torch.cos, torch.sin))
    expected = rotate(x, cos, sin)
    assert torch.equal(rotate_(x, cos, sin), expected)
    assert torch.equal(rotate_(x, cos[:, :0], sin[:, :0]), expected)


@pytest.mark.parametrize("rows", [1, 3, 80, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_products_agree_with_plain_torch(
    rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rows)
    module = nn.Linear(257, 301, bias=bias)
    x = torch.randn(rows, 257)
    with torch.inference_mode():
        torch.testing.assert_close(apply_linear(module, x), module(x), rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(linear, "_onednn_serves", lambda _x, _weight: False)
        assert torch.equal(apply_linear(module, x), module(x))
    module(x).sum().backward()
    expected = module.weight.grad
    module.weight.grad = None
    multiply(x, module.weight, module.bias).sum().backward()
    assert expected is not None
    torch.testing.assert_close(module.weight.grad, expected)


def test_hooks_and_other_classes_are_respected() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    x = torch.ones(2, 300)
    adapted = Adapted(300, 300)
    hooked = nn.Linear(300, 300)
    hooked.register_forward_hook(lambda _module, _inputs, output: output * 2)
    with torch.inference_mode():
        for module in (adapted, hooked):
            assert torch.equal(apply_linear(module, x), module(x))


def test_feed_forward_of_known_parts_only() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(64, 96), nn.Linear(64, 96)
            self.down_proj, self.act_fn = nn.Linear(96, 64), nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    dense, x = Dense(), torch.randn(70, 64)
    with torch.inference_mode():
        torch.testing.assert_close(gated_feed_forward(dense, x), dense(x), rtol=1e-4, atol=1e-5)
        dense.extra = nn.Identity()
        assert gated_feed_forward(dense, x) is None


def test_accelerated_models_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.GELU(), nn.Linear(400, 200, bias=False))
    x = torch.randn(2, 50, 300)
    expected = model(x)
    accelerate(model)
    used = []
    real = linear.multiply
    monkeypatch.setattr(linear, "multiply", lambda *args: used.append(1) or real(*args))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
    assert len(used) == 2
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight"]
