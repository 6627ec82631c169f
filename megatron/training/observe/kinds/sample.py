"""Records of texts that the model under training wrote (--sample-prompts)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.config.errors import printable
from megatron.training.observe.metrics import METRICS_FILE, TIMING_FILE, Record
from megatron.training.observe.records import RecordKind, RunInfo


@dataclass(frozen=True)
class Sample:
    """Text that the model under training wrote after a prompt."""

    number: int
    """Position in --sample-prompts, from 1."""
    prompt: str
    text: str
    """Continuation, without the prompt."""
    final: bool = False
    """Whether it was written after training, not at an interval."""
    seconds: float = 0.0
    """Share of the duration of all samples."""
    cut: bool = False
    """Whether the text ended at its maximum length, not at an end-of-document token."""


def _lines(record: Record, run: RunInfo) -> list[str]:
    """One line with prompt and text as quoted strings: without line ends and control characters."""
    prompt, text = (printable(json.dumps(record[name], ensure_ascii=False)) for name in ("prompt", "text"))
    return [f" sample {record['number']} at iteration {record['iteration']} | {prompt} | {text}"]


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
)
GENERATION = RecordKind(
    name="generation",
    fields={"seconds": "duration of all samples"},
    file=TIMING_FILE,
    flush="fsync",
    tags=lambda record, run: {"generation-time": record["seconds"]},
)
KINDS = (SAMPLE, GENERATION)


def sample_records(samples: Sequence[Sample]) -> Iterator[tuple[RecordKind, Record]]:
    """Yield kind and values of the records of a set of samples."""
    for sample in samples:
        marks = {name: True for name in ("cut", "final") if getattr(sample, name)}
        yield SAMPLE, marks | {"number": sample.number, "prompt": sample.prompt, "text": sample.text}
    yield GENERATION, {"seconds": sum(sample.seconds for sample in samples)}
