"""Line charts and event rows as inline SVG, which browsers draw at any width. Torch-free.

The drawing area scales with the page; lines keep their width (non-scaling strokes), and labels are HTML next to it, so
that text is never scaled. Points are dots of round line caps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal, NamedTuple

from megatron.training.observe.run_folder import Series

WIDTH, HEIGHT = 1000, 300
"""Units of the drawing area."""
BUCKETS = 400
"""Intervals of x in which a long series keeps its extremes."""
LARGEST = 1e304
"""Upper limit of drawn values; sums of thousands stay finite."""
SPIKE = 3.0
"""Multiple of the 95th percentile at which the y axis ends, for charts with ``cut_spikes``."""


@dataclass
class Line:
    """Curve of a chart."""

    label: str
    series: Series
    style: Literal["line", "dots"] = "line"


@dataclass
class Chart:
    """Chart of lines over iterations."""

    key: str
    """The element's id."""
    title: str
    lines: list[Line] = field(default_factory=list)
    from_zero: bool = False
    cut_spikes: bool = False


@dataclass
class Section:
    """Part of a page: charts, then HTML."""

    key: str
    """The element's id."""
    title: str
    charts: list[Chart] = field(default_factory=list)
    html: str = ""
    position: int = 100
    """Sections are sorted by it; kinds of other programs come last."""


class Frame(NamedTuple):
    """Ranges of the axes."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the units of a point; y is clamped."""
        share_x = (x - self.x[0]) / (self.x[1] - self.x[0])
        share_y = (y - self.y[0]) / (self.y[1] - self.y[0])
        return WIDTH * share_x, HEIGHT * (1 - min(max(share_y, 0.0), 1.0))


def finite(series: Series) -> Series:
    """Return the points with values below :data:`LARGEST`; NaN and infinities are not."""
    if all(abs(y) < LARGEST for y in series.y):
        return series
    points = [(x, y) for x, y in zip(series.x, series.y) if abs(y) < LARGEST]
    return Series([x for x, _ in points], [y for _, y in points])


def _runs(count: int, buckets: int) -> Iterator[tuple[int, int]]:
    for index in range(buckets):
        yield count * index // buckets, count * (index + 1) // buckets


def thinned(series: Series, buckets: int = BUCKETS) -> Series:
    """Return at most ``2 * buckets`` points, the lowest and highest of each of ``buckets`` runs of points, in order."""
    count = len(series.x)
    if count <= 2 * buckets:
        return series
    extremes = Series()
    for start, stop in _runs(count, buckets):
        part = series.y[start:stop]
        low, high = part.index(min(part)), part.index(max(part))
        for place in sorted({low, high}):
            extremes.add(series.x[start + place], part[place])
    return extremes


