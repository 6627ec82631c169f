"""Draws the metrics of one or more runs side by side.

    python tools/plot_metrics.py RUN... --output plot.png [--keys "lm loss" grad_norm] [--smooth] [--x tokens]
    python tools/plot_metrics.py RUN... --text

RUN is a directory that holds ``metrics.jsonl`` (the one given to --save) or such a file; ``timing.jsonl`` beside it
adds throughput. Runs may still be going. ``--text`` draws the loss on the terminal and needs no package at all.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a program from anywhere
    sys.path.insert(0, str(ROOT))

from megatron.training.observe.metrics import METRICS_FILE, TIMING_FILE, read_metrics  # noqa: E402

# Okabe and Ito's colours: told apart by everybody, and in grey
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
    "load of experts": "entropy of the experts' load (1: equal; worst layer)",
}
X_LABELS = {"iteration": "iteration", "samples": "samples consumed", "tokens": "tokens trained on"}


@dataclass
class Series:
    """Points of one value of one run."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        self.x.append(x)
        self.y.append(y)


@dataclass
class Run:
    """All series of a run: training values by name, evaluations by (loss, set), wall-clock values by name."""

    label: str
    train: dict[str, Series] = field(default_factory=dict)
    evaluation: dict[tuple[str, str], Series] = field(default_factory=dict)
    timing: dict[str, Series] = field(default_factory=dict)

    def losses(self) -> list[str]:
        """Names of the losses: what evaluations report too, else whatever is called a loss."""
        evaluated = list(dict.fromkeys(name for name, _ in self.evaluation))
        return evaluated or [name for name in self.train if name.endswith("loss") and "/" not in name]


def metrics_path(path: Path) -> Path:
    """The metrics file of ``path``; ``ValueError`` says what is missing."""
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path}: no {METRICS_FILE} there; give the directory of --save, or the file itself")
    return file


def load(path: Path, label: str, x_axis: str = "iteration") -> Run:
    """Reads one run."""
    file = metrics_path(path)
    run = Run(label)
    tokens, x_of_iteration = 0.0, {}
    for record in read_metrics(file):
        if record.get("kind") == "train":
            tokens += record.get("num_tokens", 0)
            x = {"iteration": record["iteration"], "samples": record["consumed_samples"], "tokens": tokens}[x_axis]
            x_of_iteration[record["iteration"]] = x
            for key, value in {**record, **statistics_of(record)}.items():
                if is_number(value) and key not in ("iteration", "consumed_samples"):
                    run.train.setdefault(key, Series()).add(x, value)
        elif record.get("kind") in ("valid", "test"):
            x = x_of_iteration.get(record["iteration"], record["iteration"] if x_axis == "iteration" else 0)
            name = {"valid": "validation", "test": "test"}[record["kind"]]
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
        raise ValueError(f"{file}: no record in it yet")
    return run


