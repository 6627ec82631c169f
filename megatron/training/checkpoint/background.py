"""A save that goes on behind training: one at a time, in a thread, over a process group that nothing else uses.

A thread is enough: checksums, writes and fsync release the interpreter. It touches files, host memory and its own group
only, never a device. Like a save in the foreground it ends on all ranks as written or as failed.
"""

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
from megatron.core.dist_checkpointing.writer import Blocks, Fault, Part
from megatron.core.groups.process_groups import Group

NO_TIMEOUT = timedelta(days=30)
"""The group's own: slow files are judged by :meth:`BackgroundWriter.check`, which knows the rank that has them."""
LEAVING_SECONDS = 20.0
"""How long an error of training, which ends the process, waits for the save behind it."""

Work = Callable[[Group, Blocks, Fault], int]
"""The rest of a save: over this group, with these blocks; returns the bytes of all ranks."""


class BackgroundWriter:
    """Collective over ``world``, as are its methods that say so.

    Args:
        world: training's group; whether a save is done everywhere is asked over it.
        device: type of the device that trains.
        staging_bytes: limit of host memory; None: see ``staging.default_limit``.
        timeout: seconds that a rank may spend in one call of its file system.
    """

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
        """This rank has not finished yet."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, part: Part, work: Work, fault: Fault, name: str) -> None:
        """Copy this rank's ``part`` off the device, and go on with ``work`` behind the caller."""
        assert self._thread is None
        if self._staging is None:
            limit = default_limit(part.num_bytes) if self.staging_bytes is None else self.staging_bytes
            self._staging = Staging(limit, self.device)
        self._error, self._num_bytes, self._name = None, 0, name
        self._mark("starting")
        self._thread = threading.Thread(target=self._run, args=(work, fault), name="background save", daemon=True)
        self._thread.start()
        self._staging.stage(tensor.local for tensor in part.tensors)

    def _run(self, work: Work, fault: Fault) -> None:
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
        """Progress; in some phases this rank waits for others, whose files may be slow."""
        first = ("before_directory", "after_shards", "before_tracker")  # only the first rank does these
        waits = phase == "shards_written" or (phase in first and not self.group.is_first)
        self._phase, self._last = "" if waits else phase, time.monotonic()

    def check(self) -> None:
        """Raise what must end the run: a bug in the thread, or files that have not answered for ``timeout``."""
        error, silence = self._error, time.monotonic() - self._last
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        if self.busy and self._phase and silence > self.timeout:
            doing = self._phase.replace("_", " ")
            raise CheckpointError(f"{self._name}: no progress for {silence:.0f} s ({doing}): its file system hangs")

    def done(self, wait: bool) -> bool:
        """Whether the save is over on every rank, as all see it. Collective."""
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
        """Bytes, and ``time.perf_counter()`` at the end, of the save that is done; its ``CheckpointError``."""
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._num_bytes, self._finished_at

    def close(self) -> None:
        """Wait a while for a save that is under way, as an error of training may end the process next."""
        if self._thread is not None:
            self._thread.join(LEAVING_SECONDS)
        if self.group is not self.world and not self.busy:
            dist.destroy_process_group(self.group.handle)
