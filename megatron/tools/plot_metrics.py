"""Plot the metrics of one or more runs for comparison.

    python tools/plot_metrics.py RUN... --output plot.png [--keys "lm loss" grad_norm] [--smooth] [--x tokens]
    python tools/plot_metrics.py RUN... --text

RUN is a directory with ``metrics.jsonl`` (the --save directory) or such a file. Throughput is read from
``timing.jsonl`` in the same directory, if it exists. Runs may still be training. ``--text`` draws the loss on the
terminal and needs no package."""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError, counted
from megatron.training.observe.page.charts import LARGEST
from megatron.training.observe.run_folder import Run, Series, read_run, run_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# palette of Okabe and Ito: distinguishable with color blindness and in grayscale
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31"]
MARKS = "*o+x#@%&"
TITLES = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "params_norm": "parameter norm",
    "global_batch_size": "global batch size (samples)",
    "loss_scale": "loss scale",
    "num_zeros": "zero gradient entries",
    "tflops_per_device": "model TFLOP/s per device",
    "tokens_per_second": "tokens per second",
    "seconds_per_iteration": "seconds per iteration",
    "mfu": "MFU",
    "load of experts": "entropy of expert load (1: equal; worst layer)",
}
SPIKE = 3.0
"""Multiple of the 95th percentile at which the y axis of a norm ends."""
X_LABELS = {"iteration": "iteration", "samples": "samples consumed", "tokens": "tokens trained on"}


PICTURES = (".png", ".pdf", ".svg")
"""Endings of --output."""


def load(path: Path, label: str, x_axis: str = "iteration") -> Run:
    """Read a run, with its statistics and the load of experts among the training values. ``x_axis`` is "iteration",
    "samples" or "tokens". Raises UserError: there is no run, or it contains no record."""
    run = read_run(path, time.time())
    run.label = label
    run.train |= run.statistics
    ends = "/tokens_per_expert entropy"
    entropies = [series for name, series in run.statistics.items() if name.endswith(ends)]
    if entropies:
        lowest = [min(values) for values in zip(*(series.y for series in entropies))]
        run.train["load of experts"] = Series(entropies[0].x, lowest)
    run.evaluation |= {(metric, f"task {task}"): series for (metric, task), series in run.scores.items()}
    if x_axis != "iteration":
        counts = run.train.get("num_tokens", Series())
        tokens = dict(zip(counts.x, itertools.accumulate(counts.y)))
        positions: Mapping[int, float] = run.consumed if x_axis == "samples" else tokens
        run.train = {name: series.over(positions) for name, series in run.train.items()}
        run.numbers["timing"] = {name: series.over(positions) for name, series in run.timing.items()}
        run.evaluation = {name: series.over(positions) for name, series in run.evaluation.items()}
    return run


def losses(run: Run) -> list[str]:
    """Return the names of all evaluated losses and scores; without evaluations, of the training losses."""
    return list(dict.fromkeys(name for name, _ in run.evaluation)) or run.losses


def smoothed(series: Series, half_life: float) -> Series:
    """Two-sided exponential moving average, without lag; weights halve every ``half_life`` points."""
    points = [(x, y) for x, y in zip(series.x, series.y) if abs(y) < LARGEST]
    keep = 0.5 ** (1.0 / half_life)
    totals = [0.0] * len(points)
    weights = [0.0] * len(points)
    for order in (range(len(points)), range(len(points) - 1, -1, -1)):
        total = weight = 0.0
        for index in order:
            totals[index] += total  # points strictly on this side
            weights[index] += weight
            total, weight = keep * (total + points[index][1]), keep * (weight + 1.0)
    means = [(total + y) / (weight + 1.0) for total, weight, (_, y) in zip(totals, weights, points)]
    return Series([x for x, _ in points], means)


# ---- picture


def choose_panels(runs: list[Run], keys: list[str] | None) -> list[str]:
    """Return the metrics to draw: ``keys``, or by default the losses, learning rate, gradient norm and throughput.
    Raises UserError: no run contains one of ``keys``."""
    recorded = {key for run in runs for key in [*run.train, *run.timing, *(name for name, _ in run.evaluation)]}
    if keys:
        missing = [key for key in keys if key not in recorded]
        if missing:
            names = ", ".join(sorted(recorded, key=lambda key: ("/" in key, key)))
            raise UserError(f"--keys {missing[0]!r}: not in any run; available: {names}")
        return keys
    first = dict.fromkeys(name for run in runs for name in losses(run))
    speed = "tflops_per_device" if any("tflops_per_device" in run.timing for run in runs) else "tokens_per_second"
    return [key for key in [*first, "learning_rate", "grad_norm", "load of experts", speed] if key in recorded]


