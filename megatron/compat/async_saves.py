"""Background saves of programs that write their checkpoints themselves: a queue of requests, and torch's file writer in
two steps (copy the data to the host, then write it). Requests run in threads of this process, one at a time per
queue."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, Queue
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.dist_checkpointing.exchange import all_ranks, together


class AsyncRequest(NamedTuple):
    """Work for the background."""

    async_fn: Callable[..., object] | None
    """None: no work."""
    async_fn_args: tuple[Any, ...] | list[Any]
    finalize_fns: list[Callable[[], object]]
    """Functions that every rank calls after ``async_fn`` has ended on all ranks."""
    async_fn_kwargs: dict[str, Any] = {}
    preload_fn: Callable[[], object] | None = None
    """Called before the work starts; its result replaces the second of ``async_fn_args``."""
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], object]) -> None:
        """Append ``fn`` to the functions that run at the end; RuntimeError if the request is frozen."""
        if self.is_frozen:
            raise RuntimeError("AsyncRequest: frozen; add functions before it is scheduled")
        self.finalize_fns.append(fn)

    def arguments(self) -> list[Any]:
        """Return the arguments of ``async_fn``, after calling ``preload_fn``."""
        values = list(self.async_fn_args)
        if self.preload_fn is not None:
            values[1] = self.preload_fn()
        return values

    def execute_sync(self) -> None:
        """Collective. A ValueError or OSError of any rank is a CheckpointError on all ranks."""
        values = self.arguments()
        together(lambda: _run(self.async_fn, values, self.async_fn_kwargs), all_ranks())
        for function in self.finalize_fns:
            function()

    def freeze(self) -> AsyncRequest:
        """Return a copy that takes no further functions."""
        return self._replace(is_frozen=True)


def _run(function: Callable[..., object] | None, values: list[Any], named: dict[str, Any]) -> None:
    if function is not None:
        function(*values, **named)


class AsyncCallsQueue:
    """Requests in progress, in the order of their start. Every rank must make the same calls.

    Megatron-LM starts a process per request (``persistent``: one process for all); here one thread per queue does the
    work, and ``persistent`` has no effect."""

    def __init__(self, persistent: bool = False) -> None:
        self.persistent, self.call_idx = persistent, -1
        self.async_calls: deque[tuple[int, Future[None], AsyncRequest]] = deque()
        self._thread = ThreadPoolExecutor(1, "background save")

    @classmethod
    def warmup_persistent_caller(cls, rank: int, *args: object, **kwargs: object) -> None:
        """Do nothing: threads need no preparation."""

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Call ``preload_fn``, start the work and return its index, from 0."""
        self.call_idx += 1
        request = AsyncRequest(**async_request._asdict()).freeze()
        work = self._thread.submit(_run, request.async_fn, request.arguments(), request.async_fn_kwargs)
        self.async_calls.append((self.call_idx, work, request))
        return self.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """End the requests whose work has ended on all ranks, and return their indices. Collective, also if ``no_dist``
        is set (each rank then looks at its own work only).

        Args:
            blocking: wait for all requests.
            no_dist: do not ask the other ranks whether they have ended.

        Raises:
            CheckpointError: on all ranks, if the work of any rank raised a ValueError or OSError."""
        ended = []
        while self.async_calls:
            index, work, request = self.async_calls[0]
            if blocking:
                wait([work])
            if not (work.done() if no_dist else all(together(work.done, all_ranks()))):
                break
            self.async_calls.popleft()
            together(work.result, all_ranks())
            for function in request.finalize_fns:
                function()
            ended.append(index)
        return ended

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests that were started and not ended."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Wait for all requests and end them; with ``abort``, forget those that have not started and wait for none."""
        if abort:
            self.async_calls.clear()
        else:
            self.maybe_finalize_async_calls(blocking=True)
        self._thread.shutdown(wait=not abort, cancel_futures=abort)


class FileSystemWriterAsync(FileSystemWriter):
    """torch's writer of distributed checkpoints in two steps: :meth:`prepare_write_data` collects the data,
    :meth:`get_save_function_and_args` returns the functions that copy and write it. The files are torch's."""

    def __init__(
        self,
        path: str | os.PathLike,
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **kwargs: Any,
    ) -> None:
        """Arguments of torch's ``FileSystemWriter``; ``separation_hint`` has no effect. ``use_msc``: ValueError."""
        if use_msc:
            raise ValueError("FileSystemWriterAsync(use_msc=True): not available here; write to a file system")
        super().__init__(path, *args, **kwargs)
        self.checkpoint_dir, self.can_run_decentralized_global_plan = path, True
        self.write_buckets: _Data | None = None
        self.results_queue: Queue[Any] = Queue()

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Collect the tensors and bytes of ``plan``. Copies nothing: call ``preload_fn`` before they change."""
        self.write_buckets = _Data(plan, {item.index: planner.resolve_data(item) for item in plan.items})

    def get_save_function_and_args(self) -> tuple[Callable | None, Callable | None, list[Any]]:
        """Return (function, ``preload_fn``, arguments) of an :class:`AsyncRequest`; (None, None, []) without data."""
        data = self.write_buckets
        if data is None or not data.plan.items:
            return None, None, []
        return self._write, data.on_host, [all_ranks().rank, data, self.results_queue]

    def _write(self, rank: int, data: _Data, results: Queue[Any]) -> None:
        """Put the results, or the error, into ``results``; raises the error too."""
        try:
            results.put(super().write_data(data.plan, cast(SavePlanner, data)).wait())
        except BaseException as error:
            results.put(error)
            raise

    def retrieve_write_results(self) -> list[WriteResult]:
        """Empty if this rank writes no data. Raises the error of a failed write, RuntimeError before its end."""
        if self.write_buckets is None or not self.write_buckets.plan.items:
            return []
        try:
            results = self.results_queue.get_nowait()
        except Empty:
            raise RuntimeError("FileSystemWriterAsync: the data are not written yet") from None
        if isinstance(results, BaseException):
            raise results
        return results

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return ``local_plan`` with the file names of this rank, which other ranks need not know."""
        plans = [local_plan] * (all_ranks().rank + 1)
        return self.prepare_global_plan(plans)[-1]


class _Data:
    """The part of a planner that torch's writer asks."""

    def __init__(self, plan: SavePlan, values: dict[Any, Any]) -> None:
        self.plan, self._values = plan, values

    def on_host(self) -> _Data:
        """The copies do not change with the program's tensors."""
        return _Data(self.plan, {index: _copied(value) for index, value in self._values.items()})

    def resolve_data(self, item: Any) -> Any:
        return self._values[item.index]


def _copied(value: Tensor | io.BytesIO) -> Tensor | io.BytesIO:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
