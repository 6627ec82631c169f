"""Comparison of runs: figures, settings, the first iteration that differs; charts with the curves of all runs.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from megatron.training.observe.page.charts import Line, Section
from megatron.training.observe.page.page import drawn, html_page, key_figures, kind_sections, x_range
from megatron.training.observe.run_folder import Run


def first_difference(first: Run, other: Run) -> str:
    """Return a sentence with the first iteration in which a value of ``metrics.jsonl`` differs, bit for bit."""
    one, two = (
        {(x, name): y for name, series in (run.train | run.statistics).items() for x, y in zip(series.x, series.y)}
        for run in (first, other)
    )
    common = one.keys() & two.keys()
    differing = [key for key in common if one[key] != two[key] and repr(one[key]) != repr(two[key])]  # NaN equals NaN
    if not differing:
        return f"no value differs in {len({iteration for iteration, _ in common}):,} common iterations"
    iteration, name = min(differing)
    values = one[iteration, name], two[iteration, name]
    return f"the first difference is in iteration {iteration:,}: {name} {values[0]!r} and {values[1]!r}"


def _rows(tables: Sequence[Mapping[str, object]]) -> list[list[str]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return [[name, *(str(table.get(name, "")) for table in tables)] for name in names]


def compare_text(runs: Sequence[Run]) -> str:
    """Return the comparison for a terminal: tables of key figures and of settings that differ (empty: unknown, or the
    default), and the first difference from the first run."""
    figures = [{"status": run.status, **dict(key_figures(run))} for run in runs]
    settings = _rows([run.settings for run in runs])
    differing = [row for row in settings if len(set(row[1:])) > 1]
    table = [["", *(run.label for run in runs)], *_rows(figures), [], ["settings that differ"], *differing, []]
    widths = [max(len(row[column]) for row in table if len(row) > column) for column in range(len(runs) + 1)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    lines += [f"{runs[0].label} and {run.label}: {first_difference(runs[0], run)}" for run in runs[1:]]
    return "\n".join(lines) + "\n"


def compare_page(runs: Sequence[Run]) -> str:
    """Return an HTML page with the comparison and every chart of the runs."""
    merged: dict[str, Section] = {}
    for run in runs:
        for section in kind_sections(run):
            target = merged.setdefault(section.key, replace(section, charts=[], html=""))
            for chart in section.charts:
                lines = [Line(f"{run.label}: {line.label}", line.series, line.style) for line in chart.lines]
                match = next((known for known in target.charts if known.key == chart.key), None)
                if match is None:
                    target.charts.append(replace(chart, lines=lines))
                else:
                    match.lines += lines
    ranges = [x_range(run) for run in runs]
    span = min(low for low, _ in ranges), max(high for _, high in ranges)
    title = escape(" and ".join(run.label for run in runs))
    head = f'<header id="head"><h1>{title}</h1></header><pre id="comparison">{escape(compare_text(runs))}</pre>'
    sections = sorted(merged.values(), key=lambda section: section.position)
    return html_page(title, [head, *(drawn(section, span) for section in sections)])
