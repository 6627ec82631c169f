"""Checks of intermediate results, in the form that existing entry scripts call. Steps are never run again here, so a
result is accepted, logged or stops the program; the training loop itself looks for NaN and infinity on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron.compat.library_state import RerunDataIterator as RerunDataIterator
from megatron.core.config.errors import EXIT_FAILED, UserError

logger = logging.getLogger(__name__)


class RejectedResult(UserError, ArithmeticError):
    """A result that a script does not accept."""

    exit_code = EXIT_FAILED


class RerunStateMachine:
    """Stateless, in spite of the name that scripts know."""

    def validate_result(
        self,
        result: object,
        rejection_func: Callable[[Any], object],
        message: str = "unexpected result",
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """``ArithmeticError`` with ``message`` where ``rejection_func(result)`` is true; a warning if not ``fatal``.
        ``comparison_func`` and ``tolerance`` are ignored, because no step is run twice."""
        if not bool(rejection_func(result)):
            return
        if fatal:
            raise RejectedResult(f"{message}: {result}")
        logger.warning("%s: %s", message, result)


def get_rerun_state_machine() -> RerunStateMachine:
    """The call by which scripts reach :meth:`RerunStateMachine.validate_result`."""
    return RerunStateMachine()
