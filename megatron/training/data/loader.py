"""Data loading: global batch k holds the same samples for any number of ranks, micro-batch size and workers.

Sample ``i`` of the training stream is a pure function of ``i``. A global batch takes the next ``global_batch_size``
indices; micro-batch ``m`` of data-parallel rank ``r`` is the slice that starts at ``(m * dp + r) * micro_batch_size``.
Every batch carries ``sample_index`` (int64 [b]), the position of each sample in the stream; it seeds dropout masks.

:class:`BatchReader` reads a global batch before its first forward pass, so that its valid tokens can be counted. To
hide the time of reading, it reads the next global batch while the current one computes: one micro-batch for each that
it hands out. Batches that were read but not used are not consumed samples; a resumed run reads them again."""

from __future__ import annotations

import gc
import multiprocessing.connection
import multiprocessing.context
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from megatron.core.config.errors import UserError
from megatron.core.datasets.megatron_dataset import Ragged
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.datasets import batch_size_at
from megatron.training.exits.conditions import IgnoreExitSignals

SHARED_MEMORY = "free or enlarge /dev/shm, through which workers send batches, or read without: --num-workers 0"
PADDING = -1  # data set index of samples that only pad an incomplete last batch


@dataclass(frozen=True)
class Shard:
    """This data-parallel rank's shard of every global batch."""

    micro_batch_size: int
    rank: int
    size: int

    def slices(self, start: int, global_batch_size: int) -> Iterator[range]:
        """Yield the stream positions of each micro-batch of this rank, for the global batch that starts at ``start``.
        Raises UserError if ranks and micro-batches do not divide it."""
        stride = self.micro_batch_size * self.size
        if global_batch_size % stride:
            raise UserError(
                f"--global-batch-size {global_batch_size}: not divisible by --micro-batch-size {self.micro_batch_size}"
                f" times {self.size} data-parallel ranks; the nearest sizes are {global_batch_size // stride * stride}"
                f" and {(global_batch_size // stride + 1) * stride}"
            )
        for first in range(start + self.rank * self.micro_batch_size, start + global_batch_size, stride):
            yield range(first, first + self.micro_batch_size)


def sequential(position: int) -> int:
    """Return ``position`` (--dataloader-type single): the data set is already shuffled."""
    return position


class EpochShuffle:
    """Order of --dataloader-type cyclic: a new permutation per epoch, a pure function of (seed, epoch)."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed
        self.epoch, self.permutation = -1, np.empty(0, dtype=np.int64)

    def __call__(self, position: int) -> int:
        epoch, offset = divmod(position, self.length)
        if epoch != self.epoch:
            self.epoch = epoch
            self.permutation = np.random.RandomState((self.seed + epoch) % 2**32).permutation(self.length)
        return int(self.permutation[offset])


class BatchShard(Protocol):
    """Stream positions of a rank's micro-batches."""

    def slices(self, start: int, global_batch_size: int, /) -> Iterator[range]: ...


