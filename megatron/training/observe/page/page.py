"""HTML page about a run: one file without references to others, which reads without JavaScript. Torch-free.

All texts from the run are escaped, and a content policy allows only the page's own script, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from html import escape
from importlib.resources import files
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.safe_files import create_file
from megatron.training.observe.page.charts import Chart, Line, draw, draw_rows, finite, short
from megatron.training.observe.page.run_folder import Run, SampleText, Series, is_number, number, read_run, table
from megatron.training.observe.plan_comparison import plan_shares

PAGE_FILE = "report.html"
MOST_EVENTS = 300
MOST_TEXTS = 8
"""Samples per prompt, evenly spaced over the run, the first and the last among them."""
MOST_CHARACTERS = 4000
"""Characters of a prompt and of a text."""
MOST_LAYERS = 8
"""Layers that a chart shows, evenly spaced."""
ROWS = {
    "starts": ("start", ("start", "restart")),
    "evaluations": ("", ("evaluation",)),
    "checkpoints": ("", ("save",)),
    "skipped": ("bad", ("skipped",)),
    "NaN": ("bad", ("NaN",)),
    "rollbacks": ("bad", ("rollback",)),
    "failures": ("bad", ("failure",)),
}
"""Rows of the timeline: (class of the marks, kinds of events)."""
STATUS = {"silent": "no end recorded"}
PARTS = {
    "parts/forward_backward": "forward and backward",
    "parts/update": "update and reduction",
    "parts/data_wait": "host waits for data",
    "parts/device_wait": "host waits for device",
}


def write_page(run: Path, output: Path, log: Path | None = None) -> None:
    """Write the page of the run in the folder ``run`` to ``output``, which is replaced at once. Raises UserError if
    there is no run, and OSError if the page cannot be written."""
    if output.is_dir() or not output.name:
        raise UserError(f"--output {output}: is a folder; give the path of a file")
    text = build_page(read_run(run, time.time(), log))
    new = output.with_name(f"{output.name}.new")
    with create_file(new) as file:
        file.write(text.encode())
    os.replace(new, output)


def build_page(run: Run) -> str:
    """Return the HTML of the page."""
    resources = files("megatron.training.observe.page")
    style, script = (resources.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    name = escape(": ".join(filter(None, (run.name, run.model))))
    sections = [
        _head(run, name),
        _list("problems", "Problems of the files", run.problems),
        _charts("losses", "Losses and learning", learning_charts(run), run),
        _samples(run),
        _charts("speed", "Speed and memory", speed_charts(run), run),
        _plan(run),
        _charts("experts", "Load of experts", expert_charts(run), run),
        _charts("layers", "Layers", layer_charts(run), run),
        _timeline(run),
        _time_use(run),
        _settings(run),
        _table("versions", "Versions and hardware", sorted((run.versions | _hardware(run)).items())),
        _log(run),
    ]
    body = "\n".join(filter(None, sections))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        f"<style>{style}</style></head><body>\n{body}\n<script>{script}</script></body></html>\n"
    )


def _section(key: str, title: str, content: str) -> str:
    return f'<section id="{key}"><h2>{escape(title)}</h2>{content}</section>' if content else ""


def _list(key: str, title: str, lines: Sequence[str]) -> str:
    return _section(key, title, f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else "")


def _rows(pairs: Iterable[tuple[str, object]]) -> str:
    cells = "".join(f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in pairs)
    return f'<div class="scroll"><table class="settings">{cells}</table></div>'


def _table(key: str, title: str, pairs: Sequence[tuple[str, object]]) -> str:
    return _section(key, title, _rows(pairs) if pairs else "")


# ---- head


def duration(seconds: float) -> str:
    """Return seconds as text, such as 2 days, 3:04:05."""
    return str(timedelta(seconds=round(seconds))) if seconds < 1e11 else f"{seconds:.3g} s"


def remaining(run: Run) -> float | None:
    """Return the seconds until the end at the mean pace since the first start, with evaluations and saves, or None."""
    num_iterations = run.iteration - (x_range(run)[0] - 1)
    if not run.wall or num_iterations <= 0 or run.train_iters <= run.iteration:
        return None
    return run.wall / num_iterations * (run.train_iters - run.iteration)


def speeds(run: Run) -> dict[str, tuple[str, str]]:
    """Return (name of the figure, title of the chart) of each measured rate; TFLOP/s and MFU are rates of GPUs."""
    rates = {"tokens_per_second": ("tokens/s", "tokens per second")}
    if run.device != "CPU":
        rates |= {"tflops_per_device": ("TFLOP/s per GPU", "TFLOP/s per GPU"), "mfu": ("MFU", "MFU")}
    return rates


def key_figures(run: Run) -> list[tuple[str, str]]:
    """Return (name, value) of the most important figures; unknown ones are absent."""
    total = f" of {run.train_iters:,}" if run.train_iters else ""
    facts = [("iteration", f"{run.iteration:,}{total}"), ("samples", short(run.samples)), ("tokens", short(run.tokens))]
    for loss in run.losses[:1]:
        if recent := finite(run.train[loss]).y[-100:]:
            facts.append((f"{loss}, mean of the last {len(recent)}", f"{sum(recent) / len(recent):.4f}"))
    for (loss, data), series in list(run.evaluation.items())[:2]:
        measured = finite(series)
        for lowest, iteration in sorted(zip(measured.y, measured.x))[:1]:
            facts.append((f"lowest {loss}, {data}", f"{lowest:.4f} at {iteration:,}"))
    for key, (name, _) in speeds(run).items():
        values = sorted(run.timing.get(key, Series()).y)
        if values and values[-1] > 0:
            middle = values[len(values) // 2]
            facts.append((f"{name}, median", f"{middle:.1%}" if key == "mfu" else short(middle)))
    peaks = [max(series.y) for name, series in run.timing.items() if name.startswith("memory/") and "max" in name]
    if peaks and max(peaks) > 0:
        facts.append(("memory, peak", f"{max(peaks) / 2**30:.2f} GiB"))
    if run.num_skipped:
        facts.append(("skipped iterations", f"{run.num_skipped:,}"))
    if run.num_nan:
        facts.append(("NaN iterations", f"{run.num_nan:,}"))
    if run.wall:
        facts.append(("wall time", duration(run.wall)))
        facts.append(("goodput", f"{min(run.seconds.get('iterations', 0.0) / run.wall, 1):.1%}"))
    left = remaining(run)
    if run.status == "running" and left is not None:
        facts.append(("remaining, about", duration(left)))
    return facts


def _head(run: Run, name: str) -> str:
    figures = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in key_figures(run))
    where = f"{run.world_size} x {run.device}" if run.world_size and run.device else ""
    about = " · ".join(filter(None, (where, f"written {datetime.now():%Y-%m-%d %H:%M:%S}")))
    status = STATUS.get(run.status, run.status)
    return (
        f'<header id="head"><h1>{name}</h1>'
        f'<p><span id="status" class="status {escape(run.status)}">{escape(status)}</span>'
        f' <span id="reason">{escape(run.reason)}</span></p><p class="soft">{escape(about)}</p>'
        f'<dl class="figures" id="figures">{figures}</dl></header>'
    )


# ---- charts


def x_range(run: Run) -> tuple[int, int]:
    """Return the first and last iteration of the run's series."""
    series = [*run.train.values(), *run.evaluation.values(), *run.timing.values()]
    xs = [line.x[place] for line in series for place in (0, -1)]
    return (min(xs), max(xs)) if xs else (0, 1)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _charts(key: str, title: str, charts: Sequence[Chart], run: Run) -> str:
    """The first of the page is wide."""
    span = x_range(run)
    drawn = list(filter(None, (draw(chart, span) for chart in charts)))
    if key == "losses" and drawn:
        drawn[0] = drawn[0].replace("<figure ", '<figure class="wide" ', 1)
    return _section(key, title, f'<div class="charts">{"".join(drawn)}</div>' if drawn else "")


