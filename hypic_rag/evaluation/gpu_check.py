"""Check and measure everything that needs a GPU: ``python -m hypic_rag.evaluation.gpu_check``.

First the Triton kernels against float64, with fresh random inputs, and fla's kernel if it's
installed; then whole passes by kernels against passes in plain torch and against the library; then
a table of times to the first token for random models in the shapes of Qwen3.5. It needs torch,
transformers, numpy, safetensors and, for the kernels, Triton; nothing of the store. Without a GPU
it runs a small table on the CPU, and the kernels only under Triton's interpreter
(``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypic_rag.config import Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.chain import Tokens, Walked, walk
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.layout import Layout, build_layout
from hypic_rag.engine.oracle import assemble_sequentially, recompute
from hypic_rag.engine.plan import plan_encoding, plan_request
from hypic_rag.engine.self_test import self_test
from hypic_rag.errors import HypicError
from hypic_rag.evaluation.random_models import random_model
from hypic_rag.evaluation.timing import require_equal
from hypic_rag.evaluation.ttft import Case, TtftResult, measure_ttft, random_tokens
from hypic_rag.families.quiet import quiet_library
from hypic_rag.operators import AffineMap, Dense
from hypic_rag.ops.choice import KernelChoice, best_kernels, has_triton
from hypic_rag.ops.fla_scan import TOLERANCE, deviation, has_fla, load_kernel
from hypic_rag.ops.gated_delta_rule import l2_normalize
from hypic_rag.ops.rope import rotate
from hypic_rag.segments import Segment
from hypic_rag.states import AttentionState, LinearState

__all__ = ["check_fla", "check_kernels", "check_passes", "main", "measure_table"]

_KERNEL_TOLERANCE = 2e-5
"""Relative to the largest value; float32 by tensor cores in three products (tf32x3)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; returns 0 if all results agree, 1 if not."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for the table")
    parser.add_argument("--shapes", nargs="+", default=None, help="shapes of random models")
    parser.add_argument("--lengths", nargs="+", type=int, default=None, help="prompt tokens")
    parser.add_argument("--segment-tokens", nargs="+", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="also write the results here")
    options = parser.parse_args(arguments)
    quiet_library()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    report: dict[str, Any] = {"environment": describe_environment(device)}
    print(json.dumps(report["environment"], indent=1), flush=True)
    if not gpu:
        print("no GPU is used: this tries the script out, and says nothing of one", flush=True)
    try:
        if has_triton() and (gpu or os.environ.get("TRITON_INTERPRET") == "1"):
            report["kernels"] = check_kernels(device)
        else:
            report["kernels"] = None
            print("kernels: not checked (they need a GPU, or Triton's interpreter)", flush=True)
        report["fla"] = check_fla(device) if has_fla() else None
        report["passes"] = check_passes(device)
        report["table"] = [
            result.to_json() | {"shape": shape}
            for shape, result in measure_table(
                device,
                options.shapes or (("0.8b", "4b") if gpu else ("tiny",)),
                options.lengths or ((4096, 8192, 16384, 32768) if gpu else (256, 512)),
                options.segment_tokens or ((512, 1024, 2048) if gpu else (64,)),
                options.budget,
                options.repeats,
            )
        ]
    except HypicError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def describe_environment(device: torch.device) -> dict[str, str]:
    """What the numbers were measured on."""
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    if has_triton():
        import triton

        found["triton"] = triton.__version__
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    found["device"] = str(device)
    return found


# -- kernels -----------------------------------------------------------------------------------


def check_kernels(device: torch.device) -> dict[str, float]:
    """Largest relative deviations of the kernels from their twins in float64.

    Raises:
        WrongResultError: one is too large.
    """
    gpu = device.type == "cuda"
    sizes = [(16, 128, 128), (3, 96, 192), (2, 20, 12)] if gpu else [(2, 16, 24), (1, 20, 12)]
    dtypes = [torch.float32, torch.bfloat16] if gpu else [torch.float32]
    found: dict[str, float] = {}
    for heads, keys, values in sizes:
        for dtype in dtypes:
            name = f"{heads}x{keys}x{values} {str(dtype).removeprefix('torch.')}"
            for kind, layout in (("walk", _hits(device)), ("capture", _captures(device))):
                found[f"{kind} {name}"] = _check_walk(layout, heads, keys, values, dtype, device)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        found[f"gather {str(dtype).removeprefix('torch.')}"] = _check_gather(
            device, dtype, tolerance
        )
    for name, worst in found.items():
        print(f"kernel {name}: {worst:.1e}", flush=True)
    return found


