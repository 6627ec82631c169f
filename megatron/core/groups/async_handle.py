"""Handles of asynchronous collectives."""

from __future__ import annotations

from typing import Any, Protocol


class AsyncHandle(Protocol):
    """Collective in flight, such as ``torch.distributed.Work``; keeps its input and output tensors alive."""

    def wait(self) -> Any:
        """Wait for the collective (on CUDA: the current stream waits, not the host). Call it once. Returns the result
        if it is a new tensor; in-place collectives may return anything."""


class Finished:
    """Handle of a result that is already complete."""

    def __init__(self, result: object) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result
