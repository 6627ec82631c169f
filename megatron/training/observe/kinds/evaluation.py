"""Records of evaluations: losses of data sets, scores of tasks, and their duration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.training.observe.metrics import METRICS_FILE, TIMING_FILE, record_losses
from megatron.training.observe.page.charts import Chart, Line, Section, slug
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.observe.run_folder import Event, Run, Series, is_number, number, unix_time


@dataclass(frozen=True)
class EvalResult:
    """Losses of one evaluated data set, as means per valid token."""

    name: Literal["validation", "test"]
    dataset: str | None
    """Validation set, if several are evaluated separately; else None."""
    losses: dict[str, float]
    final: bool = False
    """Whether it was evaluated after training, not at --eval-interval."""
    seconds: float = 0.0
    """Duration of the evaluation of this set."""


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss clamped at 20 as in Megatron-LM, which bounds the width of the number."""
    return math.exp(min(20.0, loss))


def _loss_tags(record: Record, run: RunInfo) -> Mapping[str, float]:
    """``LOSS validation`` or ``LOSS test``, with ``-DATASET`` for named sets."""
    split = SPLITS[record["kind"]]
    suffix = f"-{record['dataset']}" if "dataset" in record else ""
    values = {f"{name} {split}{suffix}": value for name, value in record_losses(record).items()}
    if run.logging.log_validation_ppl_to_tensorboard:
        values |= {f"{tag} ppl": perplexity(value) for tag, value in values.items()}
    return values


def _loss_lines(record: Record, run: RunInfo) -> list[str]:
    """Three lines: value and perplexity of each loss between rules of dashes. The split is named only for final or test
    results, and the data set if there are several."""
    split = SPLITS[record["kind"]]
    suffix = f"-{record['dataset']}" if "dataset" in record else ""
    names_split = record.get("final") or split == "test"
    line = f" validation{suffix} loss at iteration {record['iteration']}{f' on {split} set' if names_split else ''} | "
    for name, value in record_losses(record).items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def _score_lines(record: Record, run: RunInfo) -> list[str]:
    scores = " | ".join(f"{name}: {value:.4f}" for name, value in record_losses(record).items())
    return [f" task {record['dataset']} at iteration {record['iteration']} | {scores}"]


def _read_result(run: Run, record: Record) -> None:
    name, split = record.get("dataset"), SPLITS[record["kind"]]
    data = f"{split}-{name}" if isinstance(name, str) else split
    for loss, value in record_losses(record).items():
        if is_number(value):
            run.evaluation.setdefault((loss, data), Series()).add(record["iteration"], value)


def _read_score(run: Run, record: Record) -> None:
    for metric, value in record_losses(record).items():
        if is_number(value):
            run.scores.setdefault((metric, str(record.get("dataset"))), Series()).add(record["iteration"], value)


def _read_duration(run: Run, record: Record) -> None:
    seconds = number(record, "seconds")
    run.events.append(Event(record["iteration"], "evaluation", f"{seconds:.3g} s", unix_time(record)))
    run.spend("evaluation", seconds)


def _score_sections(run: Run) -> list[Section]:
    charts = {metric: Chart(f"chart-task-{slug(metric)}", metric) for metric, _ in run.scores}
    for (metric, task), series in run.scores.items():
        charts[metric].lines.append(Line(task, series, "dots"))
    return [Section("tasks", "Scores of tasks", list(charts.values()), position=5)]


SPLITS = {"valid": "validation", "test": "test"}
VALID, TEST = (
    RecordKind(
        name=name,
        fields={
            "dataset": "name of the data set, if several are evaluated separately",
            "final": "true after training, else absent",
            "NAME loss": "mean of each loss per valid token of the evaluated samples",
        },
        file=METRICS_FILE,
        flush="write",
        tags=_loss_tags,
        console=_loss_lines,
        read=_read_result,
    )
    for name in SPLITS
)
TASK = RecordKind(
    name="task",
    fields={"dataset": "task of --eval-tasks", "METRIC": "score"},
    file=METRICS_FILE,
    flush="write",
    tags=lambda record, run: {f"{record['dataset']} {name}": value for name, value in record_losses(record).items()},
    console=_score_lines,
    read=_read_score,
    page=_score_sections,
)
EVALUATION = RecordKind(
    name="evaluation",
    fields={"seconds": "duration of the evaluation of all data sets"},
    file=TIMING_FILE,
    flush="fsync",
    tags=lambda record, run: {"evaluation-time": record["seconds"]},
    read=_read_duration,
)
KINDS = (VALID, TEST, TASK, EVALUATION)


def evaluation_records(results: Sequence[EvalResult]) -> Iterator[tuple[RecordKind, Record]]:
    """Yield kind and values of the records of an evaluation."""
    for result in results:
        values: Record = {} if result.dataset is None else {"dataset": result.dataset}
        values |= {"final": True} if result.final else {}
        yield (
            VALID if result.name == "validation" else TEST,
            values | {name: float(loss) for name, loss in result.losses.items()},
        )
    if any(result.seconds for result in results):  # not for results that are reported again
        yield EVALUATION, {"seconds": sum(result.seconds for result in results)}
