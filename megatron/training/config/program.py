"""Flags about the program itself rather than about the model or its training, and what it checks about itself."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Gibibytes, NonNegativeInt, NumRanks, Seconds


@dataclass(kw_only=True)
class ProgramConfig(FlagGroup):
    """Program"""

    model: str | None = None
    """Published model, such as llama3-8b (--help models lists them): sets its sizes, norms, positions, dropout and
    experts, and with --mock-data its vocabulary's size; other flags take precedence."""

    yaml_cfg: str | None = None
    """YAML file with any of these settings, under the same names; the command line takes precedence."""

    dry_run: bool = False
    """Check all settings, print layout, sizes, memory and schedule, and exit; needs no GPU and no process group."""

    dry_run_world_size: NumRanks | None = None
    """Number of ranks that --dry-run assumes; default: the launcher's, else the minimum for the layout."""

    gpu_memory: Gibibytes | None = None
    """Memory of one GPU in GiB, such as 80 or 141: --dry-run reports whether every rank fits, and which flags help."""


@dataclass(kw_only=True)
class SelfCheckConfig(FlagGroup):
    """Self-checks"""

    watchdog_timeout_seconds: Seconds = 60.0
    """Seconds without progress after which a rank counts as hung: every rank then writes its Python stack and exits,
    and the first failing rank is named first. Slow iterations, the first iteration and checkpoints get longer. 0: no
    watchdog."""

    check_replicas: NonNegativeInt | None = flag("--check-replicas", "--check-weight-hash-across-dp-replicas-interval")
    """Iterations between checks that all replicas of weights and optimizer state have equal bits. Default: after
    each of the first 3 iterations and at every checkpoint; a number adds further checks; 0: never."""
