"""fla's kernel behind its adapter. There's no GPU here: a stand-in follows fla's conventions."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from models import tiny_model
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hypic_rag.config import Seam
from hypic_rag.engine.assemble import Assembly, Request, assemble
from hypic_rag.engine.chain import FlaWalk, Tokens, walk
from hypic_rag.engine.context import linear_state
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.layout import build_layout
from hypic_rag.engine.plan import plan_encoding, plan_request
from hypic_rag.evaluation import gpu_check
from hypic_rag.families.model import HybridModel, wrap
from hypic_rag.ops import fla_scan
from hypic_rag.ops.choice import KernelChoice, best_kernels
from hypic_rag.ops.gated_delta_rule import l2_normalize
from hypic_rag.segments import Segment

CPU = torch.device("cpu")


class Fla:
    """Counts its calls; computes with the library's own torch implementation."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda out: out) -> None:
        self.calls: list[torch.dtype] = []
        self._change = change

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
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append(q.dtype)
        assert q.dtype == k.dtype == v.dtype
        assert q.shape == k.shape and q.shape[0] == 1 and v.shape[2] % k.shape[2] == 0
        assert g.shape == beta.shape == v.shape[:3] and g.dtype == torch.float32
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        assert cu_seqlens is not None and initial_state is not None
        assert cu_seqlens.dtype == torch.int64 and len(initial_state) == len(cu_seqlens) - 1
        # The library's always scales by K^-0.5, as fla does if it's given no scale.
        factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
        outs, states = [], []
        ends = cu_seqlens.tolist()
        assert ends[0] == 0 and ends[-1] == q.shape[1]
        for row, (start, end) in enumerate(itertools.pairwise(ends)):
            part = slice(start, end)
            out, state = torch_chunk_gated_delta_rule(
                q[:, part].float() * factor,
                k[:, part].float(),
                v[:, part].float(),
                g[:, part],
                beta[:, part],
                initial_state=initial_state[row : row + 1],
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            outs.append(out)
            states.append(state)
        final = torch.cat(states) if output_final_state else None
        return self._change(torch.cat(outs, 1)).to(q.dtype), final


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object], None]]:
    """Puts a stand-in for fla among the modules."""

    def put(kernel: object) -> None:
        for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = kernel  # type: ignore[attr-defined]
        fla_scan._checked.cache_clear()

    yield put
    fla_scan._checked.cache_clear()