def statistics_of(record: dict[str, Any]) -> dict[str, float]:
    """Those of modules, ``layer 4/dropped``, and of all layers the least equal load of experts."""
    values = record.get("statistics", {})
    entropies = [value for key, value in values.items() if key.endswith("/tokens_per_expert entropy")]
    return {**values, "load of experts": min(entropies)} if entropies else values


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def labels_of(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    parts = [(path.parent if path.suffix == ".jsonl" else path).resolve().parts for path in paths]
    depth = max(map(len, parts))
    for length in range(1, depth + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def smoothed(series: Series, half_life: float) -> Series:
    """Mean with weights that halve every ``half_life`` points to both sides, so that it does not lag; without NaN."""
    points = [(x, y) for x, y in zip(series.x, series.y) if math.isfinite(y)]
    keep = 0.5 ** (1.0 / half_life)
    totals = [0.0] * len(points)
    weights = [0.0] * len(points)
    for order in (range(len(points)), range(len(points) - 1, -1, -1)):
        total = weight = 0.0
        for index in order:
            totals[index] += total  # what lies strictly on this side
            weights[index] += weight
            total, weight = keep * (total + points[index][1]), keep * (weight + 1.0)
    means = [(total + y) / (weight + 1.0) for total, weight, (_, y) in zip(totals, weights, points)]
    return Series([x for x, _ in points], means)


# ---- picture


def panels_of(runs: list[Run], keys: list[str] | None) -> list[str]:
    """What is drawn: the asked keys, else losses, learning rate, gradient norm and throughput as far as they exist."""
    known = {key for run in runs for key in [*run.train, *run.timing, *(name for name, _ in run.evaluation)]}
    if keys:
        missing = [key for key in keys if key not in known]
        if missing:
            names = ", ".join(sorted(known, key=lambda key: ("/" in key, key)))
            raise ValueError(f"--keys {missing[0]!r}: no run has it; there are {names}")
        return keys
    losses = list(dict.fromkeys(name for run in runs for name in run.losses()))
    speed = "tflops_per_device" if any("tflops_per_device" in run.timing for run in runs) else "tokens_per_second"
    return [key for key in [*losses, "learning_rate", "grad_norm", "load of experts", speed] if key in known]


def draw(runs: list[Run], output: Path, *, keys: list[str] | None, smooth: float | None, x_axis: str) -> None:
    """Writes the picture; the format follows the ending of ``output``."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"drawing needs matplotlib ({error}): pip install matplotlib, or use --text") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = panels_of(runs, keys)
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
        figure.savefig(output, dpi=150)
        pyplot.close(figure)


def draw_panel(axes: Any, runs: list[Run], key: str, smooth: float | None, x_label: str, is_main: bool) -> None:
    """One value of all runs. Smoothed lines lie over the raw ones; evaluations are marked."""
    noisy = key.endswith(("loss", "norm"))
    for run, color in zip(runs, colors_for(len(runs))):
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        sets = [(name, points) for (loss, name), points in run.evaluation.items() if loss == key]
        series = run.train.get(key) or run.timing.get(key)
        if series is not None:
            draw_line(axes, series, color, f"{prefix}training", smooth if noisy else None)
        for (name, points), marker in zip(sets, "osD^vP*X" * len(sets)):
            axes.plot(
                points.x, points.y, color=color, label=f"{prefix}{name}, last {points.y[-1]:.4g}", zorder=4,
                linestyle="--" if len(points.x) > 1 else "none", linewidth=1.2, marker=marker, markersize=5,
                markeredgecolor="white", markeredgewidth=0.6, markevery=max(1, len(points.x) // 40),
            )  # fmt: skip
    title = TITLES.get(key, key)
    axes.set_ylabel(f"{title} (mean per token)" if key.endswith("loss") else title)
    axes.set_xlabel(x_label)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    if key in ("tflops_per_device", "tokens_per_second", "mfu"):
        axes.set_ylim(bottom=0)
    if axes.get_xlim()[1] >= 1e5:
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0), useMathText=True)
    if key == "learning_rate":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    if is_main:
        names = ", ".join(run.label for run in runs) if len(runs) <= 4 else f"{len(runs)} runs"
        axes.set_title(f"{title} of {names}", loc="left", fontsize=12, fontweight="bold")
        axes.legend(frameon=False, fontsize=9)


def draw_line(axes: Any, series: Series, color: str, label: str, smooth: float | None) -> None:
    """A curve; a single point is drawn as a dot."""
    marker = {"marker": "o", "markersize": 4} if len(series.x) == 1 else {}
    if smooth is None or len(series.x) < 3:
        axes.plot(series.x, series.y, color=color, linewidth=1.4, label=label, **marker)
        return
    axes.plot(series.x, series.y, color=color, linewidth=0.7, alpha=0.25)
    mean = smoothed(series, smooth or max(1.0, len(series.x) / 100))
    axes.plot(mean.x, mean.y, color=color, linewidth=1.8, label=f"{label}, smoothed")


def colors_for(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


# ---- terminal


def text_chart(runs: list[Run], key: str, width: int = 80, height: int = 18) -> str:
    """The curve of ``key`` in characters: one mark per training run, a letter per evaluated set."""
    curves: list[tuple[str, str, Series]] = []
    for index, run in enumerate(runs):
        series = run.train.get(key) or run.timing.get(key)
        sets = [(name, points) for (loss, name), points in run.evaluation.items() if loss == key]
        if series is not None:
            curves.append((MARKS[index % len(MARKS)], run.label if not sets else f"{run.label}, training", series))
        for name, points in sets:
            curves.append((chr(ord("A") + len(curves) % 26), f"{run.label}, {name}", points))
    finite = [(x, y) for _, _, series in curves for x, y in zip(series.x, series.y) if math.isfinite(y)]
    if not finite:
        raise ValueError(f"{key!r}: no finite value to draw")
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
        shown = f"{high - (high - low) * row / (height - 1):.4g}" if row % 4 == 0 or row == height - 1 else ""
        lines.append(f"{shown:>{margin - 1}} |{''.join(cell)}".rstrip())
    lines.append(" " * margin + "+" + "-" * columns)
    ends = f"{first:g}".ljust(columns - len(f"{last:g}")) + f"{last:g}"
    lines.append(" " * (margin + 1) + ends)
    for mark, label, series in curves:
        values = [y for y in series.y if math.isfinite(y)]
        lines.append(
            f"{mark:>{margin}}  {label}: first {values[0]:.4f}, last {values[-1]:.4f}, lowest {min(values):.4f}"
        )
    return "\n".join(lines)


def column_means(series: Series, first: float, last: float, columns: int) -> list[tuple[int, float]]:
    """(column, mean of the points that fall into it)."""
    sums: dict[int, tuple[float, int]] = {}
    for x, y in zip(series.x, series.y):
        if math.isfinite(y):
            column = 0 if last == first else round((x - first) / (last - first) * (columns - 1))
            total, count = sums.get(column, (0.0, 0))
            sums[column] = (total + y, count + 1)
    return [(column, total / count) for column, (total, count) in sums.items()]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory with metrics.jsonl, or the file")
    parser.add_argument("--output", type=Path, help="picture to write; its ending (.png, .pdf, .svg) is its format")
    parser.add_argument("--text", action="store_true", help="draw on the terminal")
    parser.add_argument(
        "--keys", nargs="+", help="values to draw; default: losses, learning rate, gradient norm, experts, speed"
    )
    parser.add_argument("--labels", nargs="+", help="a name for each run; default: what tells their paths apart")
    parser.add_argument(
        "--smooth", nargs="?", type=float, const=0.0, metavar="HALF_LIFE",
        help="lay a moving average over training values; half-life in iterations, default a 100th of the run",
    )  # fmt: skip
    parser.add_argument("--x", choices=sorted(X_LABELS), default="iteration", help="what the x axis counts")
    options = parser.parse_args(arguments)
    if options.output is None and not options.text:
        parser.error("give --output PICTURE, or --text to draw on the terminal")
    if options.labels and len(options.labels) != len(options.runs):
        parser.error(f"--labels: {len(options.labels)} names for {len(options.runs)} runs")
    if options.smooth is not None and options.smooth < 0:
        parser.error("--smooth: the half-life must not be negative")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 with one message."""
    options = parse_arguments(arguments)
    try:
        labels = options.labels or labels_of(options.runs)
        runs = [load(path, label, options.x) for path, label in zip(options.runs, labels)]
        if options.text:
            width = min(120, shutil.get_terminal_size((80, 24)).columns)
            for key in options.keys or panels_of(runs, None)[:1]:
                print(text_chart(runs, key, width))
        if options.output is not None:
            draw(runs, options.output, keys=options.keys, smooth=options.smooth, x_axis=options.x)
            print(f"wrote {options.output}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
