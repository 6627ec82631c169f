"""Background saves have the bits of a foreground save; failures are reported, a kill loses no checkpoint."""

import errno
import logging
import os
import threading
import time

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import CheckpointError, CheckpointReader, staging, writer
from megatron.training.checkpoint.background import BackgroundWriter
from megatron.training.checkpoint.files import read_tracker, saved_iterations
from tests.test_utils.checkpointed_run import TRACKER, Run, settings
from tests.unit_tests.training.test_checkpoint_damage import PHASES, outlive_death

SAME = {"async_save", "async_save_staging_gb", "save", "load", "explicit"}


def contents(folder):
    """Return every tensor, and the objects except those that name the folder and the kind of save."""
    reader = CheckpointReader(folder)
    reader.verify()
    objects = {**reader.objects, "args": {k: v for k, v in reader.objects["args"].items() if k not in SAME}}
    return {name: reader.read(name).double().tolist() for name in reader.names}, objects


def held(gate):
    """A fault that stops the writer before its first byte until ``gate`` is set."""
    return lambda phase: phase == "before_shards" and gate.wait(20)


@pytest.mark.parametrize("gb", [None, 0.0])
def test_training_goes_on_and_does_not_leak_into_the_copy(tmp_path, gb):
    """The writer is held up for three iterations, which change every weight in place."""
    plain = Run(settings(tmp_path / "plain")).train(2)
    assert plain.save()
    gate = threading.Event()
    run = Run(settings(tmp_path / "behind", async_save=True, async_save_staging_gb=gb), fault=held(gate)).train(2)
    began = time.perf_counter()
    assert run.checkpointer.start_save(run.state, background=True) is None and run.checkpointer.saving == 2
    free = time.perf_counter()
    run.train(3)
    free = time.perf_counter() - free
    assert run.checkpointer.finish_save(wait=False) is None and not saved_iterations(tmp_path / "behind")
    gate.set()
    report = run.checkpointer.finish_save(wait=True)
    assert report.saved and report.background and report.state.iteration == 2 and run.checkpointer.saving is None
    assert report.seconds > free and 0 < report.stall < time.perf_counter() - began - free
    assert report.num_bytes == plain.checkpointer.start_save(plain.state).num_bytes
    assert contents(tmp_path / "behind/iter_0000002") == contents(tmp_path / "plain/iter_0000002")
    assert run.bits() == plain.train(3).bits(), "training is not disturbed either"
    run.checkpointer.close()


def test_a_small_limit_makes_staging_and_writing_alternate(tmp_path, monkeypatch):
    """Three slabs of four blocks for a hundred blocks; sizes that fill no block, and no slab."""
    monkeypatch.setattr(staging, "BLOCK_BYTES", 64)
    monkeypatch.setattr(writer, "BLOCK_BYTES", 64)
    monkeypatch.setattr(staging, "SLAB_BYTES", 256)
    monkeypatch.setattr(staging, "ALIGNMENT", 16)
    tensors = [torch.randn(size) for size in (1, 50, 7, 600, 64, 3, 16, 16, 16, 300)]
    tensors.append(torch.arange(65, dtype=torch.uint8))  # a last block of one byte
    expected = [[bytes(block) for block in writer.host_blocks(tensor)] for tensor in tensors]
    both = staging.Staging(3 * 256, "cpu")
    for _ in range(2):
        actual = []

        def write(actual=actual):
            for tensor in tensors:
                time.sleep(0.002)
                actual.append([bytes(block) for block in both.blocks(tensor.to("meta"))])
            both.end()
            both.trim()

        thread = threading.Thread(target=write)
        thread.start()
        both.stage(iter(tensors))
        assert both._slabs_left == 0
        thread.join(20)
        assert actual == expected and both._slabs_left == 3


class LateStream:
    """A CUDA stream whose work begins at the first wait, the latest time that a GPU may choose."""

    current: "LateStream"

    def __init__(self):
        self.queue, self.done = [], 0

    def wait_stream(self, other):
        queued = len(other.queue)
        self.queue.append(lambda: other.run(queued))

    def run(self, until):
        while self.done < until:
            self.done += 1
            self.queue[self.done - 1]()

    def synchronize(self):
        time.sleep(0.02)  # a writer that received memory too early has read it before
        self.run(len(self.queue))

    def __enter__(self):
        self.before, LateStream.current = LateStream.current, self

    def __exit__(self, *_):
        LateStream.current = self.before


