"""HTML page about a run: one file without references to others, which reads without JavaScript. Torch-free.

All texts from the run are escaped, and a content policy allows only the page's own script, by its hash."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from html import escape
from importlib.resources import files
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.safe_files import create_file
from megatron.training.observe.kinds.timing import speeds
from megatron.training.observe.page.charts import Chart, Line, Section, draw, draw_rows, finite, short, slug
from megatron.training.observe.records import RecordKind, kinds
from megatron.training.observe.run_folder import Run, Series, read_run

PAGE_FILE = "report.html"
MOST_EVENTS = 300
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


def write_page(run: Path, output: Path, log: Path | None = None) -> None:
    """Write the page of the run in the folder ``run`` to ``output``, which is replaced at once. Raises UserError if
    there is no run, and OSError if the page cannot be written."""
    save_page(build_page(read_run(run, time.time(), log)), output)


def save_page(text: str, output: Path) -> None:
    """Replace the file ``output`` at once. Raises UserError for a folder or a file in a missing folder, and OSError if
    it cannot be written."""
    if output.is_dir() or not output.name:
        raise UserError(f"--output {output}: is a folder; give the path of a file")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}; create it, or correct the path")
    new = output.with_name(f"{output.name}.new")
    with create_file(new) as file:
        file.write(text.encode())
    os.replace(new, output)


def build_page(run: Run) -> str:
    """Return the HTML of the page."""
    name, span = escape(": ".join(filter(None, (run.name, run.model)))), x_range(run)
    sections = [
        _head(run, name),
        _list("problems", "Problems of the files", run.problems),
        *(drawn(section, span) for section in kind_sections(run)),
        _timeline(run),
        _time_use(run),
        _settings(run),
        _table("versions", "Versions and hardware", sorted((run.versions | _hardware(run)).items())),
        _log(run),
    ]
    return html_page(name, sections)


def html_page(title: str, sections: Iterable[str]) -> str:
    """Return a page with style and script; ``title`` and ``sections`` are HTML, empty sections are left out."""
    resources = files("megatron.training.observe.page")
    style, script = (resources.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    body = "\n".join(filter(None, sections))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
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


def kind_sections(run: Run) -> list[Section]:
    """Return the sections of all kinds of records, unknown kinds in the files included."""
    known = kinds()
    pages = [kind.page(run) for kind in known.values() if kind.page is not None]
    numbers = [
        _number_section(known.get(name), name, series)
        for name, series in run.numbers.items()
        if getattr(known.get(name), "page", None) is None
    ]
    return sorted([*(section for page in pages for section in page), *numbers], key=lambda section: section.position)


def _number_section(kind: RecordKind | None, name: str, numbers: dict[str, Series]) -> Section:
    meanings = {} if kind is None else kind.fields
    charts = [
        Chart(f"chart-{slug(name)}-{slug(key)}", key, [Line(meanings.get(key, key), series)])
        for key, series in numbers.items()
    ]
    return Section(slug(name), name.replace("_", " "), charts)


def drawn(section: Section, span: tuple[int, int]) -> str:
    """The first chart of the page is wide."""
    drawn = list(filter(None, (draw(chart, span) for chart in section.charts)))
    if section.key == "losses" and drawn:
        drawn[0] = drawn[0].replace("<figure ", '<figure class="wide" ', 1)
    charts = f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""
    return _section(section.key, section.title, charts + section.html)


# ---- timeline, time


def _timeline(run: Run) -> str:
    if not run.events:
        return ""
    rows = []
    for label, (style, names) in ROWS.items():
        iterations = [event.iteration for event in run.events if event.kind in names]
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
