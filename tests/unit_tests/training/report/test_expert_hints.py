"""Hints of the dry run: experts split in another way over the same ranks."""

import re

import pytest

from megatron.training.arguments import parse_args, validate_args
from megatron.training.report.dry_run import dry_run_report
from megatron.training.report.expert_hints import expert_hints
from megatron.training.report.memory import estimate_memory
from tests.unit_tests.core.config.test_absent import TINY

MIXTRAL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 8 --bf16 --normalization RMSNorm "
    "--micro-batch-size 1 --global-batch-size 256 --moe-ffn-hidden-size 14336 --num-experts 8 --vocab-size 32000 "
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
)


def largest_gib(text, ranks):
    words = [word for word in (TINY + text).split() if word != "--dry-run"]
    cfg = validate_args(parse_args(words), ranks)
    return max(rank.total for rank in estimate_memory(cfg, 32000)) / 1024**3


def hints(text, ranks):
    inputs = [word for word in (TINY + text).split() if word != "--dry-run"]
    return [row for _, row in expert_hints(validate_args(parse_args(inputs), ranks), 32000)]


@pytest.mark.parametrize(
    ("text", "ranks", "start", "reason"),
    [
        (MIXTRAL + "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2", 16,
         "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1: ", "of width 14336 and not 7168"),
        (MIXTRAL + "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1", 16,
         "--expert-model-parallel-size ", "GiB per rank are more than the 75 of a GPU of 80 GB"),
        ("--num-experts 16 --expert-model-parallel-size 16", 16,
         "--expert-model-parallel-size ", "tokens stay within a host of 8 GPUs"),
    ],
)  # fmt: skip
def test_a_hint_comes_with_its_reason_and_the_memory_of_its_flags(text, ranks, start, reason):
    (hint,) = hints(text, ranks)
    assert hint.startswith(start) and reason in hint, hint
    flags = hint[: hint.index(": ")]
    now, proposed = (largest_gib(f"{text} {more}", ranks) for more in ("", flags))
    printed = [int(number) for pair in re.findall(r"(\d+) GiB|(?:now|take) (\d+)", hint) for number in pair if number]
    assert sorted(printed) == sorted([round(now), round(proposed)]), hint


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("", 4), ("--num-experts 8", 2), (MIXTRAL + "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1", 16)],
)
def test_no_hint_where_there_is_nothing_better(text, ranks):
    assert hints(text, ranks) == []


def test_the_report_prints_it():
    text = TINY + "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel --dry-run"
    assert "  hint " in dry_run_report(validate_args(parse_args(text.split()), 2))
