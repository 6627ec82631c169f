"""Record of the comparison of the measured step time with the plan."""

from __future__ import annotations

from html import escape

from megatron.training.observe.metrics import TIMING_FILE
from megatron.training.observe.page.charts import Section
from megatron.training.observe.plan_comparison import plan_shares
from megatron.training.observe.records import Record, RecordKind
from megatron.training.observe.run_folder import Run, is_number, number, table


def _sections(run: Run) -> list[Section]:
    prediction = table(run.start, "prediction")
    if not prediction:
        return []
    plan: Record = next(reversed(run.records.get("plan", [])), {})
    gpu, seconds, error = prediction.get("gpu"), number(prediction, "seconds"), number(prediction, "error")
    lines = [f"<p>Predicted on {escape(str(gpu))}: {seconds:.4g} s per iteration, error {error:.0%}."]
    if plan:
        measured, limit = number(plan, "measured_seconds"), number(plan, "limit_seconds")
        verdict = "slower than planned" if measured > limit else "as planned"
        lines.append(f' Measured: {measured:.4g} s: <b id="verdict">{verdict}</b>.')
    lines.append("</p>")
    parts = table(plan, "parts_seconds")
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
    return [Section("plan", "Plan and measurement", html="".join(lines), position=30)]


PLAN = RecordKind(
    name="plan",
    fields={
        "predicted_seconds": "planned seconds per iteration",
        "measured_seconds": "mean seconds per iteration",
        "limit_seconds": "seconds above which the run is slower than planned",
        "parts_seconds": "predicted and measured seconds by part of an iteration",
        "apart_seconds": "seconds per iteration outside of iterations: evaluation, samples, checkpoint saving",
    },
    file=TIMING_FILE,
    read=lambda run, record: run.records.setdefault("plan", []).append(record),
    page=_sections,
)
KINDS = (PLAN,)