class LateCopies(TorchFunctionMode):
    """Copies that do not block are work of the current stream."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            LateStream.current.queue.append(lambda: args[0].copy_(args[1]))
            return args[0]
        if function is torch.empty:  # there is no pinned memory without a GPU
            kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


@pytest.mark.parametrize("slabs", [1, 3, 100])
def test_copies_of_a_gpu_are_complete_before_training_goes_on(monkeypatch, slabs):
    """The last weight update is still in flight when the save begins; the next one follows its return."""
    monkeypatch.setattr(staging, "BLOCK_BYTES", 64)
    monkeypatch.setattr(staging, "SLAB_BYTES", 256)
    monkeypatch.setattr(staging, "ALIGNMENT", 16)
    training = LateStream.current = LateStream()
    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: LateStream.current)
    weights = [torch.full((size,), float(size)) for size in (16, 40, 7, 100, 1)]
    expected = [(weight + 1).tolist() for weight in weights]
    both, actual = staging.Staging(slabs * 256, "cuda"), []

    def write():
        for weight in weights:
            actual.append(torch.cat([torch.frombuffer(bytearray(block), dtype=torch.float32)
                                    for block in both.blocks(weight.to("meta"))]).tolist())  # fmt: skip
        both.end()

    writer_thread = threading.Thread(target=write)
    writer_thread.start()
    training.queue += [lambda weight=weight: weight.add_(1) for weight in weights]
    with LateCopies():
        both.stage(iter(weights))
    for weight in weights:
        weight.zero_()
    writer_thread.join(20)
    assert actual == expected and training.done == len(training.queue)


def test_a_failing_writer_lets_staging_end(monkeypatch):
    monkeypatch.setattr(staging, "SLAB_BYTES", staging.BLOCK_BYTES)
    both = staging.Staging(0, "cpu")
    thread = threading.Thread(target=both.end)
    thread.start()
    both.stage(torch.zeros(3, staging.BLOCK_BYTES, dtype=torch.uint8))
    thread.join(20)
    assert not thread.is_alive()


def test_the_default_limit_is_everything_where_there_is_memory(monkeypatch):
    assert 0 < staging.free_host_memory() < 2**50
    monkeypatch.setattr(staging, "free_host_memory", lambda: 8e9)
    assert staging.default_limit(2_000_000_000) > 2e9
    assert staging.default_limit(4_000_000_000) == 1e9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert staging.default_limit(2_000_000_000) == 1e9


def test_a_failed_save_is_reported_and_leaves_the_earlier_one(tmp_path, monkeypatch, snapshots):
    run = Run(settings(tmp_path, async_save=True)).train(2)
    assert run.save()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "_write_blocks", full)
    for count in (1, 2):
        run.train(1).checkpointer.start_save(run.state, background=True)
        assert not run.checkpointer.finish_save(wait=True).saved and run.checkpointer.failed_saves == count
    assert "No space left" in run.checkpointer.last_failure
    assert {p.name for p in tmp_path.iterdir()} == {TRACKER, ".lock", "iter_0000002"}
    monkeypatch.undo()
    run.checkpointer.start_save(run.state, background=True)
    assert run.checkpointer.finish_save(wait=True).saved and run.checkpointer.failed_saves == 0
    survivor = Run(settings(tmp_path, ckpt_step=2))
    survivor.load()
    assert survivor.bits() == snapshots[2]


def test_log_reports_an_async_save_after_it_is_complete(tmp_path, caplog):
    logger, gate = logging.getLogger("megatron"), threading.Event()
    logger.propagate, before = True, logger.propagate
    with caplog.at_level(logging.INFO, "megatron"):
        run = Run(settings(tmp_path, async_save=True), fault=held(gate)).train(1)
        run.checkpointer.start_save(run.state, background=True)
        assert caplog.messages[-1] == f"  scheduled an async checkpoint save at iteration       1 to {tmp_path}"
        gate.set()
        run.checkpointer._background._thread.join(20)
        assert "successfully" not in caplog.text
        run.checkpointer.finish_save(wait=False)
        assert f"  successfully saved checkpoint from iteration       1 to {tmp_path}" in caplog.text
    logger.propagate = before


def test_a_bug_in_the_thread_is_raised_as_it_is(tmp_path):
    def fault(phase):
        if phase == "before_manifest":
            raise ZeroDivisionError("a bug")

    run = Run(settings(tmp_path, async_save=True), fault=fault).train(1)
    run.checkpointer.start_save(run.state, background=True)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run.checkpointer.finish_save(wait=True)


def test_exit_waits_for_the_background_save(tmp_path):
    gate = threading.Event()
    run = Run(settings(tmp_path, async_save=True), fault=held(gate)).train(1)
    run.checkpointer.start_save(run.state, background=True)
    leaving = threading.Thread(target=run.checkpointer.close)
    leaving.start()
    leaving.join(0.1)
    assert leaving.is_alive() and not saved_iterations(tmp_path)
    gate.set()
    leaving.join(20)
    assert saved_iterations(tmp_path) == [1] and read_tracker(tmp_path) == 1


def test_a_file_system_that_hangs_is_named(tmp_path):
    gate = threading.Event()
    cfg = settings(tmp_path, async_save=True, distributed_timeout_minutes=0.005)
    run = Run(cfg, fault=held(gate)).train(1)
    run.checkpointer.start_save(run.state, background=True)
    with pytest.raises(CheckpointError, match="the background save of iteration 1: no progress for .*hangs"):
        run.checkpointer.finish_save(wait=True)
    with pytest.raises(CheckpointError, match="no progress"):
        run.checkpointer.finish_save(wait=False)
    gate.set()
    run.checkpointer.close()


@pytest.mark.parametrize("phase", [*PHASES, "before_shards", "shards_written"])
def test_death_at_any_phase_leaves_the_old_or_the_new_checkpoint(tmp_path, phase, snapshots):
    def save_behind(run):
        run.checkpointer.start_save(run.state, background=True)
        run.checkpointer.finish_save(wait=True)

    outlive_death(settings(tmp_path, save_retain_interval=10, async_save=True), phase, save_behind, snapshots)


def ranks_save_in_background(rank, world, folder, broken):
    """Iterations that each rank made before all of them knew; what all have heard of the save."""
    parallel_state.initialize_model_parallel()

    def fault(phase):
        if phase == "mid_shard" and rank == 1:
            time.sleep(0.3)
            if broken:
                raise OSError(errno.EIO, "one rank's disk")

    groups = parallel_state.get_process_groups()
    run = Run(settings(folder, async_save=True), groups, fault=fault).train(1)
    run.checkpointer.start_save(run.state, background=True)
    while (report := run.checkpointer.finish_save(wait=False)) is None:
        run.train(1)  # with collectives of its own
    run.checkpointer.close()
    return run.state.iteration, report.saved, report.num_bytes, run.checkpointer.last_failure, run.bits()[0]


@pytest.mark.parametrize("broken", [False, True])
def test_all_ranks_hear_of_it_at_the_same_iteration(gloo_pool, tmp_path, broken, snapshots):
    outcomes = gloo_pool.run(ranks_save_in_background, 3, tmp_path, broken)
    assert len({outcome[:4] for outcome in outcomes}) == 1 and outcomes[0][4] == outcomes[1][4]
    iteration, saved, num_bytes, failure, _ = outcomes[0]
    assert iteration > 1 and saved is not broken
    if broken:
        assert "rank 1: OSError: [Errno 5] one rank's disk" in failure and num_bytes == 0
        assert not list(tmp_path.iterdir())
        return
    assert read_tracker(tmp_path) == 1
    CheckpointReader(tmp_path / "iter_0000001").verify()


@pytest.mark.gpu
@pytest.mark.parametrize("gb", [None, 0.0])
def test_copies_off_a_gpu_hold_the_moment_of_the_save(tmp_path, gb, monkeypatch):
    monkeypatch.setattr(Run, "device", "cuda")
    gate = threading.Event()
    plain = Run(settings(tmp_path / "plain")).train(2)
    assert plain.save()
    run = Run(settings(tmp_path / "behind", async_save=True, async_save_staging_gb=gb), fault=held(gate)).train(2)
    run.checkpointer.start_save(run.state, background=True)
    run.train(3)
    gate.set()
    assert run.checkpointer.finish_save(wait=True).saved
    native, foreign = contents(tmp_path / "behind/iter_0000002"), contents(tmp_path / "plain/iter_0000002")
    assert native[1] == foreign[1] and {k: v for k, v in native[0].items() if k[:4] != "rng."} == {
        k: v for k, v in foreign[0].items() if k[:4] != "rng."
    }


def saves_of_different_speed(rank, world):
    """Seconds after which each rank hears of the end of a save, and the bytes that it hears of."""
    world_group = parallel_state.initialize_model_parallel().world
    previous = BackgroundWriter(world_group, "cpu", None, 60.0)
    began = time.perf_counter()

    def work(group, blocks, fault):
        time.sleep(0.8 if rank == 1 else 0.0)
        return 7

    previous.start(writer.WritePlan([], {}), work, lambda phase: None, "a save")
    while not previous.has_finished(wait=False):
        time.sleep(0.01)
    seconds, actual = time.perf_counter() - began, (previous.busy, previous.take()[0])
    previous.close()
    return seconds, actual


def test_a_save_has_ended_when_the_slowest_rank_has_written(gloo_pool):
    for seconds, actual in gloo_pool.run(saves_of_different_speed, 2):
        assert seconds > 0.75 and actual == (False, 7)