def check_fla(device: torch.device) -> dict[str, float | str]:
    """Largest relative deviations of fla's kernel, by size and dtype; or why there's none.

    What's printed as "not used" is served by the kernels above instead, so it's no failure.
    """
    found: dict[str, float | str] = {}
    for heads, keys, values in ((16, 128, 128), (3, 96, 192)):
        for dtype, tolerance in TOLERANCE.items():
            name = f"{heads}x{keys}x{values} {str(dtype).removeprefix('torch.')}"
            try:
                got = deviation(load_kernel(), device, dtype, heads, keys, values)
            except Exception as error:  # whatever a foreign package may raise
                found[name] = f"not used: {type(error).__name__}: {error}"
            else:
                found[name] = got if got <= tolerance else f"not used: deviates by {got:.1e}"
            shown = found[name]
            print(f"fla {name}: {shown if isinstance(shown, str) else f'{shown:.1e}'}", flush=True)
    return found


def _hits(device: torch.device) -> Layout:
    """Two requests with hits, misses and seams of several widths."""
    segments = [Segment(tuple(range(length))) for length in (30, 9, 150, 41)]
    seams = [Seam(4, 0), None, Seam(17, 3), Seam(0, 0)]
    plans = [
        plan_request(3, segments, seams, range(7)),
        plan_request(0, segments[2:], seams[2:], range(65)),
    ]
    return build_layout(plans, 4, device)


def _captures(device: torch.device) -> Layout:
    plans = [plan_encoding(2, Segment(tuple(range(n))), Seam(2, 1)) for n in (4, 20, 67, 201)]
    return build_layout([plan for plan in plans if plan], 4, device)


def _check_walk(
    layout: Layout, heads: int, keys: int, values: int, dtype: torch.dtype, device: torch.device
) -> float:
    from hypic_rag.engine.device_walk import DeviceTables

    count = layout.token_ids.shape[0]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    tokens = Tokens(
        q=(l2_normalize(normal(count, heads, keys)) * keys**-0.5).to(dtype),
        k=l2_normalize(normal(count, heads, keys)).to(dtype),
        v=normal(count, heads, values).to(dtype),
        g=-0.05 * torch.rand(count, heads, device=device),
        beta=torch.rand(count, heads, device=device),
    )
    interiors = [
        LinearState(
            AffineMap(Dense(normal(heads, keys, keys) * keys**-0.5), normal(heads, keys, values)),
            normal(3, 3),
        )
        for _ in layout.interiors
    ]
    initial = [normal(heads, keys, values) for _ in layout.plans]
    tables = DeviceTables(layout, device, KernelChoice.triton())
    got = tables.walker(interiors)(layout, tokens, initial, interiors)
    expected = walk(
        layout,
        Tokens(*(x.double() for x in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta))),
        [state.double() for state in initial],
        interiors,
    )
    pairs = list(zip(_tensors(got, layout), _tensors(expected, layout), strict=True))
    return max(
        require_equal("A Triton kernel against float64", mine, yours, _KERNEL_TOLERANCE)
        for mine, yours in pairs
    )


def _tensors(walked: Walked, layout: Layout) -> list[Tensor]:
    found = [walked.out, walked.states]
    for capture in layout.captures:
        captured = walked.maps[capture.request]
        assert isinstance(captured.transition, Dense)
        found += [captured.transition.matrix, captured.offset]
    return found


def _check_gather(device: torch.device, dtype: torch.dtype, tolerance: float) -> float:
    from hypic_rag.engine.device_walk import DeviceTables
    from hypic_rag.engine.layout import Write
    from hypic_rag.engine.packed import Cached, Spans

    angle = torch.randn(300, 16, device=device)
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))

    def random(tokens: int) -> tuple[Tensor, Tensor]:
        both = torch.randn(2, tokens, 2, 64, device=device, dtype=torch.float32).to(dtype)
        return both[0].transpose(0, 1), both[1].transpose(0, 1)

    base, computed = random(37), random(11)
    interiors = [AttentionState(*random(133)), AttentionState(*random(70))]
    spans = Spans(
        251,
        (Write(0, 4, 37), Write(4, 8, 174), Write(8, 11, 248)),
        (Cached(0, 41, 133), Cached(1, 178, 70)),
    )
    tables = DeviceTables(_hits(device), device, KernelChoice.triton())
    keys, values = tables.gather(0, base, spans, interiors, computed, (cos, sin))
    pieces = [(computed, 0, 4), None, (computed, 4, 8), None, (computed, 8, 11)]
    held = iter(interiors)
    raw_keys, raw_values = [], []
    for piece in pieces:
        if piece is None:
            state = next(held)
            raw_keys.append(state.keys)
            raw_values.append(state.values)
        else:
            (k, v), start, end = piece
            raw_keys.append(k[:, start:end])
            raw_values.append(v[:, start:end])
    turned = rotate(torch.cat(raw_keys, 1).float(), cos[37:251], sin[37:251])
    require_equal("Gathered values", values, torch.cat((base[1], *raw_values), 1), 0.0)
    expected = torch.cat((base[0].float(), turned), 1)
    return require_equal("Gathered keys", keys, expected, tolerance)