def random_tokens(count: int, heads: int, keys: int, values: int) -> Tokens:
    generator = torch.Generator().manual_seed(count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Tokens(
        q=l2_normalize(normal(count, heads, keys)) * keys**-0.5,
        k=l2_normalize(normal(count, heads, keys)),
        v=normal(count, heads, values),
        g=-0.05 * torch.rand(count, heads, generator=generator),
        beta=2 * torch.rand(count, heads, generator=generator),
    )


@pytest.mark.parametrize(("heads", "keys", "values"), [(4, 16, 24), (1, 20, 12), (3, 8, 8)])
def test_the_walk_equals_the_walk_in_torch(heads: int, keys: int, values: int) -> None:
    plans = [plan_request(3, [], [], range(n)) for n in (70, 1, 64, 133)]
    layout = build_layout(plans, 4, CPU)
    assert FlaWalk.serves(layout)
    tokens = random_tokens(268, heads, keys, values)
    initial = [torch.randn(heads, keys, values), None, torch.randn(heads, keys, values), None]
    fla = Fla()
    got = FlaWalk(fla, torch.float32, FlaWalk.bounds_of(layout))(layout, tokens, initial, [])
    expected = walk(layout, tokens, initial, [])
    assert fla.calls == [torch.float32]
    torch.testing.assert_close(got.out, expected.out, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(got.states, expected.states, rtol=1e-4, atol=2e-5)


def test_only_rows_are_served() -> None:
    """Cached interiors, captures and a few tokens are left to the other walks."""
    segments = [Segment(tuple(range(90)))]
    assert FlaWalk.serves(build_layout([plan_request(0, segments, [None], range(9))], 4, CPU))
    reusing = plan_request(0, segments, [Seam(4, 0)], range(90))
    encoding = plan_encoding(0, segments[0], Seam(4, 0))
    assert encoding is not None
    for plan in (reusing, encoding, plan_request(0, [], [], range(63))):
        assert not FlaWalk.serves(build_layout([plan], 4, CPU))


@pytest.fixture(scope="module")
def model() -> HybridModel:
    """In half precision, with two value heads per key head and K ≠ V."""
    module = tiny_model.__wrapped__("qwen3_5").module.to(torch.bfloat16)
    return wrap(module, name="qwen3_5 bfloat16")


def passes(model: HybridModel, fla: bool) -> list[Assembly]:
    """Two requests without cached segments, in one pass, behind one with a base of theirs."""
    kernels = KernelChoice(fla=fla)
    base = assemble(model, [Request((), (), tuple(range(90)))], kernels=kernels)[0].context
    requests = [Request((), (), tuple(range(n, n + 80)), base) for n in (1, 40)]
    return assemble(model, requests, kernels=kernels)


def test_it_serves_a_model(install: Callable[[object], None], model: HybridModel) -> None:
    fla = Fla()
    install(fla)
    got, expected = passes(model, True), passes(model, False)
    linear = sum(hasattr(spec, "key_dim") for spec in model.layers)
    # Once to check it, and then for every linear layer of both passes.
    assert fla.calls == [torch.bfloat16] * (1 + 2 * linear)
    for mine, yours in zip(got, expected, strict=True):
        scale = yours.context.logits.abs().max()
        assert (mine.context.logits - yours.context.logits).abs().max() < 0.05 * scale
        for index, spec in enumerate(model.layers):
            if hasattr(spec, "key_dim"):
                x, y = (linear_state(each.context.cache, index)[1] for each in (mine, yours))
                assert x.dtype == y.dtype == torch.float32
                assert (x - y).norm() < 0.05 * y.norm()


def test_it_leaves_cached_segments_alone(
    install: Callable[[object], None], model: HybridModel
) -> None:
    fla = Fla()
    install(fla)
    segments = [Segment(tuple(range(100)))]
    kernels = KernelChoice(fla=True)
    states = encode_segments(model, segments, Seam(4, 0), kernels=kernels)
    assemble(model, [Request(tuple(segments), tuple(states), (1,) * 70)], kernels=kernels)
    assert not fla.calls


def test_float32_isnt_served(install: Callable[[object], None]) -> None:
    fla = Fla()
    install(fla)
    passes(tiny_model("qwen3_5"), True)
    assert not fla.calls


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("does not support this device")


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (Fla(lambda out: out * 1.1), "differ"),
        (Fla(lambda out: out * torch.nan), "differ"),
        (refuse, "AssertionError: does not support this device"),
        (None, "TypeError"),
    ],
    ids=["wrong", "nan", "raises", "no kernel"],
)
def test_it_isnt_used_if_it_cant_be_trusted(
    install: Callable[[object], None],
    model: HybridModel,
    kernel: object,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(kernel)
    with caplog.at_level(logging.WARNING):
        got = passes(model, True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "fla isn't used" in caplog.text and said in caplog.text
    for mine, yours in zip(got, passes(model, False), strict=True):
        assert torch.equal(mine.context.logits, yours.context.logits)


def test_a_wrong_final_state_is_seen(install: Callable[[object], None]) -> None:
    """As from a kernel whose states lie the other way round, where K = V hides it."""

    def transposed(*arguments: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        out, state = Fla()(*arguments, **options)  # type: ignore[arg-type]
        assert state is not None
        return out, state.transpose(-1, -2)

    install(transposed)
    assert fla_scan.checked_kernel(CPU, torch.bfloat16, 2, 16, 16) is None
    install(Fla())
    assert fla_scan.checked_kernel(CPU, torch.bfloat16, 2, 16, 16) is not None


def test_the_check_on_a_gpu_tells_of_it(
    install: Callable[[object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(Fla())
    found = gpu_check.check_fla(CPU)
    assert len(found) == 4 and all(isinstance(value, float) for value in found.values())
    install(refuse)
    assert all("not used" in str(value) for value in gpu_check.check_fla(CPU).values())
    assert capsys.readouterr().out.count("fla ") == 8


def test_it_is_chosen_on_a_gpu_where_its_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (True, False):
        monkeypatch.setattr("hypic_rag.ops.choice.has_fla", lambda installed=installed: installed)
        assert best_kernels(torch.device("cuda")).fla is installed
        assert best_kernels(CPU) == KernelChoice.torch()


def test_its_not_imported_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    script = (
        "import torch, hypic_rag.engine.engine\n"
        "from hypic_rag.ops.choice import best_kernels\n"
        "assert best_kernels(torch.device('cuda')).fla"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": path}
    )
