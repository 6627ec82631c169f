"""The handle of every collective that runs beside something else: ``wait()``."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class AsyncHandle(Protocol):
    """A collective under way, such as ``torch.distributed.Work``. What it reads and writes lives as long."""

    def wait(self) -> Any:
        """The result, where it is not the tensor that the collective was given, complete when this returns (on CUDA: in
        stream order; the host does not wait). To be called once."""


class Finished:
    """The handle of a result for which there is nothing to wait."""

    def __init__(self, result: Tensor | None) -> None:
        self._result = result

    def wait(self) -> Tensor | None:
        return self._result
