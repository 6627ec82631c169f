"""Digests of the source files and functions that ranks compare at the start of a run, their software, and the flags and
rules of a family, computed at import: workers that are forked afterwards have them in their caches (0.2 CPU seconds
each)."""

from megatron.training.arguments import parse_args, validate_args
from megatron.training.checks.rank_agreement import code, software
from tests.test_utils.gpt_runs import MODEL_FLAGS

code(), software()
validate_args(parse_args([*MODEL_FLAGS, "--mock-data"]), 1)
