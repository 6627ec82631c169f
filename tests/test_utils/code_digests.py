"""The digests, versions, flags and rules that every rank computes at its start, computed at import: workers that are
forked afterwards have them in their caches (0.2 CPU seconds each)."""

from megatron.training.arguments import parse_args, validate_args
from megatron.training.checks.rank_agreement import code, software
from tests.test_utils.gpt_runs import MODEL_FLAGS

code(), software()
validate_args(parse_args([*MODEL_FLAGS, "--mock-data"]), 1)
