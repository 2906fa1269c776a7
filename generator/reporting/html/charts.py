"""The places of a chart's marks: numbers in, pixels and words out; the page's template draws them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

STRIP = 26  # height of a row of points in pixels
LABEL_GAP = 13.0  # pixels between the middles of two labels at the ends of lines
Tick = tuple[float, str]  # a place on an axis, in pixels, and its label


@dataclasses.dataclass(frozen=True)
class Mark:
    """A point, with the text that it shows when pointed at."""

    x: float
    y: float
    title: str
    beyond: bool = False  # drawn at the edge: the value lies outside of the axis


@dataclasses.dataclass(frozen=True)
class Series:
    """Points of one colour; ``kind`` is its class in the style sheet."""

    kind: str
    label: str
    marks: list[Mark]
    line: bool = True
    label_at: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Frame:
    """Where a chart's axes stand in its drawing."""

    width: int = 520
    height: int = 320
    left: float = 48.0
    right: float = 364.0  # names of lines stand beyond
    top: float = 12.0
    bottom: float = 276.0


@dataclasses.dataclass(frozen=True)
class Chart:
    """One drawing, in its own pixels, which the page scales."""

    title: str
    summary: str  # for a reader who cannot see the drawing
    x_label: str
    y_label: str
    frame: Frame
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    series: list[Series]
    rule_at: float | None = None  # height of a horizontal line of reference
    rule_across: float | None = None  # place of a vertical line of reference


@dataclasses.dataclass(frozen=True)
class Axis:
    """Values to pixels; a value beyond the axis is drawn at its edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value, or of the nearest value that the axis shows."""
        scale: Callable[[float], float] = math.log if self.log else float
        low, here, high = map(scale, (self.low, min(max(value, self.low), self.high), self.high))
        return round(self.start + (here - low) / (high - low) * (self.end - self.start), 1)


def apart(places: Sequence[float], gap: float = LABEL_GAP, lowest: float = math.inf) -> list[float]:
    """The places, moved by a pass down and a pass up so that neighbours are at least ``gap`` apart."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for before, here in itertools.pairwise(order):
        moved[here] = max(moved[here], moved[before] + gap)
    for here in reversed(order):
        moved[here] = min(moved[here], lowest)
        lowest = moved[here] - gap
    return moved


def line_chart(  # noqa: PLR0913 - what a chart is made of
    title: str,
    summary: str,
    labels: tuple[str, str],
    lines: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    y_ticks: Sequence[float],
    *,
    unit: str,
    log: bool,
    frame: Frame | None = None,
) -> Chart:
    """Lines over powers of two, each named at its end; ``lines`` are (kind, name, points), ``labels`` are (x, y)."""
    frame = frame or Frame()
    xs = sorted({x for *_, points in lines for x, _ in points})
    x_axis = Axis(xs[0], max(xs[-1], xs[0] * 2), frame.left + 10, frame.right - 8, log=True)
    y_axis = Axis(y_ticks[0], y_ticks[-1], frame.bottom, frame.top, log=log)
    every = max(1, math.ceil(len(xs) * 44 / (frame.right - frame.left)))
    ends = apart([y_axis(points[-1][1]) for *_, points in lines], lowest=frame.bottom)
    series = []
    for (kind, name, points), end in zip(lines, ends, strict=True):
        marks = [
            Mark(x_axis(x), y_axis(y), f"{name}, {count_name(x)}: {number(y)}{unit}", y > y_ticks[-1])
            for x, y in points
        ]
        series.append(Series(kind, name, marks, label_at=(marks[-1].x + 9, end)))
    return Chart(
        title,
        summary,
        *labels,
        frame,
        [(x_axis(x), count_name(x)) for x in xs[::-every]][::-1],
        [(y_axis(y), f"{y:,.0f}") for y in y_ticks],
        series,
    )


def scatter(  # noqa: PLR0913 - what a chart is made of
    title: str,
    summary: str,
    labels: tuple[str, str],
    groups: Sequence[tuple[str, str, Sequence[tuple[float, float, str]]]],
    y_ticks: Sequence[float],
    rule: float,
) -> Chart:
    """Points over bytes on a logarithmic axis; ``groups`` are (kind, name, [(x, y, title)]), ``rule`` the y of a line."""
    frame = Frame(width=1080, height=320, right=1070.0)
    xs = [x for *_, points in groups for x, _, _ in points]
    low, high = 2.0 ** math.floor(math.log2(min(xs))), 2.0 ** math.ceil(math.log2(max(xs) * 1.01))
    x_axis = Axis(low, high, frame.left + 10, frame.right - 10, log=True)
    y_axis = Axis(y_ticks[0], y_ticks[-1], frame.bottom, frame.top)
    octaves = range(round(math.log2(low)), round(math.log2(high)) + 1)
    ticks = [(x_axis(2.0**n), byte_name(2**n)) for n in octaves if n % max(1, round(len(octaves) / 6)) == 0]

    def marks(points: Sequence[tuple[float, float, str]]) -> list[Mark]:
        return [Mark(x_axis(x), y_axis(y), said, not y_ticks[0] <= y <= y_ticks[-1]) for x, y, said in points]

    series = [Series(kind, name, marks(points), line=False) for kind, name, points in groups]
    y_places = [(y_axis(y), f"{y:g}") for y in y_ticks]
    return Chart(title, summary, *labels, frame, ticks, y_places, series, rule_at=y_axis(rule))


def strips(
    title: str, summary: str, x_label: str, rows: Sequence[tuple[str, Sequence[tuple[float, str]], float]]
) -> Chart:
    """A row of points for each name, on one logarithmic axis, with the mean; ``rows`` are (name, [(x, title)], mean)."""
    bottom = 12.0 + STRIP * len(rows)
    frame = Frame(width=1080, height=round(bottom) + 44, left=215.0, right=1070.0, bottom=bottom)
    values = [x for _, points, _ in rows for x, _ in points]
    low, high = min(0.9, *values), max(values) * 1.05
    x_axis = Axis(low, high, frame.left + 8, frame.right - 8, log=True)
    ticks = [t for t in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low <= t <= high]
    places = [(frame.top + STRIP * (i + 0.5), name) for i, (name, *_) in enumerate(rows)]
    series = []
    for (place, _), (name, points, mean) in zip(places, rows, strict=True):
        series.append(Series("point", name, [Mark(x_axis(x), place, t) for x, t in points], line=False))
        series.append(Series("mean", name, [Mark(x_axis(mean), place, f"{name}: mean {mean:.2f}")], line=False))
    x_places = [(x_axis(t), f"{t:g}") for t in ticks]
    return Chart(title, summary, x_label, "", frame, x_places, places, series, rule_across=x_axis(1))


def number(value: float) -> str:
    """A number with three digits, or with all digits before the point if there are more."""
    return f"{value:,.{max(0, 3 - len(str(int(abs(value)))))}f}"


def _named(value: float, units: Mapping[str, int]) -> str:
    """A value in the largest unit in which it is at least one."""
    unit = next((unit for unit, size in units.items() if value >= size), list(units)[-1])
    return f"{value / units[unit]:g}{unit}"


def count_name(value: float) -> str:
    """1024 -> "1k"."""
    return _named(value, {"M": 2**20, "k": 2**10, "": 1})


def byte_name(value: float) -> str:
    """2048 -> "2 KiB"."""
    return _named(value, {" GiB": 2**30, " MiB": 2**20, " KiB": 2**10, " B": 1})
