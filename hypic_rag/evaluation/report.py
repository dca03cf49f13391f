"""A verification as a self-contained HTML page and as a table on the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.table import Table

from hypic_rag.evaluation.charts import Axis, Point, Series, chart
from hypic_rag.evaluation.metrics import Interval
from hypic_rag.evaluation.verify import VariantReport, VerifyReport

__all__ = ["print_report", "to_html", "to_table"]

_WIDEST = 1000

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px;
       padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #ddd; }
svg { font: 12px system-ui, sans-serif; fill: #222; max-width: 100%; }
.grid { stroke: #e4e4e4; stroke-width: 1; }
.note { color: #666; }
"""


def columns(report: VerifyReport) -> list[str]:
    """Headings of the main table."""
    scored = [name for name in ("exact_match", "token_f1", "rouge_l") if _scored(report, name)]
    return [
        "mode",
        "compared",
        *(name.replace("_", " ") for name in scored),
        *(["exact match - full"] if scored else []),
        "first token agrees",
        "continuation agrees",
        "KL (nats)",
        "tokens run",
        "TTFT",
        "speed-up",
    ]


def rows(report: VerifyReport) -> list[list[str]]:
    """The main table's cells."""
    scored = [name for name in ("exact_match", "token_f1", "rouge_l") if _scored(report, name)]
    return [
        [
            variant.name,
            f"{variant.compared} of {variant.compared + len(variant.problems)}",
            *(_interval(variant.scores.get(name)) for name in scored),
            *([_signed(variant.differences.get("exact_match"))] if scored else []),
            _interval(variant.first),
            _interval(variant.continuation),
            _small(variant.kl),
            _of(variant),
            _milliseconds(variant.ttft_s),
            _speedup(variant),
        ]
        for variant in report.variants
    ]


def to_table(report: VerifyReport) -> Table:
    """The main table for a terminal."""
    table = Table(title=_title(report), title_justify="left")
    for name in columns(report):
        table.add_column(name)
    for row in rows(report):
        table.add_row(*row)
    return table


def print_report(report: VerifyReport, console: Console) -> None:
    """Print the main table; where it's too wide, a block of lines for each mode."""
    table = to_table(report)
    options = console.options.update(max_width=_WIDEST)
    if console.measure(table, options=options).maximum <= console.width:
        console.print(table)
        return
    headings = columns(report)
    width = max(map(len, headings)) + 2
    console.print(_title(report), highlight=False, soft_wrap=True)
    for row in rows(report):
        lines = [f"{name:<{width}}{value}" for name, value in zip(headings, row, strict=True)]
        console.print("", *lines, sep="\n", highlight=False, markup=False, soft_wrap=True)


def to_html(report: VerifyReport) -> str:
    """One page with tables and charts; it loads nothing."""
    about = "".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(str(value))}</td></tr>"
        for name, value in report.about.items()
    )
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(_title(report))}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(_title(report))}</h1>",
        "<p>Every mode is compared with full recompute of the identical token ids. Intervals are "
        "95 % bootstrap intervals over questions. TTFT is the median time from states in memory "
        "to the first token.</p>",
        _html_table(columns(report), rows(report)),
        _problems(report),
        "<h2>Accuracy against time to first token</h2>",
        _accuracy_chart(report),
        "<h2>Seam sweep</h2>",
        _seam_chart(report),
        "<h2>Deviation of keys and values around segments' edges</h2>",
        _profile_chart(report, start=True),
        _profile_chart(report, start=False),
        "<h2>Final states of the linear layers</h2>",
        _state_table(report),
        "<h2>Attention outputs at the last token</h2>",
        _attention_table(report),
        f"<h2>What was measured</h2><table>{about}</table></body></html>",
    ]
    return "\n".join(parts)


def _title(report: VerifyReport) -> str:
    return f"Fidelity of {report.about['model']} on {report.about['questions']} questions"


def _scored(report: VerifyReport, name: str) -> bool:
    return any(name in variant.scores for variant in report.variants)


def _interval(value: Interval | None) -> str:
    return "-" if value is None or not value.count else str(value)


def _signed(value: Interval | None) -> str:
    if value is None or not value.count:
        return "-"
    return f"{value.mean:+.3f} [{value.low:+.3f}, {value.high:+.3f}]"


def _small(value: Interval) -> str:
    if not value.count:
        return "-"
    return f"{value.mean:.2g} [{value.low:.2g}, {value.high:.2g}]"


def _of(variant: VariantReport) -> str:
    if math.isnan(variant.computed):
        return "-"
    return f"{variant.computed:.0f} of {variant.prompt:.0f}"


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1000 * seconds:.1f} ms"


def _speedup(variant: VariantReport) -> str:
    """Empty of a number where results weren't compared."""
    return "not compared" if variant.speedup is None else f"{variant.speedup:.2f}x"


def _html_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def _problems(report: VerifyReport) -> str:
    found = [
        f"<li>{escape(variant.name)}: {escape(problem)}</li>"
        for variant in report.variants
        for problem in variant.problems[:5]
    ]
    return f"<h2>Not compared</h2><ul>{''.join(found)}</ul>" if found else ""


def _accuracy_chart(report: VerifyReport) -> str:
    scored = _scored(report, "token_f1")
    label = "token F1" if scored else "share of equal continuations"
    series = []
    for variant in report.variants:
        value = variant.scores.get("token_f1") if scored else variant.continuation
        points: tuple[Point, ...] = ()
        if value is not None and value.count:
            place = Point(1000 * variant.ttft_s, value.mean, value.low, value.high)
            points = (place,)
        series.append(Series(variant.name, points, line=False))
    return chart(series, Axis("TTFT in ms"), Axis(label), f"{label} against TTFT")


def _seam_chart(report: VerifyReport) -> str:
    points = []
    for variant in report.variants:
        kind, _, seam = variant.name.partition(" ")
        if kind == "seam" and variant.compared and "+" not in seam:
            head, _, tail = seam.partition("/")
            width, kl = int(head) + int(tail), variant.kl
            points.append(Point(width, kl.mean, kl.low, kl.high, seam))
    points.sort(key=lambda point: point.x)
    series = [Series("mode seam", tuple(points))]
    return chart(
        series,
        Axis("recomputed tokens per segment (head + tail)"),
        Axis("KL in nats"),
        "Seam sweep",
    )


def _profile_chart(report: VerifyReport, *, start: bool) -> str:
    series = []
    for variant in report.variants:
        if variant.profile is None:
            continue
        values = variant.profile.from_start if start else variant.profile.from_end
        places = tuple(Point(index, value) for index, value in enumerate(values))
        series.append(Series(variant.name, places))
    edge = "first" if start else "last"
    return chart(
        series,
        Axis(f"tokens from a segment's {edge} token"),
        Axis("relative error of K and V"),
        f"Deviation by distance from a segment's {edge} token",
    )


def _state_table(report: VerifyReport) -> str:
    body = [
        [
            variant.name,
            str(error.layer),
            f"{error.angle:.3g}°",
            f"{error.norm_ratio:.4f}",
            f"{error.relative:.3g}",
        ]
        for variant in report.variants
        for error in variant.states
    ]
    return _html_table(["mode", "layer", "angle", "norm ratio", "relative error"], body)


def _attention_table(report: VerifyReport) -> str:
    body = [
        [variant.name, str(error.layer), f"{error.relative:.3g}"]
        for variant in report.variants
        for error in variant.attention
    ]
    return _html_table(["mode", "layer", "relative error"], body)