def means(series: Series, buckets: int = BUCKETS) -> Series:
    """Return the mean of each of ``buckets`` runs of points, at the run's middle; short series stay."""
    count = len(series.x)
    if count <= 2 * buckets:
        return series
    means = Series()
    for start, stop in _runs(count, buckets):
        means.add(series.x[(start + stop) // 2], sum(series.y[start:stop]) / (stop - start))
    return means


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most ``most`` + 1 round numbers from ``low`` to ``high``."""
    span = high - low
    step = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Return a number in few characters, such as 1.2k, 3M, 2e-05."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.3g}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def widened(low: float, high: float) -> tuple[float, float]:
    """Return a range that is not empty."""
    if high > low:
        return low, high
    margin = abs(low) * 0.05 or 0.5
    return low - margin, high + margin


def value_range(chart: Chart, lines: Sequence[Line]) -> tuple[tuple[float, float], str]:
    """Return the range of y and a note about values above it."""
    values = sorted(y for line in lines for y in line.series.y)
    low, high, note = values[0], values[-1], ""
    limit = SPIKE * values[int(0.95 * (len(values) - 1))]
    if chart.cut_spikes and len(values) >= 20 and high > limit > 0:
        above = [value for value in values if value > limit]
        high, note = limit, f"{len(above)} above {short(limit)}, largest {short(above[-1])}"
    low, high = widened(min(low, 0.0) if chart.from_zero else low, high)
    margin = 0.04 * (high - low)
    return (low if chart.from_zero and low == 0 else low - margin, high + margin), note


def draw(chart: Chart, x_range: tuple[int, int]) -> str:
    """Return the figure of a chart; '' without finite values. Long series: extremes pale, means strong."""
    lines = [Line(line.label, finite(line.series), line.style) for line in chart.lines]
    lines = [line for line in lines if line.series.x]
    if not lines:
        return ""
    y_range, note = value_range(chart, lines)
    frame = Frame(widened(*x_range), y_range)
    drawn, legend = [], []
    for index, line in enumerate(lines):
        color = f"c{index % 8}"
        last = line.series.y[-1]
        legend.append(f'<span class="key {color}">{escape(line.label)} <b>{short(last)}</b></span>')
        points = thinned(line.series)
        if line.style == "dots" or len(points.x) == 1:
            drawn.append(_path(frame, points, f"dots {color}", line.label, dots=True))
        if len(points.x) > 1:
            is_long = len(points.x) < len(line.series.x)
            drawn.append(_path(frame, points, f"{'pale' if is_long else 'strong'} {color}", line.label))
            if is_long:
                drawn.append(_path(frame, means(line.series), f"strong {color}", ""))
    grid = "".join(
        f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        for y in (frame.place(frame.x[0], tick)[1] for tick in ticks(*y_range))
    )
    missing = sum(len(line.series.y) for line in chart.lines) - sum(len(line.series.y) for line in lines)
    notes = [note] if note else []
    notes += [f"{missing} values are NaN or infinite"] if missing else []
    return (
        f'<figure id="{escape(chart.key)}" data-x0="{frame.x[0]}" data-x1="{frame.x[1]}" data-y0="{y_range[0]}"'
        f' data-y1="{y_range[1]}"><figcaption>{escape(chart.title)}'
        f'{"".join(f"<small>{escape(note)}</small>" for note in notes)}</figcaption><div class="plot">'
        f'<div class="ys">{_labels(frame, ticks(*y_range))}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(chart.title)}">{grid}{"".join(drawn)}</svg>'
        f'<div class="xs">{_x_labels(frame)}</div></div><div class="legend">{"".join(legend)}</div></figure>'
    )


def _path(frame: Frame, series: Series, classes: str, label: str, dots: bool = False) -> str:
    """Return a line, or a dot (a line of no length) at each point."""
    places = (frame.place(x, y) for x, y in zip(series.x, series.y))
    if dots:
        data = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    else:
        data = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    named = f' data-label="{escape(label)}"' if label else ""
    return f'<path class="{classes}" d="{data}"{named}/>'


def _labels(frame: Frame, values: Sequence[float]) -> str:
    """Positions are shares of the height from the top."""
    return "".join(
        f'<span style="top:{100 * frame.place(frame.x[0], value)[1] / HEIGHT:.1f}%">{short(value)}</span>'
        for value in values
    )


def _x_labels(frame: Frame) -> str:
    return "".join(
        f'<span style="left:{100 * (tick - frame.x[0]) / (frame.x[1] - frame.x[0]):.1f}%">{short(tick)}</span>'
        for tick in ticks(*frame.x, most=4)
    )


def draw_rows(rows: Sequence[tuple[str, str, Sequence[int]]], x_range: tuple[int, int]) -> str:
    """Return a chart with one row of marks per (label, class, iterations)."""
    frame = Frame(widened(*x_range), (0.0, 1.0))
    drawn = []
    for label, kind, iterations in rows:
        xs = sorted({round(frame.place(iteration, 0)[0], 1) for iteration in iterations})
        marks = "".join(f"M{x} 3V17" for x in xs)
        drawn.append(
            f'<div class="row"><span>{escape(label)} <b>{len(iterations)}</b></span>'
            f'<svg viewBox="0 0 {WIDTH} 20" preserveAspectRatio="none" role="img"'
            f' aria-label="{escape(label)}: {len(iterations)}"><path class="marks {kind}" d="{marks}"/></svg></div>'
        )
    axis = f'<div class="row"><span></span><div class="xs">{_x_labels(frame)}</div></div>'
    return f'<div class="rows">{"".join(drawn)}{axis}</div>'


def evenly(count: int, most: int) -> list[int]:
    """Return at most ``most`` indices below ``count``, evenly spaced, the first and the last among them."""
    return list(range(count)) if count <= most else [round(place * (count - 1) / (most - 1)) for place in range(most)]


def slug(text: str) -> str:
    """Return ``text`` as part of an element's id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
