"""Flags about the program itself rather than about the model or its training, and what it checks about itself."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.cli import flag
from megatron.core.config.ranges import NonNegativeInt, NumRanks, Seconds


@dataclass(kw_only=True)
class ProgramConfig:
    """Program"""

    yaml_cfg: str | None = None
    """YAML file with any of these settings, by the same names; the command line wins over it."""

    dry_run: bool = False
    """Check everything, print layout, sizes, memory and schedule, and stop; needs no GPU and no process group."""

    dry_run_world_size: NumRanks | None = None
    """Ranks that --dry-run assumes; default: those of the launcher, else the fewest that the layout needs."""


@dataclass(kw_only=True)
class SelfCheckConfig:
    """Self-checks"""

    watchdog_timeout_seconds: Seconds = 60.0
    """Seconds without progress after which a rank counts as stuck: then every rank writes its Python stack and stops,
    the first failing rank named first. Slow iterations, the first one and checkpoints get longer. 0: no watchdog."""

    check_replicas: NonNegativeInt | None = flag("--check-replicas", "--check-weight-hash-across-dp-replicas-interval")
    """Iterations between checks that every copy of a weight and of optimizer state, on whatever ranks, has the same
    bits. Left out: after each of the first 3 iterations and at every checkpoint, which a number adds to; 0: never."""
