"""Updates of weights on a side stream, which the next forward pass waits for parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn

from megatron.core.host_memory import SideStream


class WeightUpdates:
    """Queue of the updates of one optimizer. Until the current stream has waited, it may neither read the weights nor
    use the gradients of the queued parameters. Without ``overlaps`` updates run on the current stream."""

    def __init__(self, device: torch.device, *, overlaps: bool) -> None:
        self._current = SideStream(device)  # only its events
        # urgent: GEMMs of the forward pass fill all SMs for milliseconds, as long as a slice takes to load
        self._side = SideStream(device, urgent=True) if overlaps else None
        self._pending: dict[nn.Parameter, torch.cuda.Event | None] = {}
        self._last: torch.cuda.Event | None = None

    @property
    def overlaps(self) -> bool:
        """Whether updates run on a side stream."""
        return self._side is not None

    def run(
        self,
        work: Callable[[], object],
        after: Iterable[torch.cuda.Event | None] = (),
        parameters: Collection[nn.Parameter] = (),
    ) -> torch.cuda.Event | None:
        """Queue ``work``, the last update of the ``parameters``, after earlier work of the queue and the events
        ``after``. Return the event of its completion. The caller keeps all tensors alive until :meth:`join`."""
        if self._side is None:
            for event in after:
                self._current.wait(event)
            work()
            return self._current.record_current()
        self._last = self._side.run(work, after)
        self._pending.update(dict.fromkeys(parameters, self._last))
        return self._last

    def record_current(self) -> torch.cuda.Event | None:
        """Return an event after the work that the current stream has so far."""
        return self._current.record_current()

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the current stream wait for the updates of ``parameters``."""
        if not self._pending:  # in all forward passes but the first
            return
        for parameter in parameters:
            if parameter in self._pending:
                self._current.wait(self._pending.pop(parameter))

    def join(self) -> None:
        """Let the current stream wait for all work in the queue."""
        self._current.wait(self._last)
        self._pending.clear()
        self._last = None