def learning_charts(run: Run) -> list[Chart]:
    """Return one chart per loss, training and evaluation together, then learning rate, norms and the like."""
    charts = []
    for loss in dict.fromkeys([*run.losses, *(loss for loss, _ in run.evaluation)]):
        lines = [Line("training", run.train[loss])] if loss in run.train else []
        lines += [Line(data, series, "dots") for (name, data), series in run.evaluation.items() if name == loss]
        charts.append(Chart(f"chart-{_slug(loss)}", f"{loss} (mean per token)", lines))
    further_charts = {
        "learning_rate": "learning rate",
        "grad_norm": "gradient norm",
        "params_norm": "parameter norm",
        "num_zeros": "zero gradient elements",
        "loss_scale": "loss scale",
        "global_batch_size": "global batch size",
        "weight_decay": "weight decay",
    }
    for key, title in further_charts.items():
        series = run.train.get(key, Series())
        is_constant = key in ("loss_scale", "global_batch_size") and len(set(series.y)) == 1
        if series.x and not is_constant:
            zero = key == "learning_rate"
            charts.append(Chart(f"chart-{_slug(key)}", title, [Line(title, series)], zero, key.endswith("norm")))
    return charts


def speed_charts(run: Run) -> list[Chart]:
    """Return charts of tokens/s and TFLOP/s if recorded, then of step time with its parts, and memory (GiB)."""
    charts = []
    for key, (_, title) in speeds(run).items():
        if key in run.timing and key != "mfu":  # proportional to TFLOP/s
            charts.append(Chart(f"chart-{_slug(key)}", title, [Line(title, run.timing[key])], from_zero=True))
    lines = [Line("iteration", run.timing["seconds_per_iteration"])] if "seconds_per_iteration" in run.timing else []
    lines += [Line(name, run.timing[key]) for key, name in PARTS.items() if key in run.timing]
    charts.append(Chart("chart-seconds", "seconds per iteration", lines, from_zero=True, cut_spikes=True))
    names = {
        name: name[7:].removeprefix("mem-").removesuffix("-bytes") for name in run.timing if name.endswith("-bytes")
    }
    memory = [
        Line(short_name, Series(run.timing[name].x, [num_bytes / 2**30 for num_bytes in run.timing[name].y]))
        for name, short_name in names.items()
    ]
    charts.append(Chart("chart-memory", "memory, GiB", memory, from_zero=True))
    return charts


