"""Values on the page about a run equal those computed from its records by definitions.

Wrong formulas give other numbers for these data: several log intervals of different lengths, a resume with repeated
iterations, a validation whose lowest loss is not the last, iterations with different numbers of tokens.
"""

import math
import random
import re
from html import unescape
from statistics import mean, median_high

import numpy as np
import pytest

from megatron.training.observe.page.page import build_page
from megatron.training.observe.run_folder import read_run
from tests.unit_tests.training.observe.test_page import NOW, end, start, timing, train, write

FIRST_START = NOW - 90_000


def read_figures(text):
    """Name -> value of the key figures."""
    head = text[text.index('id="figures"') : text.index("</dl>")]
    return {unescape(name): unescape(value) for name, value in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", head)}


def parse_number(text):
    """The number of a figure such as 1.234k, 40.0% or 3.00 GiB."""
    number, unit = re.match(r"([\d.,]+(?:e[+-]\d+)?)([kMGT%]?)", text).groups()
    factor = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "%": 0.01}[unit]
    return float(number.replace(",", "")) * factor


def parse_duration(text):
    """Seconds of a duration such as ``1 day, 2:03:04``."""
    days, _, clock = text.rpartition(", ")
    hours, minutes, seconds = map(int, clock.split(":"))
    return 86400 * int(days.split()[0] if days else 0) + 3600 * hours + 60 * minutes + seconds


def read_curves(text, key):
    """(class, label) -> points (x, y) of the lines of a chart, and label -> number in its legend."""
    figure = text[text.index(f'id="{key}"') :]
    figure = figure[: figure.index("</figure>")]
    x0, x1, y0, y1 = (float(re.search(f'data-{name}="([^"]+)"', figure)[1]) for name in ("x0", "x1", "y0", "y1"))
    curves = {}
    for kind, path, _, label in re.findall(r'<path class="([^"]+)" d="([^"]+)"( data-label="([^"]*)")?/>', figure):
        places = re.findall(r"([\d.]+) ([\d.]+)", path)
        points = [(x0 + float(x) / 1000 * (x1 - x0), y1 - float(y) / 300 * (y1 - y0)) for x, y in places]
        curves[kind.split()[0], unescape(label)] = points
    legend = dict(re.findall(r'<span class="key \w+">(.*?) <b>(.*?)</b>', figure))
    return curves, {unescape(name): parse_number(value) for name, value in legend.items()}, (x1 - x0, y1 - y0)


def assert_points(points, xs, ys, spans):
    """Points are drawn to a tenth of 1,000 x 300 units."""
    assert len(points) == len(xs)
    assert [x for x, _ in points] == pytest.approx(list(xs), abs=spans[0] / 9000)
    assert [y for _, y in points] == pytest.approx(list(ys), abs=spans[1] / 2900)


def valid(i, loss, dataset=None, **more):
    name = {} if dataset is None else {"dataset": dataset}
    return {"kind": "valid", "iteration": i, "consumed_samples": 4 * i, **name, "lm loss": loss, **more}


