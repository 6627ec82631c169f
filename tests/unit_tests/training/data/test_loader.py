"""Global batches are equal for any number of ranks, micro-batch size and worker count."""

import gc
import multiprocessing.connection
import os
import signal
import sys
import time
from itertools import count, islice

import numpy as np
import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.training.data.batch import get_batch_on_this_cp_rank, pack_rows, sort_by_length
from megatron.training.data.loader import (
    PADDING,
    BatchReader,
    Deaths,
    EpochShuffle,
    EvalSampler,
    FlatBatch,
    KeyedDataset,
    Shard,
    TrainSampler,
    build_loader,
    collate,
    sequential,
    train_sampler,
)
from tests.test_utils.layouts import MODEL, configure
from tests.test_utils.unstable_sort import make_sorts_unstable


class Numbers:
    """Sample i holds the token i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        tokens = np.full(4, index, dtype=np.int64)
        return {"tokens": tokens, "loss_mask": np.ones(4, dtype=np.float32)}


def global_batches(dp, micro_batch_size, sizes, consumed=0, total=1000, order=sequential):
    """The stream as the union over ranks: one sorted list of positions per global batch."""
    per_rank = []
    for rank in range(dp):
        sampler = TrainSampler(Shard(micro_batch_size, rank, dp), lambda n: sizes(n), order, consumed, total)
        per_rank.append(iter(sampler))
    batches, position = [], consumed
    for _ in range(6):
        count = sizes(position) // (micro_batch_size * dp)
        keys = [key for stream in per_rank for batch in islice(stream, count) for key in batch]
        batches.append(sorted(keys))
        position += sizes(position)
    return batches


@pytest.mark.parametrize("dp, micro_batch_size", [(1, 1), (1, 8), (2, 2), (2, 4), (4, 2), (8, 1)])
def test_global_batches_do_not_depend_on_the_layout(dp, micro_batch_size):
    def sizes(consumed):
        return 8 if consumed < 24 else 16

    reference = global_batches(1, 1, sizes)
    assert global_batches(dp, micro_batch_size, sizes) == reference
    positions = [position for batch in reference for position, _ in batch]
    assert positions == list(range(8 * 3 + 16 * 3))


@pytest.mark.parametrize("dp, micro_batch_size", [(2, 2), (1, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("order", [sequential, EpochShuffle(20, seed=3)], ids=["sequential", "cyclic"])
def test_a_resumed_stream_reads_every_sample_once_on_any_number_of_ranks(dp, micro_batch_size, order):
    """The batch size grows at sample 24, where the run on two ranks stopped."""

    def sizes(consumed):
        return 8 if consumed < 24 else 16

    before = global_batches(2, 2, sizes, order=order)
    after = global_batches(dp, micro_batch_size, sizes, consumed=24, order=order)
    assert after[:3] == before[3:]
    read = [key for batch in before[:3] + after for key in batch]
    assert read == [(position, order(position)) for position in range(24 + 6 * 16)]


def test_a_batch_that_does_not_divide_names_the_nearest_sizes():
    with pytest.raises(ValueError, match="--global-batch-size 10.*nearest sizes are 8 and 12"):
        next(Shard(2, 0, 2).slices(0, 10))


def test_the_stream_ends_before_a_batch_that_the_data_cannot_fill():
    sampler = TrainSampler(Shard(2, 0, 1), lambda n: 4, sequential, 0, total_samples=10)
    assert [key for batch in sampler for key, _ in batch] == list(range(8))


def test_cyclic_order_is_a_permutation_of_each_epoch_and_needs_no_history():
    order = EpochShuffle(10, seed=3)
    epochs = [[order(i) for i in range(start, start + 10)] for start in (0, 10)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10)) and epochs[0] != epochs[1]
    assert [EpochShuffle(10, seed=3)(i) for i in range(10, 20)] == epochs[1]


def test_cyclic_batches_have_no_end_and_others_end_with_the_data():
    def keys(kind, consumed):
        cfg = configure([*MODEL, "--micro-batch-size", "2", "--seed", "5", "--dataloader-type", kind], 1, "fp32")
        return [key for batch in islice(train_sampler(cfg, Shard(2, 0, 1), 10, consumed), 8) for key in batch]

    order = EpochShuffle(10, seed=5)
    assert keys("cyclic", 16) == [(position, order(position)) for position in range(16, 32)]
    assert keys("single", 0) == [(position, position) for position in range(8)]


def test_evaluation_covers_every_sample_once_and_masks_the_ragged_tail():
    keys = [key for rank in range(2) for batch in EvalSampler(Shard(2, rank, 2), 8, 13) for key in batch]
    assert sorted(index for _, index in keys if index != PADDING) == list(range(13))
    assert sum(index == PADDING for _, index in keys) == 3
    assert [EvalSampler(Shard(2, 0, 2), 8, size).num_global_batches for size in (8, 13, 16, 17)] == [1, 2, 2, 3]
    padded = KeyedDataset(Numbers(13))[(15, PADDING)]
    assert padded["loss_mask"].sum() == 0 and padded["sample_index"] == -1


def test_samples_of_the_data_set_do_not_change():
    samples = [{"tokens": np.full(4, index), "loss_mask": np.ones(4)} for index in range(2)]
    assert KeyedDataset(samples)[7, PADDING]["tokens"].tolist() == [0] * 4
    assert samples[0].keys() == {"tokens", "loss_mask"} and samples[0]["loss_mask"].all()


def test_boundaries_of_documents_are_laid_end_to_end():
    samples = [
        {"tokens": np.zeros(8), "cu_seqlens": np.array([0, 3, 8], np.int32), "sample_index": np.int64(0)},
        {"tokens": np.zeros(8), "cu_seqlens": np.array([0, 8], np.int32), "sample_index": np.int64(1)},
    ]
    assert collate(samples)["cu_seqlens"].tolist() == [0, 3, 8, 16]


@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_batch_of_tensors_of_all_widths_travels_as_one(pinned):
    batch = {
        "flags": torch.tensor([[True], [False], [True]]), "bytes": torch.arange(5, dtype=torch.uint8),
        "halves": torch.randn(3, 1).bfloat16(), "none": torch.empty(0, 4), "tokens": torch.arange(6).view(2, 3),
        "loss_mask": torch.randn(3, 3), "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32),
    }  # fmt: skip
    flat = FlatBatch(batch)
    result = (flat.pin_memory() if pinned else flat).tensors()
    assert result.keys() == batch.keys() and all(x.is_pinned() == pinned for x in result.values() if x.numel())
    assert all(torch.equal(result[name], x) and result[name].dtype == x.dtype for name, x in batch.items())


def test_samples_are_laid_end_to_end_and_the_row_is_filled_up():
    text = torch.arange(1, 13).view(3, 4)
    batch = {"text": text, "loss_mask": text, "is_random": torch.ones(3), "sample_index": torch.tensor([7, 8, -1])}
    row, documents = pack_rows(batch, torch.tensor([4, 1, 2]), 3)
    assert row["text"].tolist() == [[1, 2, 3, 4, 5, 9, 10, 0, 0]] and documents.document_bounds() == (0, 4, 5, 7, 9)
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0, 1, 0, 1]] and documents.max_seqlen_q == 4
    assert row["document"].tolist() == [[0, 0, 0, 0, 1, 2, 2, 3, 3]]
    assert row["sample_index"].tolist() == [7, 8, -1, -1] and row["is_random"].tolist() == [1, 1, 1, 0]
    exact, bounds = pack_rows(batch, torch.tensor([4, 1, 1]), 3)
    assert exact["text"].tolist() == [[1, 2, 3, 4, 5, 9]] and bounds.document_bounds() == (0, 4, 5, 6)


def test_the_longest_rows_come_first_and_equal_ones_keep_their_order(monkeypatch):
    make_sorts_unstable(monkeypatch)
    batch, lengths = sort_by_length({"sample_index": torch.arange(5)}, torch.tensor([2, 4, 2, 3, 4]))
    assert lengths.tolist() == [4, 4, 3, 2, 2] and batch["sample_index"].tolist() == [1, 4, 3, 0, 2]


def test_a_rank_that_shares_no_sequence_takes_batches_as_they_are():
    batch = {"text": torch.arange(8).view(1, 8), "attention_mask": torch.ones(1, 1, 8, 8)}
    assert get_batch_on_this_cp_rank(batch) is batch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_workers_do_not_change_the_batches(num_workers):
    sampler = TrainSampler(Shard(2, 1, 2), lambda n: 8, sequential, 8, 40)
    loader = build_loader(Numbers(40), sampler, num_workers, pin_memory=False)
    generator_state = torch.get_rng_state()
    batches = list(loader)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert [batch["sample_index"].tolist() for batch in batches[:3]] == [[10, 11], [14, 15], [18, 19]]
    assert all(torch.equal(batch["tokens"][:, 0], batch["sample_index"]) for batch in batches)


class CollectingNumbers(Numbers):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


class Cycle:
    """An object that only the garbage collector frees; notes in ``folder`` which process did."""

    def __init__(self, folder):
        self.folder, self.own = folder, self

    def __del__(self):
        (self.folder / str(os.getpid())).touch()


def test_workers_do_not_free_objects_of_the_process_that_started_them(tmp_path):
    """A CUDA tensor in such a cycle would abort the worker."""
    sampler = TrainSampler(Shard(2, 0, 1), lambda n: 4, sequential, 0, 16)
    gc.collect()
    gc.disable()
    try:
        Cycle(tmp_path)
        assert len(list(build_loader(CollectingNumbers(16), sampler, 1, pin_memory=False))) == 8
        assert list(tmp_path.iterdir()) == []
        gc.collect()
    finally:
        gc.enable()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_a_loader_without_workers_leaves_frozen_objects_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    sampler = TrainSampler(Shard(2, 0, 1), lambda n: 4, sequential, 0, 8)
    assert len(list(build_loader(Numbers(8), sampler, 0, pin_memory=False))) == 4
    assert gc.get_freeze_count() > frozen // 2 > 0  # some were freed since


def counted_reader(stop=100, ahead=True):
    """A reader of micro-batches 0, 1, ... ``stop``, after which reading fails; and the numbers that were read."""
    observed = []

    def batches():
        for number in range(stop):
            observed.append(number)
            yield {"number": number}
        raise UserError("no more data")

    return BatchReader(batches(), lambda batch: [batch["number"], 1], reads_ahead=ahead), observed


def test_a_global_batch_is_read_and_counted_while_the_one_before_is_used():
    reader, observed = counted_reader()
    selected, counts = reader.take(3, 2)
    assert observed == [0, 1, 2] and counts.tolist() == [3, 3]
    for number, ahead in ((0, 3), (1, 4), (2, 4)):
        assert next(selected)["number"] == number and observed[-1] == ahead  # no more than the next two
    selected, counts = reader.take(2, 4)
    assert observed[-1] == 4 and counts.tolist() == [7, 2]
    assert [batch["number"] for batch in selected] == [3, 4] and observed[-1] == 6
    assert [batch["number"] for batch in reader.take(4, 0)[0]] == [5, 6, 7, 8] and observed[-1] == 8


def test_iterators_of_other_programs_are_read_when_their_batches_are_used():
    reader, observed = counted_reader(ahead=False)
    assert [batch["number"] for batch in reader.take(2, 2)[0]] == [0, 1] == observed


def test_errors_of_batches_that_nothing_needs_yet_wait():
    reader, _ = counted_reader(stop=3)
    assert [batch["number"] for batch in reader.take(2, 2)[0]] == [0, 1]
    with pytest.raises(UserError, match="no more data"):
        reader.take(2)
    reader, _ = counted_reader(stop=2)
    list(reader.take(2, 2)[0])  # the last global batch
    with pytest.raises(UserError, match="no more data"):  # nothing was read after the error
        reader.take(1)


def test_seconds_of_reading_are_added_up(monkeypatch):
    reader, _ = counted_reader()
    monkeypatch.setattr("time.perf_counter", count(step=2.0).__next__)
    reader.take(3)
    assert [reader.take_waited(), reader.take_waited()] == [6.0, 0.0]


@pytest.mark.parametrize("error, reason", [
    (OSError(28, "No space left on device"), r"worker processes cannot start \(No space left on device\)"),
    (OSError(30, "Read-only file system"), r"worker processes cannot start \(Read-only file system\)"),
])  # fmt: skip
def test_workers_that_cannot_start_name_the_flag(monkeypatch, error, reason):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", fail)
    loader = build_loader(Numbers(8), [[(0, 0)]], 2, pin_memory=False)
    with pytest.raises(UserError, match=rf"^--num-workers 2: {reason}; free or enlarge /dev/shm.*--num-workers 0"):
        next(iter(loader))


class KilledByFullMemory(Numbers):
    """Ends its process as the kernel does if /dev/shm is full."""

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGBUS)


def test_a_worker_without_shared_memory_names_the_flag():
    loader = build_loader(KilledByFullMemory(8), [[(0, 0)]], 1, pin_memory=False)
    with pytest.raises(UserError, match="^--num-workers 1: a worker process had no memory; free or enlarge /dev/shm"):
        next(iter(loader))


class KilledWhileItReads(Numbers):
    """Ends its process as the kernel does if the host has no memory, with the lock of the event that ends workers."""

    def __getitem__(self, index):
        if index < 6:
            return super().__getitem__(index)
        frame = sys._getframe()
        while "done_event" not in frame.f_locals:
            frame = frame.f_back
        lock = getattr(frame.f_locals["done_event"], "_cond", None)  # as torch's own has
        if lock is not None:
            lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_ends_the_others_and_names_the_flag():
    loader = build_loader(KilledWhileItReads(8), [[(i, i)] for i in range(8)], 2, pin_memory=False)
    batches, others = iter(loader), multiprocessing.active_children()
    next(batches)
    workers = set(multiprocessing.active_children()) - set(others)
    with pytest.raises(UserError, match="^--num-workers 2: a worker process was killed, .*; use fewer"):
        list(batches)
    assert len(workers) == 2 and not any(worker.is_alive() for worker in workers)


def test_a_worker_killed_between_reads_is_reported_by_the_next_read(monkeypatch):
    """Torch would raise RuntimeError in the main thread, wherever that is."""
    signals, before = [], multiprocessing.active_children()
    batches = iter(build_loader(Numbers(8), [[(i, i)] for i in range(8)], 2, pin_memory=False))
    next(batches)
    monkeypatch.setattr(Deaths, "previous", lambda number, frame: signals.append(number))
    workers = [worker for worker in multiprocessing.active_children() if worker not in before]
    os.kill(workers[0].pid, signal.SIGKILL)
    multiprocessing.connection.wait([workers[0].sentinel])
    time.sleep(0.1)  # the handler of SIGCHLD runs here
    with pytest.raises(UserError, match="^--num-workers 2: a worker process was killed, .*; use fewer"):
        list(batches)
    assert not any(worker.is_alive() for worker in workers) and set(signals) == {signal.SIGCHLD}
