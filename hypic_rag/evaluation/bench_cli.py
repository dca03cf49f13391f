"""The commands ``hypic-rag bench ttft``, ``cold``, ``ingest`` and ``load``.

``hypic-rag bench serve`` has a room of its own, above the server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hypic_rag.errors import ConfigError

if TYPE_CHECKING:
    from hypic_rag.evaluation.timing import Sample
    from hypic_rag.families.model import HybridModel

__all__ = [
    "AsJson",
    "Device",
    "Dtype",
    "Model",
    "Threads",
    "app",
    "finish",
    "load_for_bench",
    "numbers",
    "say",
]

app = typer.Typer(
    name="bench",
    help="Measure speed; results are compared before any ratio is printed.",
    no_args_is_help=True,
)

Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="random:100m, random:0.5b, random:0.8b or random:4b for random weights, or what "
        "load_model takes.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads of this process.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Runs of each way.")]
Clock = Annotated[
    str,
    typer.Option("--clock", help="wall, or cpu: processor time, for a machine that's busy."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Also draw an SVG chart here.")]


@app.command()
def ttft(
    model: Model = "random:100m",
    segments: Annotated[str, typer.Option(help="Segments per prompt, comma-separated.")] = "8",
    tokens: Annotated[str, typer.Option(help="Tokens per segment, comma-separated.")] = "512",
    question: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 48,
    seam: Annotated[str, typer.Option(help="default, none, paper or HEAD/TAIL.")] = "default",
    ways: Annotated[
        str | None, typer.Option(help="What to time, comma-separated. [default: everything]")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Also time so many requests in one pass against singly.")
    ] = 1,
    missing: Annotated[
        int,
        typer.Option(min=0, help="Also time requests that lack the states of so many segments."),
    ] = 0,
    repairs: Annotated[
        str | None, typer.Option(help="Also time so many repaired tokens, comma-separated.")
    ] = None,
    repeats: Repeats = 5,
    device: Device = "auto",
    dtype: Dtype = "float32",
    threads: Threads = None,
    clock: Clock = "wall",
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time to the first token: recompute, prefix reuse, assembly, and assembly's floor."""
    from hypic_rag.config import Seam
    from hypic_rag.evaluation.ttft import (
        WAYS,
        Case,
        measure_batch,
        measure_misses,
        measure_repairs,
        measure_ttft,
    )

    chosen = WAYS if ways is None else tuple(part.strip() for part in ways.split(","))
    unknown = set(chosen) - set(WAYS)
    if unknown or "assembly" not in chosen:
        raise ConfigError(f"The ways to time are {', '.join(WAYS)}, and assembly is always one.")
    timer = _clock(clock)
    loaded = load_for_bench(model, device, dtype, threads)
    report: list[dict[str, Any]] = []
    for count in numbers(segments):
        for length in numbers(tokens):
            case = Case(count, length, question, seam=Seam.parse(seam))
            say(f"{count} x {length} tokens, {case.length} in all", as_json)
            result = measure_ttft(loaded, case, repeats, ways=chosen, clock=timer)
            entry = result.to_json()
            for name, difference in result.differences.items():
                say(f"  {name}: logits differ by {difference:.1e} of the largest", as_json)
            for name, sample in result.samples.items():
                say(_line(name, sample, result.samples["assembly"]), as_json)
            say(
                f"  states {result.state_bytes / 1e6:.0f} MB, cache "
                f"{result.cache_bytes / 1e6:.0f} MB, peak {result.peak_bytes / 1e6:.0f} MB",
                as_json,
            )
            if batch > 1:
                samples = measure_batch(loaded, case, batch, repeats, timer)
                entry["batch"] = {name: sample.to_json() for name, sample in samples.items()}
                for name, sample in samples.items():
                    say(_line(f"{name} of {batch}", sample, samples["batch"]), as_json)
            if missing:
                samples = measure_misses(loaded, case, missing, repeats, timer)
                entry["missing"] = {name: sample.to_json() for name, sample in samples.items()}
                for name, sample in samples.items():
                    say(_line(f"{missing} missing, {name}", sample, samples["one pass"]), as_json)
            if repairs is not None:
                samples = measure_repairs(loaded, case, numbers(repairs), repeats, timer)
                entry["repairs"] = {name: sample.to_json() for name, sample in samples.items()}
                for name, sample in samples.items():
                    say(_line(f"{name} tokens repaired", sample, samples["0"]), as_json)
            report.append(entry)
    if plot is not None:
        _plot_ttft(plot, report)
    finish(report, loaded, as_json)


