"""The command ``hypic-rag bench serve``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hypic_rag.evaluation import bench_cli as bench
from hypic_rag.server.cli import require_server_packages

__all__ = ["serve"]


def serve(
    model: bench.Model = "small",
    clients: Annotated[
        str, typer.Option(help="Clients that ask at the same time, comma-separated.")
    ] = "1,4,16",
    requests: Annotated[int, typer.Option(min=1, help="Requests of one round.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every number of clients.")] = 2,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="As of the server. [default: the server's]")
    ] = None,
    prepare_ahead: Annotated[
        bool | None, typer.Option(help="As of the server. [default: the server's]")
    ] = None,
    device: bench.Device = "auto",
    dtype: bench.Dtype = "float32",
    threads: bench.Threads = None,
    as_json: bench.AsJson = False,
) -> None:
    """Requests per second and time to first token of the server, against serial use."""
    require_server_packages()
    from hypic_rag.bench_serve.measure import measure_serving, with_tokenizer
    from hypic_rag.server.settings import ServerSettings

    counts = bench.numbers(clients)
    given = {"concurrency": concurrency, "prepare_ahead": prepare_ahead}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings = ServerSettings(queue=max(counts), timeout_s=3600.0, **chosen)
    loaded = with_tokenizer(bench.load_for_bench(model, device, dtype, threads))
    points = measure_serving(
        loaded,
        counts,
        requests=requests,
        max_tokens=max_tokens,
        rounds=rounds,
        settings=settings,
    )
    report = [point.to_json() for point in points]
    serial = report[0]
    for entry in report:
        entry["speedup"] = entry["requests_per_s"] / serial["requests_per_s"]
        entry["cpu_speedup"] = entry["requests_per_cpu_s"] / serial["requests_per_cpu_s"]
        bench.say(
            f"  {entry['way']:<12}{entry['requests_per_s']:>8.2f}/s {entry['speedup']:>6.2f}x"
            f"{entry['requests_per_cpu_s']:>8.2f} per processor second "
            f"{entry['cpu_speedup']:>6.2f}x   first token: median {entry['ttft_median']:.3f} s, "
            f"p95 {entry['ttft_p95']:.3f} s",
            as_json,
        )
    bench.finish(report, loaded, as_json)
