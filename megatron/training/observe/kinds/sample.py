"""Records of texts that the model under training wrote (--sample-prompts)."""

from __future__ import annotations

import json
from html import escape

from megatron.core.config.errors import printable
from megatron.training.observe.metrics import METRICS_FILE, TIMING_FILE
from megatron.training.observe.page.charts import Section, evenly
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.observe.run_folder import Run, number

MOST_TEXTS = 8
"""Samples per prompt on a page, evenly spaced over the run, the first and the last among them."""
MOST_CHARACTERS = 4000
"""Characters of a prompt or text on a page."""


def _lines(record: Record, run: RunInfo) -> list[str]:
    """One line with prompt and text as quoted strings: without line ends and control characters."""
    prompt, text = (printable(json.dumps(record[name], ensure_ascii=False)) for name in ("prompt", "text"))
    return [f" sample {record['number']} at iteration {record['iteration']} | {prompt} | {text}"]


def _read(run: Run, record: Record) -> None:
    if isinstance(record.get("number"), int) and all(isinstance(record.get(name), str) for name in ("prompt", "text")):
        run.records.setdefault("sample", []).append(record)


def _sections(run: Run) -> list[Section]:
    """The later text of an iteration replaces the earlier one: a complete run was started again."""
    prompts: dict[int, dict[int, Record]] = {}
    for record in run.records.get("sample", []):
        prompts.setdefault(record["number"], {})[record["iteration"]] = record
    html = "".join(_texts(list(prompts[number].values())) for number in sorted(prompts))
    return [Section("samples", "Samples", html=html, position=10)]


def _texts(samples: list[Record]) -> str:
    """Samples of one prompt."""
    selected = [samples[index] for index in evenly(len(samples), MOST_TEXTS)]
    few = "" if len(selected) == len(samples) else f" <small>{len(selected)} of {len(samples)} samples</small>"
    rows = "".join(
        f"<dt>iteration {sample['iteration']:,}</dt><dd><b>{escape(sample['prompt'][:MOST_CHARACTERS])}</b>"
        f"{escape(sample['text'][:MOST_CHARACTERS])}{_end(sample)}</dd>"
        for sample in selected
    )
    return f'<h3>Prompt {samples[0]["number"]}{few}</h3><dl class="texts">{rows}</dl>'


def _end(sample: Record) -> str:
    if len(sample["text"]) > MOST_CHARACTERS:
        return f" <small>… {MOST_CHARACTERS:,} of {len(sample['text']):,} characters</small>"
    return " <small>… cut at --sample-tokens</small>" if sample.get("cut") is True else ""


SAMPLE = RecordKind(
    name="sample",
    fields={
        "cut": "true if the text ended at --sample-tokens, else absent",
        "final": "true after training, else absent",
        "number": "position of the prompt in --sample-prompts, from 1",
        "prompt": "prompt",
        "text": "text that the model wrote after it",
    },
    file=METRICS_FILE,
    tags=lambda record, run: {f"sample {record['number']}": record["prompt"] + record["text"]},
    console=_lines,
    read=_read,
    page=_sections,
)
GENERATION = RecordKind(
    name="generation",
    fields={"seconds": "duration of all samples"},
    file=TIMING_FILE,
    flush="fsync",
    tags=lambda record, run: {"generation-time": record["seconds"]},
    read=lambda run, record: run.spend("samples", number(record, "seconds")),
)
KINDS = (SAMPLE, GENERATION)