@app.command()
def cold(
    model: Model = "random:100m",
    segments: Annotated[int, typer.Option(min=1, help="Segments of the request.")] = 11,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens per segment.")] = 600,
    workers: Annotated[str, typer.Option(help="Pool sizes, comma-separated.")] = "1,2",
    simulate: Annotated[
        str, typer.Option(help="Pool sizes to simulate from measured times, comma-separated.")
    ] = "1,2,4,8",
    piece_tokens: Annotated[
        int | None, typer.Option(min=1, help="Also split segments into pieces of so many tokens.")
    ] = None,
    simulated_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens per simulated segment. [default: tokens]")
    ] = None,
    repeats: Repeats = 1,
    dtype: Dtype = "float32",
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Encoding a cold request's segments by pools of 1-thread workers."""
    from hypic_rag.evaluation.latency import measure_cold, simulate_workers

    loaded = load_for_bench(model, "cpu", dtype, None)
    counts, simulated_counts = numbers(workers), numbers(simulate)
    measured = measure_cold(loaded, segments, tokens, counts, repeats, piece_tokens)
    first = next(iter(measured.whole.values())).median
    for title, samples in (("whole", measured.whole), ("split", measured.split)):
        for name, sample in samples.items():
            say(
                f"  {title}, {_workers(name)}: {sample.median:.2f} s, {first / sample.median:.2f}x",
                as_json,
            )
    if measured.differences:
        say(f"  split states differ from whole ones: {_shares(measured.differences)}", as_json)
    simulated = simulate_workers(
        loaded, segments, simulated_tokens or tokens, simulated_counts, piece_tokens
    )
    say(
        f"  simulated from times on one worker, {segments} x {simulated['tokens']} tokens (if n "
        "equal segments stay whole, w workers take ceil(n / w) times as long as for one):",
        as_json,
    )
    for title, part in (("whole", simulated), ("split", simulated.get("split", {}))):
        for name, speedup in part.get("speedups", {}).items():
            say(f"  {title}, {_workers(name)}: {speedup:.2f}x", as_json)
    report = {
        "segments": segments,
        "tokens": tokens,
        "piece_tokens": piece_tokens,
        "seconds": {name: sample.to_json() for name, sample in measured.whole.items()},
        "split_seconds": {name: sample.to_json() for name, sample in measured.split.items()},
        "split_differences": measured.differences,
        "simulated": simulated,
    }
    if plot is not None:
        _plot_cold(plot, report)
    finish(report, loaded, as_json)


@app.command()
def ingest(
    model: Model = "random:100m",
    segments: Annotated[int, typer.Option(min=1, help="Segments.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens per segment.")] = 512,
    tiers: Annotated[
        bool, typer.Option("--tiers", help="Also time requests by where their states lie.")
    ] = False,
    repeats: Repeats = 3,
    dtype: Dtype = "float32",
    threads: Threads = None,
    clock: Clock = "wall",
    folder: Annotated[Path | None, typer.Option(help="Where to put the store.")] = None,
    as_json: AsJson = False,
) -> None:
    """Encoding and storing against the library's plain prefill of the same tokens."""
    from hypic_rag.evaluation.latency import measure_ingest, measure_tiers
    from hypic_rag.evaluation.ttft import Case

    timer = _clock(clock)
    loaded = load_for_bench(model, "cpu", dtype, threads)
    samples = measure_ingest(loaded, segments, tokens, repeats, folder, timer)
    for name, sample in samples.items():
        say(_line(name, sample, samples["prefill"]), as_json)
    report: dict[str, Any] = {
        "segments": segments,
        "tokens": tokens,
        "seconds": {name: sample.to_json() for name, sample in samples.items()},
    }
    if tiers:
        held = measure_tiers(loaded, Case(segments, tokens), repeats, folder, timer)
        report["tiers"] = {name: sample.to_json() for name, sample in held.items()}
        for name, sample in held.items():
            say(_line(f"states: {name}", sample, held["host"]), as_json)
    finish(report, loaded, as_json)