# -- passes ------------------------------------------------------------------------------------


def check_passes(device: torch.device) -> dict[str, float]:
    """Whole passes of a small model: the self-test, the sequential oracle, and kernels or not.

    Raises:
        SelfTestError, WrongResultError: results don't agree.
    """
    model = random_model("tiny", device=device)
    found = {"self-test": self_test(model)}
    base = recompute(model, random_tokens(model, 37, 0))[0]
    segments = tuple(Segment(random_tokens(model, n, n)) for n in (70, 3, 133))
    states = encode_segments(model, segments, Seam(4, 0), base, kernels=KernelChoice.torch())
    request = Request(segments, tuple(states), random_tokens(model, 9, 1), base, renewed=(0, 0, 50))
    plain = assemble(model, [request], kernels=KernelChoice.torch())[0].context.logits
    _, logits = assemble_sequentially(model, request)
    found["sequential oracle"] = require_equal(
        "Assembly against the sequential oracle", plain, logits[-1], 1e-3
    )
    best = best_kernels(device)
    if best != KernelChoice.torch():
        mine = encode_segments(model, segments, Seam(4, 0), base, kernels=best)
        again = replace(request, states=tuple(mine))
        found["kernels"] = require_equal(
            "Assembly by kernels against plain torch",
            assemble(model, [again], kernels=best)[0].context.logits,
            plain,
            1e-3,
        )
        # States in the host's memory, copied ahead of the layers that need them.
        host = replace(request, states=tuple(state and state.to("cpu") for state in mine))
        found["host states"] = require_equal(
            "Assembly from states in the host's memory",
            assemble(model, [host], kernels=best)[0].context.logits,
            plain,
            1e-3,
        )
    for name, worst in found.items():
        print(f"pass, {name}: {worst:.1e}", flush=True)
    return found


# -- the table ---------------------------------------------------------------------------------


def measure_table(
    device: torch.device,
    shapes: Sequence[str],
    lengths: Sequence[int],
    segment_tokens: Sequence[int],
    budget: float,
    repeats: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[str, TtftResult]]:
    """Times to the first token; what the budget of seconds leaves no time for is left out.

    Raises:
        WrongResultError: results that must agree don't.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(
        f"{'shape':>6}{'prompt':>8}{'segments':>12}{'computed':>10}{'recompute':>12}"
        f"{'assembly':>11}{'ratio':>8}{'floor':>10}{'states':>11}{'GB/s':>8}{'peak':>10}"
    )
    ends = clock() + budget
    results: list[tuple[str, TtftResult]] = []
    for shape in shapes:
        model = random_model(shape, device=device, dtype=dtype)
        for length in lengths:
            for tokens in segment_tokens:
                if clock() > ends:
                    print("the time for the table is used up; the rest is left out")
                    return results
                case = Case(max(1, length // tokens), tokens)
                result = measure_ttft(
                    model, case, repeats, ways=("recompute", "assembly", "floor"), check=False
                )
                results.append((shape, result))
                print(_row(shape, result), flush=True)
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def _row(shape: str, result: TtftResult) -> str:
    seconds = {name: sample.median for name, sample in result.samples.items()}
    case = result.case
    moved = result.state_bytes / seconds["assembly"] / 1e9
    return (
        f"{shape:>6}{case.length:>8}{f'{case.segments} x {case.tokens}':>12}{result.computed:>10}"
        f"{seconds['recompute'] * 1e3:>9.1f} ms{seconds['assembly'] * 1e3:>8.1f} ms"
        f"{result.ratio('recompute'):>7.1f}x{seconds['floor'] * 1e3:>7.1f} ms"
        f"{result.state_bytes / 1e6:>8.0f} MB{moved:>8.1f}{result.peak_bytes / 1e6:>7.0f} MB"
    )


if __name__ == "__main__":
    sys.exit(main())
