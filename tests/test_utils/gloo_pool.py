"""A warm pool of ranks, over gloo on the CPU or over NCCL on GPUs: processes forked from a server that has imported
torch and the suite once.

These imports cost seconds per process; a test that needs four ranks must not pay them four times. The pool
starts its workers at first use, keeps them between tests, and gives each task a fresh process group of the size it asks
for. A task that raises reports its traceback; a pool with a dead or stuck worker is torn down and rebuilt. (Forking
the test process itself would break autograd in the workers once a test had used a GPU.)
"""

import gc
import importlib
import io
import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TASK_TIMEOUT_SECONDS = 120.0
START_METHOD = "forkserver"  # or "fork", in processes that never use a GPU (tests/mutate.py)
TASKS_PER_WORKER, THREADS_PER_WORKER = 500, 40
"""Limits after which workers are renewed: FSDP2 leaks a group with three threads per task; 120 threads double the
time of a task. A fresh worker costs 0.3 CPU seconds until its caches are full."""
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.run", "numpy", "megatron.training.run",
             "megatron.training.verify.layout_trace", "megatron.training.tasks.gpt",
             "tests.test_utils.code_digests", "tests.test_utils.interpreter"]  # fmt: skip
"""Imports of nearly every task (1.5 seconds): done once in the server instead of in every worker."""


class WorkerError(AssertionError):
    """A rank of the task raised; the message holds every failing rank's traceback and what other ranks returned."""


class _Pickler(pickle.Pickler):
    """Writes tensors by value: a pipe would pass each as a file in shared memory, and pickle as a file of torch.save,
    which takes six times as long."""

    def reducer_override(self, item: Any) -> Any:
        import torch

        if type(item) not in (torch.Tensor, torch.nn.Parameter) or item.layout != torch.strided:
            return NotImplemented
        values = item.detach().cpu().clone(memory_format=torch.contiguous_format)  # strides of dims of size 1, too
        return _tensor, (values.flatten().view(torch.uint8).numpy().tobytes(), str(values.dtype)[6:], values.shape[:])


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind)


def dump(value: Any, stream: Any) -> None:
    """Write ``value`` with its tensors to ``stream``; ``pickle.load`` reads it."""
    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)


def _send(connection: Any, value: Any) -> None:
    dump(value, stream := io.BytesIO())
    connection.send_bytes(stream.getbuffer())


def _receive(connection: Any) -> Any:
    return pickle.loads(connection.recv_bytes())


def _serve(connection, backend: str) -> None:
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo ranks train on the CPU, even if the machine has GPUs
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        gc.freeze()  # again for each task: a data loader's workers unfreeze; a collection of all of torch takes 0.2 s
        task = _receive(connection)
        if task is None:
            return
        function, rank, world_size, store_path, args = task
        threads = len(os.listdir("/proc/self/task"))  # left by earlier tasks
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in environment.items()})
        try:
            if backend == "nccl":
                torch.cuda.set_device(rank)
            store = dist.FileStore(store_path, world_size)
            limit = timedelta(seconds=60)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
            _send(connection, (True, function(rank, world_size, *args), threads))
        except BaseException:
            _send(connection, (False, traceback.format_exc(), threads))
        _receive(connection)  # all have answered: a group that one rank leaves may fail on those that still join it
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # models hold their groups in cycles; each group left over keeps three threads polling


def describe(rank: int, passed: bool, value: Any) -> str:
    """Return the traceback of a rank that raised, or the shortened value of a rank that returned: an early return, such
    as a tool's exit code 2, explains why another rank's collective timed out."""
    if not passed:
        return f"rank {rank}:\n{value}"
    text = repr(value)
    return f"rank {rank} returned {text if len(text) < 1000 else f'{text[:500]} ... {text[-500:]}'}"


class RankPool:
    """Ranks that live as long as the test session; over NCCL, rank r has GPU r."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._context = mp.get_context(START_METHOD)
        self._context.set_forkserver_preload(PRELOADED)
        if START_METHOD == "fork":
            for name in PRELOADED:
                importlib.import_module(name)
        self._workers: list[tuple[Any, Any]] = []
        self._num_tasks = self._num_threads = 0

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            local, other = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(other, self._backend), daemon=True)
            process.start()
            other.close()
            self._workers.append((process, local))

    def run(self, function: Callable, world_size: int, *args: Any) -> list[Any]:
        """``[function(rank, world_size, *args) for every rank]``, run together; raises :class:`WorkerError`."""
        is_worn = self._num_tasks >= TASKS_PER_WORKER or self._num_threads > THREADS_PER_WORKER
        if is_worn or not all(process.is_alive() for process, _ in self._workers):
            self.close()
        self._num_tasks += 1
        self._grow(world_size)
        workers = self._workers[:world_size]
        with tempfile.TemporaryDirectory() as folder:
            store_path = os.path.join(folder, "store")
            for rank, (_, connection) in enumerate(workers):
                _send(connection, (function, rank, world_size, store_path, args))
            replies = [self._receive(rank, connection) for rank, (_, connection) in enumerate(workers)]
        if not all(passed for passed, _, _ in replies):
            self.close()  # a rank that raised may have left its peers in a broken group
            raise WorkerError("\n".join(describe(rank, *reply[:2]) for rank, reply in enumerate(replies)))
        self._num_threads = max(threads for _, _, threads in replies)
        for _, connection in workers:
            _send(connection, "all have answered")
        return [value for _, value, _ in replies]

    def _receive(self, rank: int, connection: Any) -> tuple[bool, Any, int]:
        """Return whether the rank returned, its value or traceback, and its number of threads before the task."""
        if not connection.poll(TASK_TIMEOUT_SECONDS):
            return False, f"no answer within {TASK_TIMEOUT_SECONDS} s", 0
        try:
            return _receive(connection)
        except EOFError:
            return False, "the process died", 0

    def close(self) -> None:
        """Ends every worker."""
        for process, connection in self._workers:
            process.terminate()  # first: a worker whose pipe ends prints a traceback
            connection.close()
            process.join(5)
        self._workers.clear()
        self._num_tasks = self._num_threads = 0
