"""Functions that programs import from ``megatron.training.training``."""

from __future__ import annotations

from torch import Tensor

from megatron.compat.classic import get_model, pretrain

__all__ = ["get_model", "pretrain", "set_startup_timestamps", "update_seqlen_stats_from_cu_seqlens"]


def set_startup_timestamps(program_start: float | None = None, main_entry: float | None = None) -> None:
    """Accept the times at which a script began. The log has its own start-up times."""


def update_seqlen_stats_from_cu_seqlens(cu_seqlens: Tensor) -> None:
    """Accept document lengths, but count the FLOPs of the model's description for whole sequences."""