def by_layer(run: Run, name: str) -> list[tuple[str, Series]]:
    """Return (layer, series) of a statistic, at most ``MOST_LAYERS`` evenly spaced ones."""
    layers = [(key[: -len(name) - 1], series) for key, series in run.statistics.items() if key.endswith(f"/{name}")]
    return [layers[place] for place in evenly(len(layers), MOST_LAYERS)]


def layer_charts(run: Run) -> list[Chart]:
    """Return one chart per statistic of layers, without statistics of experts."""
    names = dict.fromkeys(key.partition("/")[2] for key in run.statistics)
    return [
        Chart(
            f"chart-layers-{_slug(name)}",
            name.replace("_", " "),
            [Line(*pair) for pair in by_layer(run, name)],
            False,
            True,
        )
        for name in names
        if not name.startswith("tokens_per_expert")
    ]


def expert_charts(run: Run) -> list[Chart]:
    """Return the distribution of tokens over experts, by layer."""
    titles = {
        "entropy": "entropy of the load (1: equal)",
        "max": "tokens of the busiest expert",
        "min": "tokens of the least busy expert",
    }
    charts = []
    for key, title in titles.items():
        lines = [Line(*pair) for pair in by_layer(run, f"tokens_per_expert {key}")]
        charts.append(Chart(f"chart-experts-{key}", title, lines, from_zero=key != "entropy"))
    return charts


# ---- samples


