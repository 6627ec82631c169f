"""Flags about the program itself rather than about the model or its training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.ranges import NumRanks


@dataclass(kw_only=True)
class ProgramConfig:
    """Program"""

    yaml_cfg: str | None = None
    """YAML file with any of these settings, by the same names; the command line wins over it."""

    dry_run: bool = False
    """Check everything, print layout, sizes, memory and schedule, and stop; needs no GPU and no process group."""

    dry_run_world_size: NumRanks | None = None
    """Ranks that --dry-run assumes; default: those of the launcher, else the fewest that the layout needs."""
