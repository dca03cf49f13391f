"""Small charts as inline SVG: lines and points with error bars, nothing to install or to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Point", "Series", "chart"]

COLOURS = (
    "#1f6feb", "#d1481e", "#2a8a4a", "#8a3fbf", "#b08000", "#0f8a9d", "#c2347d", "#555555",
    "#d98cc0", "#7a4a21",
)  # fmt: skip
WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 74, 170, 16, 48


@dataclass(frozen=True)
class Point:
    """A place, with an optional interval ``low`` to ``high`` of y and a label."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one kind; joined by a line if ``line``."""

    name: str
    points: tuple[Point, ...]
    line: bool = True


@dataclass(frozen=True)
class Axis:
    """What an axis shows; ``log`` leaves out what isn't positive."""

    label: str
    log: bool = False


class _Scale:
    """Values to pixels."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float) -> None:
        self.log = log
        low, high = min(values), max(values)
        if log:
            low, high = math.log10(low), math.log10(high)
        if high - low < 1e-12:
            pad = abs(high) * 0.05 or 0.5
            low, high = low - pad, high + pad
        space = (high - low) * 0.05
        self.low, self.high = low - space, high + space
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        share = (at - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(self.low), math.floor(self.high)
            if last - first >= 1:
                return [10.0**power for power in range(first, last + 1)]
            values = [10 ** (self.low + (self.high - self.low) * i / 4) for i in range(5)]
            return [float(f"{value:.2g}") for value in values]
        raw = (self.high - self.low) / 5
        size = 10 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
        first = math.ceil(self.low / step)
        return [step * i for i in range(first, math.floor(self.high / step) + 1)]


def chart(series: Sequence[Series], x: Axis, y: Axis, title: str) -> str:
    """One chart as an ``<svg>`` element; says so where there's nothing to show."""
    shown = [
        (index, one.name, one.line, _visible(one.points, x, y)) for index, one in enumerate(series)
    ]
    points = [point for *_, held in shown for point in held]
    head = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title><style>.grid{{stroke:#e4e4e4}} "
        "text{font:12px system-ui,sans-serif;fill:#222}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    )
    if not points:
        return head + f'<text x="{LEFT}" y="{HEIGHT / 2}">nothing was measured</text></svg>'
    across = _Scale([point.x for point in points], x.log, LEFT, WIDTH - RIGHT)
    heights = [
        value
        for point in points
        for value in (point.y, point.low, point.high)
        if value is not None and (not y.log or value > 0)
    ]
    up = _Scale(heights, y.log, HEIGHT - BOTTOM, TOP)
    parts = [head, *_frame(across, up, x, y)]
    for index, name, line, held in shown:
        colour = COLOURS[index % len(COLOURS)]
        parts += _series(held, line, colour, across, up, y.log)
        parts.append(
            f'<text x="{WIDTH - RIGHT + 26}" y="{TOP + 12 + 18 * index}">{escape(name)}</text>'
            f'<rect x="{WIDTH - RIGHT + 10}" y="{TOP + 3 + 18 * index}" width="10" height="10" '
            f'fill="{colour}"/>'
        )
    return "".join(parts) + "</svg>"


def _visible(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    return [
        point
        for point in points
        if math.isfinite(point.x)
        and math.isfinite(point.y)
        and not (x.log and point.x <= 0)
        and not (y.log and point.y <= 0)
    ]


def _frame(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    parts = []
    for value in across.ticks():
        at = across(value)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>'
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:.4g}</text>'
        )
    for value in up.ticks():
        at = up(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x.label)}</text>"
        f'<text x="14" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle})">{escape(y.label)}</text>'
    )
    return parts


def _series(
    points: Sequence[Point], line: bool, colour: str, across: _Scale, up: _Scale, log: bool
) -> list[str]:
    parts = []
    places = [(across(point.x), up(point.y)) for point in points]
    if line and len(places) > 1:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    dots = not line or len(places) <= 12
    for point, (a, b) in zip(points, places, strict=True):
        if point.low is not None and point.high is not None and not (log and point.low <= 0):
            low, high = up(point.low), up(point.high)
            parts.append(
                f'<line x1="{a:.1f}" x2="{a:.1f}" y1="{low:.1f}" y2="{high:.1f}" '
                f'stroke="{colour}" stroke-width="1.5"/>'
            )
        if dots:
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>')
        if point.label:
            parts.append(f'<text x="{a + 6:.1f}" y="{b - 6:.1f}">{escape(point.label)}</text>')
    return parts
