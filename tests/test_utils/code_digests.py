"""Digests of the source files and functions that ranks compare at the start of a run, computed at import: workers that
are forked afterwards have them in their caches (0.1 CPU seconds each)."""

from megatron.training.checks.rank_agreement import code

code()