class TrainSampler:
    """Batch sampler that starts at ``consumed_samples``. Yields lists of (stream position, data set index) until
    ``total_samples`` hold no further global batch."""

    def __init__(
        self,
        shard: BatchShard,
        batch_size_at: Callable[[int], int],
        order: Callable[[int], int],
        consumed_samples: int,
        total_samples: int,
    ) -> None:
        self.shard, self.batch_size_at, self.order = shard, batch_size_at, order
        self.consumed_samples, self.total_samples = consumed_samples, total_samples

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield this rank's micro-batches as lists of (stream position, data set index), from ``consumed_samples`` on.
        Ends before a global batch that exceeds ``total_samples``. Raises UserError if a batch size does not divide."""
        position = self.consumed_samples
        while True:
            size = self.batch_size_at(position)
            if position + size > self.total_samples:
                return
            for positions in self.shard.slices(position, size):
                yield [(i, self.order(i)) for i in positions]
            position += size


def train_sampler(cfg: PretrainConfig, shard: BatchShard, num_samples: int, consumed_samples: int) -> TrainSampler:
    """Return the sampler of ``shard``'s training batches, for a data set of ``num_samples``, from the global batch that
    starts after ``consumed_samples``. ``cyclic`` has no end and reshuffles each epoch."""
    is_cyclic = cfg.data.dataloader_type == "cyclic"
    return TrainSampler(
        shard,
        batch_size_at(cfg),
        EpochShuffle(num_samples, cfg.model.seed) if is_cyclic else sequential,
        consumed_samples=consumed_samples,
        total_samples=sys.maxsize if is_cyclic else num_samples,
    )


class EvalSampler:
    """Batch sampler over the first ``num_samples`` samples; pads the last batch with masked ones."""

    def __init__(self, shard: BatchShard, global_batch_size: int, num_samples: int) -> None:
        self.shard, self.global_batch_size, self.num_samples = shard, global_batch_size, num_samples

    @property
    def num_global_batches(self) -> int:
        """Number of global batches, the last of which may be padded."""
        return -(-self.num_samples // self.global_batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for start in range(0, self.num_samples, self.global_batch_size):
            for positions in self.shard.slices(start, self.global_batch_size):
                yield [(i, i if i < self.num_samples else PADDING) for i in positions]


class BatchReader:
    """Reads the micro-batches of one global batch after another.

    Args:
        batches: iterator over this rank's micro-batches.
        count: maps a micro-batch to its number of valid tokens (or samples) of each loss.
        reads_ahead: whether to read the next global batch while the current one is used. Off for iterators that another
            program owns: they may have a state that must match the batches in use."""

    def __init__(
        self, batches: Iterator[dict], count: Callable[[dict], Sequence[Tensor | int]], *, reads_ahead: bool
    ) -> None:
        self.batches, self.count, self.reads_ahead = batches, count, reads_ahead
        self._read: list[tuple[dict, Tensor]] = []
        self._error: Exception | None = None
        self._waited = 0.0

    def close(self) -> None:
        """End the worker processes of ``batches``, if it has any; nothing can be read afterwards."""
        if isinstance(self.batches, Generator):
            self.batches.close()

    def take_waited(self) -> float:
        """Return the seconds spent in ``batches`` since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def take(self, number: int, following: int = 0) -> tuple[Iterator[dict], Tensor]:
        """Read the next ``number`` (at least 1) micro-batches. Return an iterator over them, which reads up to
        ``following`` micro-batches of the next global batch, and the sums of their counts, fp64 [losses]. An error
        while reading ahead, or the end of the data (StopIteration), is raised by the call that needs the batch."""
        while len(self._read) < number:
            if self._error is not None:
                raise self._error
            self._read.append(self._next())
        current, self._read = self._read[:number], self._read[number:]
        return self._handed_out([batch for batch, _ in current], following), sum(counts for _, counts in current)  # type: ignore[return-value]

    def _next(self) -> tuple[dict, Tensor]:
        start = time.perf_counter()
        batch = next(self.batches)
        self._waited += time.perf_counter() - start
        return batch, torch.stack([torch.as_tensor(value).to(torch.float64) for value in self.count(batch)])

    def _handed_out(self, batches: Sequence[dict], following: int) -> Iterator[dict]:
        """Yield ``batches``; before each, with ``reads_ahead``, read one micro-batch of the next global batch until
        ``following`` are read. Keeps an error for `take` and then reads no further."""
        for batch in batches:
            if self.reads_ahead and len(self._read) < following and self._error is None:
                try:
                    self._read.append(self._next())
                except Exception as error:
                    self._error = error
            yield batch


