"""Entry scripts wrap ``pretrain`` with this. Restarting inside a process is not available: the launcher restarts runs
(``torchrun --max-restarts``), which resume from their last checkpoint."""

from __future__ import annotations

from collections.abc import Callable


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., object]) -> tuple[Callable[..., object], None]:
    """Return ``pretrain`` unchanged and no store; ``--inprocess-restart`` is rejected when flags are parsed."""
    return pretrain, None