def draw(runs: list[Run], output: Path, *, keys: list[str] | None, smooth: float | None, x_axis: str) -> None:
    """Draw one panel per metric and write the figure to ``output``, whose suffix selects the format. Creates missing
    parent folders. Raises UserError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(f"drawing needs matplotlib ({error}): pip install matplotlib, or use --text") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = choose_panels(runs, keys)
    columns = min(3, max(1, len(panels) - 1)) if len(panels) > 1 else 1
    rows = 1 + math.ceil((len(panels) - 1) / columns)
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        heights = [2.0] + [1.0] * (rows - 1)
        figure = pyplot.figure(figsize=(10, 4.6 + 2.5 * (rows - 1)), layout="constrained")
        grid = figure.add_gridspec(rows, columns, height_ratios=heights)
        for index, key in enumerate(panels):
            place = grid[0, :] if index == 0 else grid[1 + (index - 1) // columns, (index - 1) % columns]
            draw_panel(figure.add_subplot(place), runs, key, smooth, X_LABELS[x_axis], is_main=index == 0)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=120)  # 1,200 pixels wide
        pyplot.close(figure)


def draw_panel(axes: Axes, runs: list[Run], key: str, smooth: float | None, x_label: str, is_main: bool) -> None:
    """Draw one metric of all runs: raw training curve, smoothed curve on top, evaluations with markers."""
    noisy, limit = key.endswith(("loss", "norm")), spike_limit(runs, key)
    for run, color in zip(runs, itertools.cycle(COLORS)):
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        sets = [(name, points) for (loss, name), points in run.evaluation.items() if loss == key]
        series = run.train.get(key) or run.timing.get(key)
        if series is not None:
            draw_line(axes, series, color, f"{prefix}training", smooth if noisy else None, limit)
        for (name, points), marker in zip(sets, "osD^vP*X" * len(sets)):
            axes.plot(
                points.x,
                points.y,
                color=color,
                label=f"{prefix}{name}, last {points.y[-1]:.4g}",
                zorder=4,
                linestyle="--" if len(points.x) > 1 else "none",
                linewidth=1.2,
                marker=marker,
                markersize=5,
                markeredgecolor="white",
                markeredgewidth=0.6,
                markevery=max(1, len(points.x) // 40),
            )
    title = TITLES.get(key, key)
    axes.set_ylabel(wrapped(f"{title} (mean per token)" if key.endswith("loss") else title, 24))
    axes.set_xlabel(x_label)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    if key in ("tflops_per_device", "tokens_per_second", "mfu"):
        axes.set_ylim(bottom=0)
    if limit < math.inf:
        cut_spikes(axes, runs, key, limit)
    if axes.get_xlim()[1] >= 1e5:
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0), useMathText=True)
    if key == "learning_rate":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    if is_main:
        names = ", ".join(run.label for run in runs) if len(runs) <= 4 else f"{len(runs)} runs"
        axes.set_title(wrapped(f"{title} of {names}", 90), loc="left", fontsize=12, fontweight="bold")
        handles, labels = axes.get_legend_handles_labels()
        columns = 2 if max(map(len, labels), default=0) > 30 else 3
        # below the panel: inside, it would cover curves
        axes.figure.legend(
            handles,
            [wrapped(label, 60) for label in labels],
            frameon=False,
            fontsize=8,
            ncols=columns,
            loc="outside lower left",
        )


def wrapped(text: str, width: int) -> str:
    """Wrap ``text`` at ``width`` characters; split longer words."""
    return "\n".join(textwrap.wrap(text, width)) or text


def spike_limit(runs: list[Run], key: str) -> float:
    """Return the upper end of a norm's y axis, so that spikes do not flatten the curve; infinity without spikes."""
    values = sorted(y for run in runs for y in (run.train.get(key) or Series()).y if abs(y) < LARGEST)
    if not key.endswith("norm") or len(values) < 20:
        return math.inf
    limit = SPIKE * values[int(0.95 * (len(values) - 1))]
    return limit if values[-1] > limit else math.inf


def cut_spikes(axes: Axes, runs: list[Run], key: str, limit: float) -> None:
    """End the y axis at ``limit`` and print the number and maximum of the larger values in the panel title."""
    values = [y for run in runs for y in run.train[key].y if limit < y < math.inf]
    axes.set_ylim(bottom=0, top=limit)
    title = f"{counted(len(values), 'value')} above {limit:.3g}, largest {max(values):.3g}"
    axes.set_title(title, loc="right", fontsize=8)


def draw_line(axes: Axes, series: Series, color: str, label: str, smooth: float | None, limit: float) -> None:
    """Draw a curve; with ``smooth`` (half-life; 0: 1% of the points) also its average over values up to ``limit``."""
    marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(series.x) == 1 else {}
    if smooth is None or len(series.x) < 3:
        axes.plot(series.x, series.y, color=color, linewidth=1.4, label=label, **marker)
        return
    axes.plot(series.x, series.y, color=color, linewidth=0.7, alpha=0.25)
    points = [(x, y) for x, y in zip(series.x, series.y) if y <= limit]
    mean = smoothed(Series(*map(list, zip(*points))), smooth or max(1.0, len(series.x) / 100))
    axes.plot(mean.x, mean.y, color=color, linewidth=1.8, label=f"{label}, smoothed")