class DataSource(Protocol):
    """Map-style data set whose samples are mappings of arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int, /) -> Mapping[str, object]: ...


class KeyedDataset:
    """Map-style data set with keys (stream position, index); adds ``sample_index``. Padding has a zero loss mask."""

    def __init__(self, dataset: DataSource) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> dict[str, object]:
        """Return a shallow copy of sample ``index`` with ``sample_index``, the stream position. For a ``PADDING``
        index, return sample 0 with a zero loss mask and ``sample_index`` = PADDING."""
        position, index = key
        sample = dict(self.dataset[max(index, 0)])
        if index == PADDING:
            sample["loss_mask"] = np.zeros_like(np.asarray(sample["loss_mask"]))  # contributes to no sum
        sample["sample_index"] = np.int64(PADDING if index == PADDING else position)
        return sample


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack numpy samples into CPU tensors [b, …] by the keys of the first sample; dtypes stay. Concatenate the arrays
    of :class:`Ragged`, and ``cu_seqlens`` into one int32 tensor of bounds in the flattened [b * s] tokens."""
    batch: dict[str, Tensor] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if name == "cu_seqlens":
            length = len(samples[0]["tokens"])
            starts = [np.asarray(value)[:-1] + row * length for row, value in enumerate(values)]
            batch[name] = torch.from_numpy(np.concatenate([*starts, [len(values) * length]]).astype(np.int32))
        elif isinstance(values[0], Ragged):
            batch[name] = torch.from_numpy(np.concatenate([value.values for value in values]))
        else:
            batch[name] = torch.from_numpy(np.stack([np.asarray(value) for value in values]))
    return batch


class FlatBatch:
    """Batch in one uint8 tensor: workers pass each tensor by a file descriptor and socket, which is slow."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        # widest items first: each tensor then starts at a multiple of its item size
        batch = dict(sorted(batch.items(), key=lambda each: -each[1].itemsize))
        self.bytes = torch.cat([x.reshape(-1).view(torch.uint8) for x in batch.values()])
        self.parts = [(name, x.dtype, x.shape, x.nbytes) for name, x in batch.items()]

    def pin_memory(self) -> FlatBatch:
        """Pin the memory in place; called by torch's loader."""
        self.bytes = self.bytes.pin_memory()
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return the batch as views of the flat tensor."""
        pieces = self.bytes.split([size for *_, size in self.parts])
        return {name: x.view(dtype).view(shape) for x, (name, dtype, shape, _) in zip(pieces, self.parts)}


def flat_batch(samples: list[dict[str, object]]) -> FlatBatch:
    """Collate samples into a flat batch (worker function)."""
    return FlatBatch(collate(samples))


def death(workers: Sequence[multiprocessing.process.BaseProcess]) -> str:
    """Return what ended one of ``workers`` and what to do; empty if none failed, after waiting for a second."""
    ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], 1)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(1)  # it closes its files first
    signals = {-(worker.exitcode or 0) for worker in workers}
    if signal.SIGBUS in signals:
        return f"had no memory; {SHARED_MEMORY}"
    if signal.SIGKILL in signals:
        return "was killed, as the kernel does if the host has no memory left; use fewer, or --num-workers 0"
    if codes := [worker.exitcode for worker in workers if worker.exitcode]:
        return f"ended with the exit code {codes[0]}; to see the error, read in the training process: --num-workers 0"
    return ""


class Deaths:
    """Context of a read from the workers of ``batches``, an iterator of torch's loader: raises RuntimeError if one of
    them failed before or fails meanwhile. Torch's handler of SIGCHLD, which continues to serve other loaders, would
    raise wherever the main thread is: in a backward pass, in a save."""

    reading: ClassVar[Sequence[multiprocessing.process.BaseProcess]] = ()
    previous: ClassVar[Callable[[int, FrameType | None], object] | int | None] = None
    """The handler of SIGCHLD that this class has replaced."""

    def __init__(self, batches: Any) -> None:
        self.workers = batches._workers
        signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
        is_main = threading.current_thread() is threading.main_thread()  # the only thread that may set handlers
        if is_main and signal.getsignal(signal.SIGCHLD) is not Deaths.on_signal:
            Deaths.previous = signal.signal(signal.SIGCHLD, Deaths.on_signal)

    def __enter__(self) -> None:
        Deaths.reading = self.workers
        Deaths.check()

    def __exit__(self, *error: object) -> None:
        Deaths.reading = ()

    @staticmethod
    def check() -> None:
        """Raise RuntimeError if a worker of the read in progress failed."""
        if any(worker.exitcode for worker in Deaths.reading):
            Deaths.reading = ()  # SIGCHLD of the others must not interrupt their end
            raise RuntimeError("a worker process failed")

    @staticmethod
    def on_signal(number: int, frame: FrameType | None) -> None:
        """Handle SIGCHLD: torch waits without end for the rest of a batch that a killed worker began to send."""
        Deaths.check()
        if callable(Deaths.previous):
            Deaths.previous(number, frame)


class Loader(DataLoader):
    """Loader of flat batches, which it yields as {name: tensor}."""

    def __iter__(self) -> Generator[dict[str, Tensor]]:  # type: ignore[override]
        """Yield the batches; start the workers at the first. The generator's ``close`` ends them."""
        if self.num_workers == 0:
            yield from map(FlatBatch.tensors, super().__iter__())
            return
        # forked workers inherit what is frozen: if they collected cycles of this process with CUDA tensors, they would
        # call CUDA and abort
        gc.freeze()
        try:
            batches = super().__iter__()
        except OSError as error:
            reason = f"worker processes cannot start ({error.strerror})"
            raise UserError(f"--num-workers {self.num_workers}: {reason}; {SHARED_MEMORY}") from error
        finally:
            gc.unfreeze()
        deaths = Deaths(batches)
        try:
            while True:
                with deaths:
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch.tensors()
        except (RuntimeError, OSError, EOFError) as error:  # from torch, or from the connection to a worker that died
            reason = death(batches._workers)  # type: ignore[attr-defined]
            if not reason:
                raise
            raise UserError(f"--num-workers {self.num_workers}: a worker process {reason}") from error
        finally:  # torch ends them with the last reference: a cycle may keep it
            batches._shutdown_workers()  # type: ignore[attr-defined]


