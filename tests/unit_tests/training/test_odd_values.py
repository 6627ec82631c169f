"""Every flag with every odd value: an answer or one list of problems, never another exception, and no list as long as a
number. Through the whole of ``--dry-run``, in one process."""

import itertools

import pytest

from megatron.core.config.cli import ConfigError
from megatron.core.config.ranges import Range
from megatron.training.arguments import flag_specs, parse_args
from megatron.training.config.learning_rate import LearningRateConfig
from megatron.training.config.training import TrainingConfig
from megatron.training.config.validation import ValidationConfig
from megatron.training.report.dry_run import preflight

TINY = [
    "--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32",
    "--max-position-embeddings", "32", "--micro-batch-size", "2", "--lr", "1e-3", "--mock-data", "--tokenizer-type",
    "NullTokenizer", "--vocab-size", "100", "--dry-run",
]  # fmt: skip
BY_ITERATIONS = [*TINY, "--train-iters", "10"]
BASES = {
    "samples": [*TINY, "--train-samples", "100", "--rampup-batch-size", "2", "2", "8", "--global-batch-size", "8"],
    "everything": [
        *BY_ITERATIONS, "--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2",
        "--context-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer",
        "--overlap-grad-reduce", "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1", "--untie-embeddings-and-output-weights", "--position-embedding-type", "rope",
        "--global-batch-size", "16", "--swiglu", "--bf16",
    ],
}  # fmt: skip
NUMBERS = ("-1", "0", "3", str(2**20), str(2**31 - 1), str(2**40), str(2**63))
MALFORMED = ("9" * 400, "9" * 5000, "nan", "1e30", "", "\u00b2")
"""No integer, or larger than any range: the parser of integers rejects them, so that integers get one each in turn."""
TEXTS = (
    "-1", "2", "9" * 5000, "", "x", "0:2,9:4", "0:2,9:" + "9" * 5000, "0:\u00b2", "[0]*9999*9999*9999", "(" * 500,
    "nan,1,1", "E(t*999999999)*9|L", "Et|" * 900, "\u00e9\udcff%s{}",
)  # fmt: skip
SPECS = [spec for spec in flag_specs() if spec.field not in ("yaml_cfg", "dry_run")]


def answers(argv):
    """Whether the dry run accepts the command line; anything but ConfigError is raised."""
    try:
        return preflight(parse_args(argv))
    except ConfigError as error:
        assert error.problems
        assert max(len(str(problem)) for problem in error.problems) < 1000
        return False


COUNTED = (TrainingConfig, LearningRateConfig, ValidationConfig)


@pytest.mark.parametrize("base", BASES)
def test_an_odd_value_is_taken_or_rejected_in_words(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert answers(BASES[base])
    specs = SPECS if base == "everything" else [spec for spec in SPECS if spec.group in COUNTED]
    for spec, odd in zip(specs, itertools.cycle(MALFORMED)):
        count = spec.nargs if isinstance(spec.nargs, int) else 1
        texts = TEXTS[:5] if spec.choices else TEXTS  # the parser accepts only choices
        numbers = (*NUMBERS, odd) if spec.type_name == "int" else NUMBERS + MALFORMED
        for value in () if spec.is_bool else texts if spec.range is None else numbers:
            try:
                answers([*BASES[base], spec.names[0], *([value] * count)])
            except Exception as error:
                raise AssertionError(f"{spec.names[0]} {value[:40]!r}: {type(error).__name__}") from error
    assert list(tmp_path.iterdir()) == []


def test_every_number_has_a_range():
    numbers = [spec for spec in flag_specs() if spec.type_name in ("int", "float") and not spec.choices]
    assert len(numbers) > 100
    assert [spec.names[0] for spec in numbers if not isinstance(spec.range, Range)] == []


def beyond(bound, sign):
    """A number outside of ``bound``: adding 1 does not change a large float."""
    return bound + sign * (1 if isinstance(bound, int) else max(1.0, abs(bound) / 1e3))


@pytest.mark.parametrize("flag", ["--adam-eps", "--clip-grad", "--lr", "--weight-decay", "--norm-epsilon",
                                  "--glu-linear-offset", "--rotary-base", "--moe-aux-loss-coeff"])  # fmt: skip
@pytest.mark.parametrize("value", ["1e308", "3.5e38"])
def test_numbers_that_fp32_cannot_hold_are_rejected(flag, value):
    with pytest.raises(ConfigError) as error:
        parse_args([*BY_ITERATIONS, flag, value])
    (actual,) = (problem for problem in error.value.problems if problem.flag == flag)
    assert "larger numbers are infinite in fp32" in actual.reason or "at most 1000" in actual.reason


@pytest.mark.parametrize("flag, value, reason", [
    ("--padded-vocab-size", "-1", "must be at least 1"), ("--padded-vocab-size", "0", "must be at least 1"),
    ("--padded-vocab-size", "x", "is not an integer"), ("--padded-vocab-size", "1.5", "is not an integer"),
    ("--moe-deepep-num-sms", "-1", "must be at least 0"), ("--inference-max-requests", "none", "is not an integer"),
])  # fmt: skip
def test_numbers_of_flags_without_effect_have_a_range(flag, value, reason):
    with pytest.raises(ConfigError) as error:
        parse_args([*BY_ITERATIONS, flag, value])
    assert (error.value.problems[0].flag, error.value.problems[0].reason) == (flag, reason)
    parse_args([*BY_ITERATIONS, flag, "128"])


@pytest.mark.parametrize("spec", [s for s in SPECS if s.range is not None], ids=lambda spec: spec.names[0])
def test_a_number_outside_of_its_range_is_rejected_with_its_flag(spec):
    """Just outside of both ends, and far away from them."""
    low, high = spec.range.low, spec.range.high
    outside = [str(2**64), "1e999", "nan"] if spec.type_name == "int" else ["nan", "inf"]
    outside += [str(low if spec.range.above else beyond(low, -1))] if low > float("-inf") else []
    outside += [str(high if spec.range.below else beyond(high, 1))] if high < float("inf") else []
    for value in outside:
        operands = [value] * (spec.nargs if isinstance(spec.nargs, int) else 1)
        with pytest.raises(ConfigError) as error:
            parse_args([*BY_ITERATIONS, spec.names[0], *operands])
        assert error.value.problems[0].flag == spec.names[0]


def test_a_number_set_by_a_program_is_checked_too():
    cfg = parse_args(BY_ITERATIONS).with_settings(num_workers=-1, profile_ranks=[0, -1], split="nan,1,1")
    with pytest.raises(ConfigError) as error:
        preflight(cfg)
    assert {problem.flag for problem in error.value.problems} == {"--num-workers", "--profile-ranks", "--split"}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"RANK": "x"}, "RANK"), ({"WORLD_SIZE": "0"}, "WORLD_SIZE"), ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"), ({"LOCAL_RANK": "-1"}, "LOCAL_RANK"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT"), ({"RANK": "9" * 5000}, "RANK"),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK"),
    ],
)  # fmt: skip
def test_a_launchers_variable_that_cannot_be_is_named(environment, name, monkeypatch):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as error:
        parse_args(BY_ITERATIONS)
    assert [problem.flag for problem in error.value.problems] == [f"environment variable {name}"]