class ResumedRun:
    """Records of iterations 1 to 75 of 120. The first process lost iterations 41 to 43; the second one started a day
    later, from iteration 40."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.losses = {i: 5 / math.sqrt(i) + draw.random() / 10 for i in range(1, 76)}
        self.tokens = {i: draw.randint(50_000, 400_000) for i in range(1, 76)}
        self.skipped = set(draw.sample(range(1, 76), 4))
        self.valid = {20: 2.9, 40: 1.75, 60: 2.25, 75: 2.5}
        self.other = {20: 1.5, 40: 2.0, 60: 1.25, 75: 1.375}
        self.metrics, self.times, self.lost = [], [], []
        for i in range(1, 76):
            record = train(i, **{"lm loss": self.losses[i], "num_tokens": self.tokens[i], "skipped": i in self.skipped})
            self.metrics.append(record)
            if i in self.valid:
                self.metrics += [valid(i, self.valid[i], "a"), valid(i, self.other[i], "b")]
        self.lost = [train(i) for i in (41, 42, 43)]
        clock, settings = FIRST_START, {"log_interval": 5}
        self.log_points = {1: 1, **{i: 4 if i == 5 else 5 for i in range(5, 76, 5)}, 41: 1, 45: 4}
        self.timing, self.evaluations, self.saves = {}, 0.0, 0.0
        self.times.append(start(time=clock, train_iters=120, settings=settings))
        for i in sorted(self.log_points):
            if i == 41:
                clock += 86_400 - 4000  # not running
                self.times.append(start(40, time=clock, train_iters=120, settings=settings))
            seconds, count = draw.uniform(20, 60), self.log_points[i]
            clock += seconds * count + draw.uniform(0, 5)
            peak = draw.randint(10, 70) * 2**30 + draw.randint(0, 2**30)
            self.timing[i] = {
                "time": clock, "iterations": count, "seconds_per_iteration": seconds,
                "tokens_per_second": 1e6 / seconds, "tflops_per_device": 9000 / seconds, "mfu": 9 / seconds,
                "memory": {"mem-max-allocated-bytes": peak, "mem-allocated-bytes": peak // 3, "mem-allocated-count": 9},
            }  # fmt: skip
            self.times.append(timing(i, **self.timing[i]))
            if i in self.valid:
                clock += 30.0
                self.evaluations += 25.0
                self.saves += 3.5
                self.times.append({"kind": "evaluation", "iteration": i, "seconds": 25.0, "time": clock})
                save = {"kind": "save", "iteration": i, "seconds": 80.0, "stall_seconds": 3.5, "bytes": 7e9}
                self.times.append({**save, "time": clock})
        self.wall = clock - FIRST_START

    def write(self, folder):
        write(folder / "metrics.jsonl", self.metrics)
        write(folder / "timing.jsonl", self.times)
        write(folder / "metrics.jsonl.cut-40", self.lost)
        write(folder / "timing.jsonl.cut-40", [timing(43, iterations=3, seconds_per_iteration=31.0), end(43, "failed")])
        return folder


def build_text(folder, age=60.0):
    changed = max(path.stat().st_mtime for path in folder.iterdir())
    return build_page(read_run(folder, changed + age))


@pytest.mark.parametrize("seed", range(3))
def test_read_figures_a_resumed_run_equal_the_definition(tmp_path, seed):
    run = ResumedRun(seed)
    figures = read_figures(build_text(run.write(tmp_path)))
    assert figures["iteration"] == "75 of 120" and figures["samples"] == "300"
    timings = list(run.timing.values())
    busy = sum(record["iterations"] * record["seconds_per_iteration"] for record in timings)
    expected = {
        "tokens": sum(run.tokens.values()),
        "lm loss, mean of the last 75": mean(run.losses.values()),
        "tokens/s, median": median_high([record["tokens_per_second"] for record in timings]),
        "TFLOP/s per GPU, median": median_high([record["tflops_per_device"] for record in timings]),
        "MFU, median": median_high([record["mfu"] for record in timings]),
        "memory, peak": max(record["memory"]["mem-max-allocated-bytes"] for record in timings) / 1024**3,
        "skipped iterations": len(run.skipped),
        "goodput": busy / run.wall,
    }
    for name, value in expected.items():
        tolerance = {"abs": 6e-4} if figures[name].endswith("%") else {"rel": 2e-3}
        assert parse_number(figures[name]) == pytest.approx(value, **tolerance), (name, figures[name])
    assert figures["memory, peak"].endswith(" GiB") and "NaN iterations" not in figures
    assert figures["lowest lm loss, validation-a"] == "1.7500 at 40"
    assert figures["lowest lm loss, validation-b"] == "1.2500 at 60"
    assert parse_duration(figures["wall time"]) == pytest.approx(run.wall, abs=1)
    assert parse_duration(figures["remaining, about"]) == pytest.approx(run.wall / 75 * (120 - 75), abs=1)


def test_the_recent_loss_is_the_mean_of_the_last_100_iterations(tmp_path):
    write(tmp_path / "metrics.jsonl", [train(i, **{"lm loss": float(i)}) for i in range(1, 251)])
    assert read_figures(build_text(tmp_path))["lm loss, mean of the last 100"] == f"{mean(range(151, 251)):.4f}"


def test_the_use_of_time_adds_up_to_the_wall_time(tmp_path):
    run = ResumedRun(0)
    text = build_text(run.write(tmp_path))
    table = text[text.index('<section id="time">') :]
    rows = re.findall(r'<tr><td>(.*?)</td><td class="num">(.*?)</td><td class="num">(.*?)</td>', table)
    uses = {name: (parse_duration(seconds), parse_number(share)) for name, seconds, share in rows}
    expected = {
        "iterations": sum(item["iterations"] * item["seconds_per_iteration"] for item in run.timing.values()),
        "evaluation": run.evaluations,
        "checkpoint saving": run.saves,
        "repeated iterations": 3 * 31.0,
    }
    expected["starting, loading, not running"] = run.wall - sum(expected.values())
    assert uses.keys() == expected.keys()
    for name, seconds in expected.items():
        assert uses[name] == (pytest.approx(seconds, abs=1), pytest.approx(seconds / run.wall, abs=6e-4)), name


def test_short_uses_of_time_are_shown(tmp_path):
    times = [start(), timing(10, iterations=1, seconds_per_iteration=0.5), end(10)]
    write(tmp_path / "metrics.jsonl", [train(1)])
    write(tmp_path / "timing.jsonl", times)
    assert "<td>iterations</td>" in build_text(tmp_path)


def test_parts_of_an_iteration_have_their_names(tmp_path):
    parts = {"forward_backward": 0.5, "update": 0.25, "data_wait": 0.125, "device_wait": 0.0625}
    write(tmp_path / "metrics.jsonl", [train(i) for i in range(1, 11)])
    write(
        tmp_path / "timing.jsonl",
        [start(), *(timing(i, seconds_per_iteration=1.0, parts_seconds=parts) for i in (5, 10))],
    )
    _, legend, _ = read_curves(build_text(tmp_path), "chart-seconds")
    names = (
        "iteration", "forward and backward", "update and reduction", "host waits for data", "host waits for device",
    )  # fmt: skip
    assert legend == dict(zip(names, (1.0, *parts.values())))


def test_remaining_time_in_the_folder_of_a_resumed_run_starts_at_its_first_iteration(tmp_path):
    """The first 1,000 iterations are in another folder: --load and --save differ."""
    times = [
        start(1000, train_iters=1200),
        *(timing(i, time=NOW - 1000 + 8 * (i - 1000)) for i in range(1005, 1051, 5)),
    ]
    write(tmp_path / "metrics.jsonl", [train(i) for i in range(1001, 1051)])
    write(tmp_path / "timing.jsonl", times)
    left = parse_duration(read_figures(build_text(tmp_path))["remaining, about"])
    assert left == pytest.approx(8 * 150, abs=1)


def test_charts_show_every_record_of_a_short_run(tmp_path):
    run = ResumedRun(1)
    text = build_text(run.write(tmp_path))
    curves, legend, spans = read_curves(text, "chart-lm-loss")
    assert_points(curves["strong", "training"], run.losses, run.losses.values(), spans)
    assert_points(curves["dots", "validation-a"], run.valid, run.valid.values(), spans)
    assert_points(curves["dots", "validation-b"], run.other, run.other.values(), spans)
    assert legend["training"] == pytest.approx(run.losses[75], rel=1e-3) and legend["validation-a"] == 2.5
    memory = {
        "max-allocated": [item["memory"]["mem-max-allocated-bytes"] / 1024**3 for item in run.timing.values()],
        "allocated": [item["memory"]["mem-allocated-bytes"] / 1024**3 for item in run.timing.values()],
    }
    curves, legend, spans = read_curves(text, "chart-memory")
    assert "memory, GiB" in text and legend.keys() == memory.keys()
    for name, values in memory.items():
        assert_points(curves["strong", name], run.timing, values, spans)
        assert legend[name] == pytest.approx(values[-1], rel=1e-3)
    for key, field, name in (
        ("chart-tokens-per-second", "tokens_per_second", "tokens per second"),
        ("chart-tflops-per-device", "tflops_per_device", "TFLOP/s per GPU"),
    ):
        curves, legend, spans = read_curves(text, key)
        values = [item[field] for item in run.timing.values()]
        assert_points(curves["strong", name], run.timing, values, spans)
    curves, _, spans = read_curves(text, "chart-seconds")
    values = [item["seconds_per_iteration"] for item in run.timing.values()]
    assert_points(curves["strong", "iteration"], run.timing, values, spans)


@pytest.mark.parametrize("length", [4000, 801])
def test_long_charts_show_the_means_and_extremes_of_400_runs_of_points(tmp_path, length):
    draw = np.random.default_rng(length)
    losses = draw.normal(3, 1, length)
    write(tmp_path / "metrics.jsonl", [train(i + 1, **{"lm loss": float(loss)}) for i, loss in enumerate(losses)])
    curves, _, spans = read_curves(build_text(tmp_path), "chart-lm-loss")
    strong, pale = curves["strong", ""], curves["pale", "training"]
    assert len(strong) == 400 and len(pale) <= 800
    if length % 400 == 0:
        runs = losses.reshape(400, -1)
        size = runs.shape[1]
        assert_points(strong, np.arange(400) * size + size // 2 + 1, runs.mean(axis=1), spans)
        ends = np.stack([runs.argmin(axis=1), runs.argmax(axis=1)], axis=1)
        extremes = np.sort((np.arange(400)[:, None] * size + ends + 1).flatten())
        assert_points(pale, extremes, losses[extremes - 1], spans)
    sizes = np.diff([length * i // 400 for i in range(401)])
    assert np.average([y for _, y in strong], weights=sizes) == pytest.approx(losses.mean(), abs=spans[1] / 2900)
    assert max(y for _, y in pale) == pytest.approx(losses.max(), abs=spans[1] / 2900)
    assert min(y for _, y in pale) == pytest.approx(losses.min(), abs=spans[1] / 2900)


@pytest.mark.parametrize(
    "settings, seconds, limit",
    [
        ({"log_interval": 50}, 100.0, 50_000),  # ten log intervals
        ({}, 2.0, 2000),  # the default interval of 100 iterations
        ({"log_interval": 5}, 0.5, 600),  # ten minutes
        ({"log_interval": 1}, 900.0, 9000),  # iterations of a quarter of an hour
    ],
)
def test_a_run_is_silent_after_ten_log_intervals_but_not_before_ten_minutes(tmp_path, settings, seconds, limit):
    """The last record gives the pace."""
    records = [timing(10, seconds_per_iteration=1e-3), timing(20, seconds_per_iteration=seconds)]
    write(tmp_path / "metrics.jsonl", [train(i) for i in range(1, 21)])
    write(tmp_path / "timing.jsonl", [start(settings=settings), *records])
    changed = max(path.stat().st_mtime for path in tmp_path.iterdir())
    assert read_run(tmp_path, changed + 0.9 * limit).status == "running"
    assert read_run(tmp_path, changed + 1.1 * limit).status == "silent"


@pytest.mark.parametrize("values, expected", [
    ([math.nan, 3.0, 2.0, 2.5], "2.0000 at 30"), ([3.0, math.inf, math.nan], "3.0000 at 10"), ([math.nan], None),
])  # fmt: skip
def test_the_lowest_validation_loss_is_finite(tmp_path, values, expected):
    records = [valid(10 * (i + 1), str(value) if value != value or value == math.inf else value)
               for i, value in enumerate(values)]  # fmt: skip
    write(tmp_path / "metrics.jsonl", [train(1), *records])
    assert read_figures(build_text(tmp_path)).get("lowest lm loss, validation") == expected


def test_timeline_names_every_kind_of_event_with_its_number(tmp_path):
    run = ResumedRun(2)
    text = build_text(run.write(tmp_path))
    rows = dict(re.findall(r'aria-label="([^":]+): (\d+)"', text[text.index('<section id="timeline">') :]))
    assert rows == {
        "starts": "2", "evaluations": "4", "checkpoints": "4", "skipped": "4", "rollbacks": "1", "failures": "1",
    }  # fmt: skip


def test_hardware_is_named_if_it_is_known(tmp_path):
    text = build_text(ResumedRun(0).write(tmp_path / "known"))
    assert "2 x NVIDIA H100 · written" in text
    versions = dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", text[text.index('id="versions"') :]))
    assert versions["device"] == "NVIDIA H100" and versions["ranks"] == "2"
    write(tmp_path / "unknown" / "metrics.jsonl", [train(1)])
    text = build_text(tmp_path / "unknown")
    assert '<p class="soft">written' in text and "<title>unknown</title>" in text