class Flag:
    """An event without a lock. A worker that is killed (out of memory) while it reads torch's event keeps the event's
    lock, and everyone else waits for it without end, the trainer before it reports the death."""

    def __init__(self) -> None:
        self._set = multiprocessing.RawValue("b", 0)

    def set(self) -> None:
        """Set the flag for all processes."""
        self._set.value = 1

    def is_set(self) -> bool:
        """Whether a process has set the flag."""
        return bool(self._set.value)


class WorkerContext(multiprocessing.context.ForkContext):
    """Forks workers, which a :class:`Flag` ends."""

    def Event(self) -> Flag:  # type: ignore[override]
        """Return what torch's loader calls its ``done_event``."""
        return Flag()


def build_loader(
    dataset: DataSource, sampler: Iterable[list[tuple[int, int]]], num_workers: int, pin_memory: bool
) -> DataLoader:
    """Return a torch DataLoader over ``dataset`` whose iterator yields {name: tensor [b, …]} on the host. ``sampler``
    yields lists of (stream position, index). Does not advance torch's global generator."""
    return Loader(
        KeyedDataset(dataset),  # type: ignore[arg-type]  # map-style by its keys, not by range(len)
        batch_sampler=sampler,
        collate_fn=flat_batch,
        **loader_options(num_workers, pin_memory),
    )


def loader_options(num_workers: int, pin_memory: bool) -> dict[str, Any]:
    """Return the options of a :class:`Loader` with ``num_workers`` processes."""
    return {
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "generator": torch.Generator(),  # worker seeds must not advance the global state that a resume restores
        "worker_init_fn": IgnoreExitSignals(),
        "multiprocessing_context": WorkerContext() if num_workers else None,
    }
