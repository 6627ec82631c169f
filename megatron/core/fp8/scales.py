"""Scales of per-tensor casts: from the matrix itself (tensorwise), or from the steps before (delayed).

The largest magnitude is taken over all ranks that hold parts of the same matrix (tensor and context parallelism), so
that scales, and the fp8 bytes, do not depend on the layout. A maximum is exact in any order.

*Delayed*: the scale of step n follows from the largest magnitudes of earlier steps, so that a cast needs one pass. An
entry of the history is the maximum over all micro-batches of a step and all data-parallel ranks. Until a matrix has had
a nonzero magnitude, it is cast with the scale of its values; this calibrates the first step, and a run that continues
from bf16. The update follows the rule of Transformer Engine, which updates after every micro-batch instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.fusions.fp8_cast import FLOAT_MAX, NOTED, Scale, amax_parts, noted_amax
from megatron.core.groups.process_groups import Group

_ALIGNED = 4
"""fp32 numbers in 16 bytes."""


def raise_over(amax: Tensor, groups: Iterable[Group]) -> Tensor:
    """Raise the fp32 ``amax`` >= 0 in place to its maximum over ``groups`` (NaN is the largest). Collective."""
    for group in groups:
        if group.size > 1:
            # as integers: bits of non-negative numbers are ordered, and NaN is above infinity
            dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group.handle)
    return amax


def current_amax(x: Tensor, groups: Iterable[Group]) -> Tensor:
    """Return fp32 [n] whose maximum is the largest magnitude of ``x`` on the ranks of ``groups``. Collective: all ranks
    pass matrices of the same operation, whose magnitudes are noted on all of them or on none."""
    parts = amax_parts(x)
    groups = [group for group in groups if group.size > 1]
    if not groups:
        return parts
    return raise_over(parts if noted_amax(x) is None else parts.clone(), groups)


class ScaleHistory:
    """Delayed scales of the matrices of one model chunk: a row per matrix (input or gradient of a layer). ``length``:
    entries; ``uses_maximum``: of the history instead of its newest entry; scales are divided by 2^``margin``."""

    def __init__(self, length: int, *, uses_maximum: bool, margin: int) -> None:
        self.length, self.uses_maximum, self.margin = length, uses_maximum, margin
        self.largest: list[float] = []
        self.names: list[str] = []
        self._state: dict[str, Tensor] = {}
        self.known: list[bool] = []
        """Whether a matrix has a scale; the host's copy of nonzero factors."""

    def add(self, name: str, largest: float) -> int:
        """Add a matrix, cast to a format with the ``largest`` value, and return its row. Before the first use only."""
        assert not self._state, "rows are added before the first step"
        self.names.append(name)
        self.largest.append(largest)
        self.known.append(False)
        return len(self.names) - 1

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Return the state, fp32 on ``device``; ``history`` [n, length], newest first; ``factor`` [n], which multiplies
        values, 0: no scale yet; ``inverse`` [n]; ``observed`` [n] and ``noted`` int32 [n, NOTED], whose maximum is the
        largest magnitude since the last update. Every inverse is aligned to 16 bytes, as GEMMs require."""
        if not self._state:
            rows = len(self.names)
            self._state = {name: torch.zeros(rows, device=device) for name in ("factor", "observed")}
            self._state["inverse"] = torch.zeros(rows, _ALIGNED, device=device)[:, 0]
            self._state["noted"] = torch.zeros(rows, NOTED, dtype=torch.int32, device=device)
            self._state["history"] = torch.zeros(rows, self.length, device=device)
        return self._state

    def scale(self, row: int, device: torch.device) -> Scale | None:
        """Return the scale of a matrix; None before its first nonzero magnitude."""
        if not self.known[row]:
            return None
        state = self.state(device)
        part = slice(row, row + 1)
        return Scale(state["factor"][part], state["inverse"][part])

    def observe(self, row: int, amax: Tensor) -> None:
        """Record amaxes fp32 [n] of a matrix."""
        observed = self.state(amax.device)["observed"][row : row + 1].view(torch.int32)
        torch.maximum(observed, amax.view(torch.int32).max(), out=observed)

    def noted(self, row: int, device: torch.device) -> Tensor:
        """Return int32 [NOTED], to which kernels raise the bits of magnitudes of a matrix (``fp8_cast.new_amax``)."""
        return self.state(device)["noted"][row]

    def magnitudes(self) -> Tensor:
        """Return the largest magnitude of every matrix since the last update, fp32 [n], on this rank."""
        observed, noted = self._state["observed"].view(torch.int32), self._state["noted"].amax(1)
        return torch.maximum(observed, noted).view(torch.float32)

    @torch.no_grad()
    def update(self, groups: Iterable[Group]) -> None:
        """End a step: raise the observed magnitudes over all ranks of ``groups``, append them to the histories and
        compute the scales of the next step. Collective. Magnitudes that are infinite or NaN are left out. The host
        waits only while a matrix has no scale."""
        if not self._state:
            return
        state = self._state
        observed = raise_over(self.magnitudes(), groups)
        newest = torch.where(observed.isfinite(), observed, 0.0)
        history = state["history"]
        if self.length > 1:
            history[:, 1:] = history[:, :-1].clone()
        history[:, 0] = newest
        amax = history.amax(1) if self.uses_maximum else newest
        largest = torch.tensor(self.largest).to(amax.device, non_blocking=True)
        factor = (largest / amax / 2.0**self.margin).clamp(max=FLOAT_MAX)
        state["factor"].copy_(torch.where(amax > 0, factor, state["factor"]))
        state["inverse"].copy_(1.0 / state["factor"])
        state["observed"].zero_()
        state["noted"].zero_()
        if not all(self.known):
            self.notice_scales()

    def notice_scales(self) -> None:
        """Set :attr:`known` from the state, after a step or a load. Waits for the device."""
        self.known = [factor > 0 for factor in self._state["factor"].tolist()]

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, live tensor) of the state that a checkpoint stores; equal on all ranks of the groups."""
        state = self.state(device)
        for row, name in enumerate(self.names):
            yield f"{name}.history", state["history"][row]
            yield f"{name}.factor", state["factor"][row : row + 1]

    def loaded(self) -> None:
        """Complete the state after a load into :meth:`tensors`. Waits for the device."""
        self._state["inverse"].copy_(1.0 / self._state["factor"])
        self.notice_scales()