# ---- terminal


def text_chart(runs: list[Run], key: str, width: int = 80, height: int = 18) -> str:
    """Draw the curve of ``key`` as text: one symbol per training run, one letter per evaluation data set. Raises
    UserError: no finite value exists."""
    curves: list[tuple[str, str, Series]] = []
    for index, run in enumerate(runs):
        series = run.train.get(key) or run.timing.get(key)
        sets = [(name, points) for (loss, name), points in run.evaluation.items() if loss == key]
        if series is not None:
            curves.append((MARKS[index % len(MARKS)], run.label if not sets else f"{run.label}, training", series))
        for name, points in sets:
            curves.append((chr(ord("A") + len(curves) % 26), f"{run.label}, {name}", points))
    finite = [(x, y) for _, _, series in curves for x, y in zip(series.x, series.y) if abs(y) < LARGEST]
    if not finite:
        raise UserError(f"{key!r}: no finite value to draw")
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    first, last = min(x for x, _ in finite), max(x for x, _ in finite)
    margin = max(len(f"{value:.4g}") for value in (low, high, (low + high) / 2)) + 2
    columns = max(10, width - margin - 1)
    cells = [[" "] * columns for _ in range(height)]
    for mark, _, series in curves:
        for column, y in column_means(series, first, last, columns):
            row = 0 if high == low else round((high - y) / (high - low) * (height - 1))
            cells[row][column] = mark
    lines = [f"{TITLES.get(key, key)}"]
    for row, cell in enumerate(cells):
        tick = f"{high - (high - low) * row / (height - 1):.4g}" if row % 4 == 0 or row == height - 1 else ""
        lines.append(f"{tick:>{margin - 1}} |{''.join(cell)}".rstrip())
    lines.append(" " * margin + "+" + "-" * columns)
    ends = f"{first:g}".ljust(columns - len(f"{last:g}")) + f"{last:g}"
    lines.append(" " * (margin + 1) + ends)
    for mark, label, series in curves:
        values = [y for y in series.y if abs(y) < LARGEST]
        lines.append(
            f"{mark:>{margin}}  {label}: first {values[0]:.4f}, last {values[-1]:.4f}, lowest {min(values):.4f}"
        )
    return "\n".join(lines)


def column_means(series: Series, first: float, last: float, columns: int) -> list[tuple[int, float]]:
    """Return (column, mean of the finite points in that column) for the x range ``first`` to ``last``."""
    sums: dict[int, tuple[float, int]] = {}
    for x, y in zip(series.x, series.y):
        if abs(y) < LARGEST:
            column = 0 if last == first else round((x - first) / (last - first) * (columns - 1))
            total, count = sums.get(column, (0.0, 0))
            sums[column] = (total + y, count + 1)
    return [(column, total / count) for column, (total, count) in sums.items()]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Exits with code 2 without --output and --text, for a wrong number of --labels or half-life."""
    parser = tool_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory with metrics.jsonl, or the file")
    parser.add_argument("--output", type=Path, help="picture to write; its ending (.png, .pdf, .svg) is the format")
    parser.add_argument("--text", action="store_true", help="draw on the terminal")
    parser.add_argument(
        "--keys", nargs="+", help="values to draw; default: losses, learning rate, gradient norm, experts, speed"
    )
    parser.add_argument("--labels", nargs="+", help="a name for each run; default: the part of the path that differs")
    parser.add_argument(
        "--smooth",
        nargs="?",
        type=float,
        const=0.0,
        metavar="HALF_LIFE",
        help="add a moving average of training values; half-life in iterations, default a 100th of the run",
    )
    parser.add_argument("--x", choices=sorted(X_LABELS), default="iteration", help="what the x axis counts")
    options = parser.parse_args(arguments)
    if options.output is None and not options.text:
        parser.error("give --output PICTURE, or --text to draw on the terminal")
    if options.output is not None and options.output.suffix not in PICTURES:
        parser.error(f"--output {options.output}: must end with {', '.join(PICTURES)}")
    if options.labels and len(options.labels) != len(options.runs):
        parser.error(
            f"--labels {' '.join(options.labels)}: {counted(len(options.labels), 'name')} for "
            f"{counted(len(options.runs), 'run')}; give one name per run"
        )
    if options.smooth is not None and options.smooth < 0:
        parser.error("--smooth: the half-life must not be negative")
    return options


def main(arguments: Sequence[str]) -> int:
    """Raises UserError for runs without records, unknown keys, or without matplotlib."""
    options = parse_arguments(arguments)
    labels = options.labels or run_labels(options.runs)
    runs = [load(path, label, options.x) for path, label in zip(options.runs, labels)]
    if options.text:
        width = min(120, shutil.get_terminal_size((80, 24)).columns)
        for key in options.keys or choose_panels(runs, None)[:1]:
            print(text_chart(runs, key, width))
    if options.output is not None:
        draw(runs, options.output, keys=options.keys, smooth=options.smooth, x_axis=options.x)
        print(f"wrote {options.output}")
    return 0