@app.command()
def load(
    model: Model = "random:100m",
    rates: Annotated[str, typer.Option(help="Requests per second, comma-separated.")] = "0.1,0.5,1",
    requests: Annotated[int, typer.Option(min=1, help="Requests per rate.")] = 20,
    segments: Annotated[int, typer.Option(min=1, help="Segments per request.")] = 4,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens per segment.")] = 256,
    chunks: Annotated[int, typer.Option(min=1, help="Different segments.")] = 40,
    skew: Annotated[float, typer.Option(help="Zipf's exponent of their popularity.")] = 1.0,
    ways: Annotated[str, typer.Option(help="Of recompute and assembly.")] = "recompute,assembly",
    device: Device = "auto",
    dtype: Dtype = "float32",
    threads: Threads = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time to the first token under load: Poisson arrivals, segments reused by Zipf's law."""
    from hypic_rag.evaluation.latency import measure_load
    from hypic_rag.evaluation.ttft import Case

    try:
        arriving = [float(part) for part in rates.split(",")]
    except ValueError:
        raise ConfigError(f"Rates are numbers such as 0.1,0.5, not {rates!r}.") from None
    chosen = tuple(part.strip() for part in ways.split(","))
    if set(chosen) - {"recompute", "assembly"}:
        raise ConfigError(f"The ways are recompute and assembly, not {ways!r}.")
    loaded = load_for_bench(model, device, dtype, threads)
    points = measure_load(
        loaded,
        Case(segments, tokens),
        arriving,
        requests=requests,
        chunks=chunks,
        skew=skew,
        ways=chosen,
    )
    report = [point.to_json() for point in points]
    for entry in report:
        say(
            f"  {entry['way']} at {entry['rate']:g}/s: mean {entry['mean']:.3f} s, p95 "
            f"{entry['p95']:.3f} s, {entry['reused']:.0%} of segments reused",
            as_json,
        )
    if plot is not None:
        _plot_load(plot, report)
    finish(report, loaded, as_json)


def load_for_bench(name: str, device: str, dtype: str, threads: int | None) -> HybridModel:
    """The model of the option ``--model``, on so many threads."""
    import torch

    from hypic_rag.engine.engine import load_model
    from hypic_rag.evaluation.random_models import random_model
    from hypic_rag.families.quiet import quiet_library

    quiet_library()
    if threads is not None:
        torch.set_num_threads(threads)
    if not name.startswith("random:"):
        return load_model(name, device=device, dtype=dtype)
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise ConfigError(f"Unknown dtype {dtype!r}: expected one of {', '.join(known)}.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return random_model(name.removeprefix("random:"), device=device, dtype=known[dtype])


def _clock(name: str) -> Callable[[], float]:
    import time

    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    if name not in clocks:
        raise ConfigError(f"The clock is 'wall' or 'cpu', not {name!r}.")
    return clocks[name]


def numbers(text: str) -> list[int]:
    """Whole numbers from 1, separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ConfigError(f"Expected whole numbers from 1, separated by commas, not {text!r}.")
    return found


def _line(name: str, sample: Sample, reference: Sample) -> str:
    spread = f"{min(sample.seconds):.3f} to {max(sample.seconds):.3f}"
    ratio = sample.median / reference.median
    return (
        f"  {name:<16}{sample.median:>9.3f} s ({spread}, {len(sample.seconds)} runs){ratio:>8.2f}x"
    )


def _workers(count: str) -> str:
    return f"{count} worker{'' if count == '1' else 's'}"


def _shares(differences: dict[str, float]) -> str:
    """Relative differences by part, in words."""
    names = {"matrix": "T", "factor": "T", "offset": "e", "conv_tail": "convolution"}
    return ", ".join(f"{names.get(part, part)} {share:.1e}" for part, share in differences.items())


def say(text: str, as_json: bool) -> None:
    """Print a line of the report for people; JSON has stdout for itself."""
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def finish(results: object, model: HybridModel, as_json: bool) -> None:
    """Print what was measured, and on what, as JSON if that's asked for."""
    import platform

    import torch

    if as_json:
        about = {
            "model": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        print(json.dumps({"about": about, "results": results}, indent=2))


def _plot_ttft(path: Path, report: Sequence[dict[str, Any]]) -> None:
    from hypic_rag.evaluation.charts import Axis, Point, Series, chart

    names = list(report[0]["seconds"])
    by_segments = len({entry["segments"] for entry in report}) > 1
    x = "segments" if by_segments else "prompt_tokens"
    series = [
        Series(
            name,
            tuple(
                Point(entry[x], timed["median"], timed["min"], timed["max"])
                for entry in report
                if (timed := entry["seconds"].get(name))
            ),
        )
        for name in names
    ]
    label = "segments" if by_segments else "tokens of the prompt"
    title = "Time to first token"
    path.write_text(chart(series, Axis(label), Axis("seconds", log=True), title), encoding="utf-8")


def _plot_cold(path: Path, report: dict[str, Any]) -> None:
    from hypic_rag.evaluation.charts import Axis, Point, Series, chart

    measured = report["seconds"]
    first = next(iter(measured.values()))["median"]
    series = [
        Series(title, tuple(Point(int(n), first / timed["median"]) for n, timed in samples.items()))
        for title, samples in (("measured", measured), ("measured, split", report["split_seconds"]))
        if samples
    ]
    simulated = report["simulated"]
    for name, part in (("simulated", simulated), ("simulated, split", simulated.get("split"))):
        if part:
            points = tuple(Point(int(n), value) for n, value in part["speedups"].items())
            series.append(Series(name, points))
    path.write_text(
        chart(series, Axis("workers"), Axis("times faster"), "Cold prefill"), encoding="utf-8"
    )


def _plot_load(path: Path, report: Sequence[dict[str, Any]]) -> None:
    from hypic_rag.evaluation.charts import Axis, Point, Series, chart

    series = [
        Series(way, tuple(Point(e["rate"], e["mean"]) for e in report if e["way"] == way))
        for way in dict.fromkeys(entry["way"] for entry in report)
    ]
    axes = Axis("requests per second", log=True), Axis("mean seconds to first token", log=True)
    path.write_text(chart(series, *axes, "Time to first token under load"), encoding="utf-8")
