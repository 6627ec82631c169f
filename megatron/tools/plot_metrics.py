"""Plot the metrics of one or more runs for comparison.

    python tools/plot_metrics.py RUN... --output plot.png [--keys "lm loss" grad_norm] [--smooth] [--x tokens]
    python tools/plot_metrics.py RUN... --text

RUN is a directory with ``metrics.jsonl`` (the --save directory) or such a file. Throughput is read from
``timing.jsonl`` in the same directory, if it exists. Runs may still be training. ``--text`` draws the loss on the
terminal and needs no package.
"""

from __future__ import annotations

import argparse
import math
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.commands import HelpFormatter, as_typed
from megatron.core.config.errors import UserError, counted
from megatron.training.observe.metrics import METRICS_FILE, TIMING_FILE, read_metrics
from megatron.training.observe.page.charts import LARGEST

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


@dataclass
class Series:
    """Data points of one metric of one run."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        self.x.append(x)
        self.y.append(y)


@dataclass
class Run:
    """All series of a run: training metrics by name, evaluations by (loss, data set), timing metrics by name."""

    label: str
    train: dict[str, Series] = field(default_factory=dict)
    evaluation: dict[tuple[str, str], Series] = field(default_factory=dict)
    timing: dict[str, Series] = field(default_factory=dict)

    def losses(self) -> list[str]:
        """Return the loss names: all evaluated metrics; without evaluations, training metrics ending in "loss"."""
        evaluated = list(dict.fromkeys(name for name, _ in self.evaluation))
        return evaluated or [name for name in self.train if name.endswith("loss") and "/" not in name]


PICTURES = (".png", ".pdf", ".svg")
"""Endings of --output."""


def metrics_path(path: Path) -> Path:
    """Return the metrics file of ``path`` (a directory or the file); raise :class:`UserError` if it does not exist."""
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path}: no {METRICS_FILE} there; give the directory of --save, or the file itself")
    return file


def load(path: Path, label: str, x_axis: str = "iteration") -> Run:
    """Read the metrics and timing files of one run; lines with malformed counters are skipped.

    ``x_axis`` is "iteration", "samples" or "tokens". Evaluations use the x value of their training iteration. Raises
    UserError: the file does not exist or contains no record."""
    file = metrics_path(path)
    run = Run(label)
    tokens = 0.0
    x_of_iteration: dict[int, float] = {}
    for record in read_metrics(file):
        if record.get("kind") == "train":
            samples, num_tokens = record.get("consumed_samples"), record.get("num_tokens", 0)
            if not is_number(samples) or not is_number(num_tokens):  # a manually edited line
                continue
            tokens += num_tokens
            x = {"iteration": record["iteration"], "samples": samples, "tokens": tokens}[x_axis]
            x_of_iteration[record["iteration"]] = x
            for key, value in {**record, **run_statistics(record)}.items():
                if is_number(value) and key not in ("iteration", "consumed_samples"):
                    run.train.setdefault(key, Series()).add(x, value)
        elif record.get("kind") in ("valid", "test", "task"):
            x = x_of_iteration.get(record["iteration"], record["iteration"] if x_axis == "iteration" else 0)
            name = "validation" if record["kind"] == "valid" else str(record["kind"])
            if "dataset" in record:
                name += f" {record['dataset']}"
            for key, value in record.items():
                if is_number(value) and key not in ("iteration", "consumed_samples"):
                    run.evaluation.setdefault((key, name), Series()).add(x, value)
    timing = file.with_name(TIMING_FILE)
    for record in read_metrics(timing) if timing.is_file() else ():
        if record["iteration"] in x_of_iteration:
            for key in ("tflops_per_device", "tokens_per_second", "seconds_per_iteration", "mfu"):
                if is_number(record.get(key)):
                    run.timing.setdefault(key, Series()).add(x_of_iteration[record["iteration"]], record[key])
    if not run.train and not run.evaluation:
        raise UserError(f"{file}: no record in it yet")
    return run


def run_statistics(record: dict[str, Any]) -> dict[str, float]:
    """Return the per-module statistics (``layer 4/dropped``) plus the expert-load entropy of the worst layer."""
    values = record.get("statistics", {})
    ends = "/tokens_per_expert entropy"
    entropies = [value for key, value in values.items() if key.endswith(ends) and is_number(value)]
    return {**values, "load of experts": min(entropies)} if entropies else values


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def run_labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes of equal depth that distinguish the runs; the paths if two are equal."""
    parts = [(path.parent if path.suffix == ".jsonl" else path).resolve().parts for path in paths]
    depth = max(map(len, parts))
    for length in range(1, depth + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


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
    losses = list(dict.fromkeys(name for run in runs for name in run.losses()))
    speed = "tflops_per_device" if any("tflops_per_device" in run.timing for run in runs) else "tokens_per_second"
    return [key for key in [*losses, "learning_rate", "grad_norm", "load of experts", speed] if key in recorded]


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
    for run, color in zip(runs, colors_for(len(runs))):
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
    """Draw a curve; with ``smooth`` (half-life; 0: 1% of the points) also its average over values up to ``limit``. A
    single point is drawn as a dot."""
    marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(series.x) == 1 else {}
    if smooth is None or len(series.x) < 3:
        axes.plot(series.x, series.y, color=color, linewidth=1.4, label=label, **marker)
        return
    axes.plot(series.x, series.y, color=color, linewidth=0.7, alpha=0.25)
    points = [(x, y) for x, y in zip(series.x, series.y) if y <= limit]
    mean = smoothed(Series(*map(list, zip(*points))), smooth or max(1.0, len(series.x) / 100))
    axes.plot(mean.x, mean.y, color=color, linewidth=1.8, label=f"{label}, smoothed")


def colors_for(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


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
    """Exits with code 2 without --output and --text, unless --labels has one name per run, or for a negative
    half-life."""
    parser = argparse.ArgumentParser(
        description=as_typed(__doc__ or ""), formatter_class=HelpFormatter, allow_abbrev=False
    )
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