def evenly(count: int, most: int) -> list[int]:
    """Return at most ``most`` indices below ``count``, evenly spaced, the first and the last among them."""
    return list(range(count)) if count <= most else [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _samples(run: Run) -> str:
    return _section("samples", "Samples", "".join(_texts(number, run) for number in sorted(run.texts)))


def _texts(number: int, run: Run) -> str:
    texts = run.texts[number]
    selected = [texts[place] for place in evenly(len(texts), MOST_TEXTS)]
    few = "" if len(selected) == len(texts) else f" <small>{len(selected)} of {len(texts)} samples</small>"
    rows = "".join(
        f"<dt>iteration {sample.iteration:,}</dt>"
        f"<dd><b>{escape(sample.prompt[:MOST_CHARACTERS])}</b>{escape(sample.text[:MOST_CHARACTERS])}{_end(sample)}</dd>"
        for sample in selected
    )
    return f'<h3>Prompt {number}{few}</h3><dl class="texts">{rows}</dl>'


def _end(sample: SampleText) -> str:
    if len(sample.text) > MOST_CHARACTERS:
        return f" <small>… {MOST_CHARACTERS:,} of {len(sample.text):,} characters</small>"
    return " <small>… cut at --sample-tokens</small>" if sample.cut else ""


# ---- plan, timeline, time


def _plan(run: Run) -> str:
    prediction = table(run.start, "prediction")
    if not prediction:
        return ""
    gpu, seconds, error = prediction.get("gpu"), number(prediction, "seconds"), number(prediction, "error")
    lines = [f"<p>Predicted on {escape(str(gpu))}: {seconds:.4g} s per iteration, error {error:.0%}."]
    if run.plan:
        measured, limit = number(run.plan, "measured_seconds"), number(run.plan, "limit_seconds")
        verdict = "slower than planned" if measured > limit else "as planned"
        lines.append(f' Measured: {measured:.4g} s: <b id="verdict">{verdict}</b>.')
    lines.append("</p>")
    parts = table(run.plan, "parts_seconds")
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="num">{number(values, "predicted"):.4g}</td>'
        f'<td class="num">{number(values, "measured"):.4g}</td></tr>'
        for name, values in parts.items()
        if isinstance(values, dict)
    )
    if rows:
        head = '<tr><th>part</th><th class="num">planned, s</th><th class="num">measured, s</th></tr>'
        lines.append(f'<div class="scroll"><table>{head}{rows}</table></div>')
    by_kind = {name: float(value) for name, value in table(prediction, "parts").items() if is_number(value)}  # type: ignore[arg-type]
    if shares := plan_shares(by_kind):
        text = ", ".join(f"{name} {value:.3g} s" for name, value in shares.items())
        lines.append(f'<p class="soft">Plan by kind: {escape(text)}.</p>')
    return _section("plan", "Plan and measurement", "".join(lines))


def _timeline(run: Run) -> str:
    if not run.events:
        return ""
    rows = []
    for label, (style, kinds) in ROWS.items():
        iterations = [event.iteration for event in run.events if event.kind in kinds]
        if iterations:
            rows.append((label, style, iterations))
    selected = [event for event in run.events if event.kind not in ("evaluation", "save")]
    selected = (selected or run.events)[-MOST_EVENTS:]
    cells = "".join(
        f'<tr><td class="num">{event.iteration:,}</td><td>{escape(event.kind)}</td><td>'
        f"{'' if event.time is None else f'{datetime.fromtimestamp(event.time):%Y-%m-%d %H:%M:%S}'}</td>"
        f"<td>{escape(event.text)}</td></tr>"
        for event in selected
    )
    head = '<tr><th class="num">iteration</th><th>event</th><th>time</th><th></th></tr>'
    few = "" if len(selected) == len(run.events) else f" <small>{len(selected)} of {len(run.events)}</small>"
    details = (
        f'<details open><summary>Events{few}</summary><div class="scroll"><table>{head}{cells}</table></div></details>'
    )
    return _section("timeline", "Timeline", draw_rows(rows, x_range(run)) + details)


def _time_use(run: Run) -> str:
    """The rest is starting, loading and the time between processes."""
    if not run.wall:
        return ""
    uses = {name: seconds for name, seconds in run.seconds.items() if seconds > 0}
    uses["starting, loading, not running"] = max(run.wall - sum(uses.values()), 0.0)
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="num">{duration(seconds)}</td>'
        f'<td class="num">{seconds / run.wall:.1%}</td></tr>'
        for name, seconds in uses.items()
    )
    return _section("time", "Use of time", f"<table>{rows}</table>")


# ---- settings, versions, log


def _settings(run: Run) -> str:
    first = _rows(sorted(run.settings.items())) if run.settings else ""
    more = [(name, value) for name, value in sorted(run.all_settings.items()) if name not in run.settings]
    details = f"<details><summary>{len(more)} other settings of the last checkpoint</summary>{_rows(more)}</details>"
    return _section("settings", "Settings", first + (details if more else ""))


def _hardware(run: Run) -> dict[str, object]:
    return {"ranks": run.world_size, "device": run.device} if run.device else {}


def _log(run: Run) -> str:
    text = escape("\n".join(run.log_lines))
    return _section("log", "Warnings and errors in the log", f"<pre>{text}</pre>" if text else "")
