"""--async-save over complete runs: the files equal a save in the foreground, bit for bit; a kill, a signal or a full
disk during a save loses no earlier checkpoint."""

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

from megatron.core.dist_checkpointing import CheckpointReader
from megatron.training.checkpoint.files import read_tracker, saved_iterations
from tests.functional_tests.test_gpt_training import digests
from tests.test_utils import failures
from tests.test_utils.failures import Fault
from tests.test_utils.gpt_runs import read_records, train, train_with_errors

LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2", "--bf16"]),
    "zero": (2, ["--use-distributed-optimizer", "--bf16", "--overlap-grad-reduce", "--overlap-param-gather"]),
    "offload": (2, ["--use-distributed-optimizer", "--bf16", "--optimizer-cpu-offload",
                    "--overlap-cpu-optimizer-d2h-h2d"]),
    "fsdp": (2, ["--use-torch-fsdp2", "--bf16"]),
}  # fmt: skip


@contextlib.contextmanager
def slow_disk(fault):
    """Background saves that call ``fault(phase)`` at their phases."""
    from megatron.training.checkpoint.background import BackgroundWriter

    start = BackgroundWriter.start

    def start_slowly(self, part, work, _, name):
        return start(self, part, work, fault, name)

    with mock.patch.object(BackgroundWriter, "start", start_slowly):
        yield


def train_slowly(rank, world_size, argv, seconds):
    with slow_disk(lambda phase: time.sleep(seconds) if phase == "before_shards" else None):
        return train(rank, world_size, argv)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_are_those_of_the_foreground_bit_for_bit(gloo_pool, tmp_path, layout):
    """Training changes every weight, in place, before the writer sees the copy."""
    world_size, flags = LAYOUTS[layout]
    argv = ["--mock-data", *flags, "--save-interval", "3", "--log-interval", "1"]
    plain, previous = tmp_path / "plain", tmp_path / "behind"
    assert gloo_pool.run(train, world_size, [*argv, "--save", str(plain)]) == [0] * world_size
    codes = gloo_pool.run(train_slowly, world_size, [*argv, "--save", str(previous), "--async-save"], 0.3)
    assert codes == [0] * world_size
    assert saved_iterations(previous) == saved_iterations(plain) == [8, 6, 3]
    for name in ("iter_0000003", "iter_0000006", "iter_0000008"):
        CheckpointReader(previous / name).verify()
        assert digests(previous / name) == digests(plain / name) != {}
    assert (previous / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
    records = [item for item in read_records(previous / "timing.jsonl") if item["kind"] == "save"]
    assert [(item["iteration"], item["background"]) for item in records] == [(3, True), (6, True), (8, False)]
    for item in records:
        assert item["bytes"] > 10_000 and 0 < item["stall_seconds"] <= item["seconds"] and item["gb_per_second"] > 0
    assert records[0]["seconds"] > 0.3
    kinds = [item["kind"] for item in read_records(plain / "timing.jsonl")]
    assert (kinds.count("timing"), kinds.count("save")) == (8, 3)


def train_on_a_full_disk(rank, world_size, argv, broken):
    """Saves of the iterations ``broken`` fail on the last rank, in the middle of a file."""
    from megatron.training.checkpoint.background import BackgroundWriter

    start = BackgroundWriter.start

    def start_broken(self, part, work, fault, name):
        def full(phase):
            if phase == "mid_shard" and rank == world_size - 1 and int(name.split()[-1]) in broken:
                raise OSError(errno.ENOSPC, "No space left on device")

        return start(self, part, work, full, name)

    with mock.patch.object(BackgroundWriter, "start", start_broken):
        return train_with_errors(rank, world_size, argv)


def test_failed_save_loses_that_save_only(gloo_pool, tmp_path):
    argv = ["--mock-data", "--save", str(tmp_path), "--save-interval", "2", "--async-save"]
    assert gloo_pool.run(train_on_a_full_disk, 2, argv, [4]) == [(0, "")] * 2
    assert saved_iterations(tmp_path) == [8, 6, 2] and not list(tmp_path.glob(".*tmp*"))
    assert [e["iteration"] for e in read_records(tmp_path / "timing.jsonl") if e["kind"] == "save"] == [2, 6, 8]


def test_failures_in_a_row_stop_the_run_with_75(gloo_pool, tmp_path):
    argv = ["--mock-data", "--save", str(tmp_path), "--save-interval", "1", "--async-save", "--max-failed-saves", "2"]
    assert {code for code, _ in gloo_pool.run(train_on_a_full_disk, 2, argv, range(100))} == {75}
    records = [item for item in read_records(tmp_path / "metrics.jsonl") if item["kind"] == "train"]
    assert 2 <= len(records) <= 4 and not saved_iterations(tmp_path)


def train_until_a_signal(rank, world_size, argv):
    """The last rank gets SIGTERM in the fourth iteration, while the save of the third is held up."""
    from megatron.training.tasks.gpt import GPTTask

    get_batch, calls = GPTTask.get_batch, []

    def get_batch_and_signal(self, data_iterator):
        calls.append(1)
        if rank == world_size - 1 and len(calls) == 7:  # two micro-batches an iteration
            os.kill(os.getpid(), signal.SIGTERM)
        return get_batch(self, data_iterator)

    with mock.patch.object(GPTTask, "get_batch", get_batch_and_signal):
        return train_slowly(rank, world_size, argv, 1.0)


def test_a_signal_waits_for_the_save_under_way_and_saves_once_more(gloo_pool, tmp_path):
    argv = ["--mock-data", "--save", str(tmp_path), "--save-interval", "3", "--async-save"]
    assert gloo_pool.run(train_until_a_signal, 2, argv) == [0, 0]
    assert saved_iterations(tmp_path) == [4, 3] and read_tracker(tmp_path) == 4
    for iteration in (3, 4):
        CheckpointReader(tmp_path / f"iter_000000{iteration}").verify()


def test_a_kill_during_the_write_leaves_the_checkpoint_before_it(gloo_pool, tmp_path):
    """Rank 0 is killed between two files of its second save; the same command continues from the first."""
    folder = tmp_path / "killed"
    run = failures.run(Fault("is killed in the second background save", 0, "ranks", timeout=20.0), folder)
    assert run.code != 0 and not run.left
    save = folder / "save"
    named = read_tracker(save)
    CheckpointReader(save / f"iter_{named:07d}").verify()
    repeated = failures.run(Fault("nothing in the background", "none", "ranks", timeout=60.0), folder)
    assert repeated.code == 0 and f"at iteration {named}" in repeated.errors[0], repeated.errors
    assert gloo_pool.run(train, 2, [*Fault("nothing").flags, "--save", str(tmp_path / "whole")]) == [0, 0]
    assert digests(save / "iter_0000008") == digests(tmp_path / "whole/iter_0000008")
    assert Path(save / "metrics.jsonl").read_bytes() == Path(tmp_path / "whole/metrics.jsonl").read_bytes()
