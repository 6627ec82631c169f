"""Background saves: one at a time, in a thread, over a dedicated gloo process group.

A thread suffices: checksums, writes and fsync release the GIL. It touches only files, host memory and its process
group, never a device. Like a foreground save, it succeeds or fails on all ranks together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.staging import Staging, default_limit
from megatron.core.dist_checkpointing.writer import Blocks, Fault, WritePlan
from megatron.core.groups.process_groups import Group

NO_TIMEOUT = timedelta(days=30)
"""Time-out of the dedicated group. :meth:`BackgroundWriter.check` detects slow files instead, as it knows the rank."""
LEAVING_SECONDS = 20.0
"""Maximum wait for a background save when training fails and the process exits."""

Work = Callable[[Group, Blocks, Fault], int]
"""Remaining work of a save, given a group, a block reader and a fault hook; returns the bytes of all ranks."""


class BackgroundWriter:
    """Runner of background saves, one at a time. Creation is collective over all ranks ``world``. ``staging_bytes``:
    host memory limit; None: see ``staging.default_limit``. ``timeout``: seconds for one file system call."""

    def __init__(self, world: Group, device: str, staging_bytes: float | None, timeout: float) -> None:
        self.world, self.device, self.staging_bytes, self.timeout = world, device, staging_bytes, timeout
        self.group = world
        if world.size > 1:
            handle = dist.new_group(list(world.ranks), timeout=NO_TIMEOUT, backend="gloo", group_desc="saves")
            self.group = Group("saves", world.ranks, world.rank, handle)
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._finished_at = self._last = 0.0
        self._phase = ""
        self._num_bytes = 0
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank's save is still running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, part: WritePlan, work: Work, fault: Fault, name: str) -> None:
        """Start ``work`` in a thread and copy this rank's ``part`` to host memory; blocks until it is copied, at the
        memory limit as long as writing takes. Every rank must call it, after `take` of the previous save."""
        assert self._thread is None
        if self._staging is None:
            limit = default_limit(part.num_bytes) if self.staging_bytes is None else self.staging_bytes
            self._staging = Staging(limit, self.device)
        self._error, self._num_bytes, self._name = None, 0, name
        self._mark("starting")
        self._thread = threading.Thread(target=self._run, args=(work, fault), name="background save", daemon=True)
        # the writer first: it empties the staging memory, for which ``stage`` waits once the limit is reached
        self._thread.start()
        self._staging.stage(tensor.local for tensor in part.tensors)

    def _run(self, work: Work, fault: Fault) -> None:
        """Store result or error, and end the staging so that the training thread never blocks on it."""
        assert self._staging is not None

        def note(phase: str) -> None:
            self._mark(phase)
            fault(phase)

        try:
            self._num_bytes = work(self.group, self._blocks, note)
        except BaseException as error:
            self._error = error
        finally:
            self._staging.end()
            self._staging.trim()
            self._finished_at = time.perf_counter()

    def _blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        assert self._staging is not None
        for block in self._staging.blocks(tensor):
            self._mark("writing")
            yield block

    def _mark(self, phase: str) -> None:
        """Phases in which this rank waits for others, whose files may be slow, have no time limit."""
        first = ("before_directory", "after_shards", "before_tracker")  # work of the first rank only
        waits = phase == "shards_written" or (phase in first and not self.group.is_first)
        self._phase, self._last = "" if waits else phase, time.monotonic()

    def check(self) -> None:
        """Raise an error that must end the run: a bug in the thread, or CheckpointError for a file system that hangs
        for ``timeout`` s. A CheckpointError of the save itself is left to :meth:`take`. Not collective."""
        error, silence = self._error, time.monotonic() - self._last
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        if self.busy and self._phase and silence > self.timeout:
            doing = self._phase.replace("_", " ")
            raise CheckpointError(f"{self._name}: no progress for {silence:.0f} s ({doing}): its file system hangs")

    def has_finished(self, wait: bool) -> bool:
        """Return whether the save has finished on every rank; ``wait`` blocks until this rank's save has. Collective:
        one all-reduce over the host group of ``world``, for which the host waits. Raises as :meth:`check`, before the
        all-reduce: the other ranks then block until the watchdog ends them."""
        assert self._thread is not None
        while wait and self.busy:
            self._thread.join(0.2)
            self.check()
        self.check()
        if self.world.size == 1:
            return not self.busy
        busy = torch.tensor([self.busy], dtype=torch.int32)
        dist.all_reduce(busy, op=dist.ReduceOp.MAX, group=self.world.host_handle or self.world.handle)
        return not busy.item()

    def take(self) -> tuple[int, float]:
        """Return (bytes of all ranks, ``time.perf_counter()`` at the end) of the finished save, or raise its error.
        Call it once per save: another save may then start."""
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._num_bytes, self._finished_at

    def close(self) -> None:
        """Wait at most ``LEAVING_SECONDS`` for a save in progress; destroy the dedicated group unless in use."""
        if self._thread is not None:
            self._thread.join(LEAVING_SECONDS)
        if self.group is not self.world and not self.busy:
            dist.destroy_process_group(self.group.handle)
