"""No death while writing, damage, bad tracker, full disk or second job costs the last good checkpoint."""

import errno
import logging
import os
import random
import select
import signal

import pytest

from megatron.core.dist_checkpointing import CheckpointError, writer
from megatron.training.checkpoint_files import SaveLock, find_checkpoint, read_tracker
from megatron.training.train_state import TrainState
from tests.test_utils.checkpointed_run import TRACKER, Run, settings

# ---- dying and failing


def in_child(action):
    """Exit status of a forked process that runs ``action`` and exits with what it returns.

    ``action`` must not run backward: where torch sees a GPU, a forked process cannot.
    """
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = action() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


PHASES = [
    "before_directory", "mid_shard", "before_fsync", "after_shards", "before_manifest", "before_rename", "after_rename",
    "before_tracker", "before_tracker_rename", "after_tracker", "mid_delete", "between_renames",
]  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
def test_death_at_any_phase_leaves_the_old_or_the_new_checkpoint(tmp_path, phase, snapshots):
    cfg = settings(tmp_path, save_retain_interval=10)
    again = phase == "between_renames"

    armed = []
    run = Run(cfg, fault=lambda name: os._exit(9) if armed and name == phase else None).train(2)
    assert run.save()
    run.train(0 if again else 2)
    armed.append(1)
    assert in_child(run.save) == 9
    survivor = Run(cfg)
    survivor.load()
    assert survivor.state.iteration in ((2,) if again else (2, 4))
    assert survivor.bits() == snapshots[survivor.state.iteration]
    assert survivor.train(1).save()
    assert not [p for p in tmp_path.glob(".*") if p.name != ".lock"], "the next save cleans up"
    assert Run(cfg).load().iteration == survivor.state.iteration


def test_death_at_any_moment_leaves_a_good_checkpoint(tmp_path, snapshots):
    """A process that saves without pause is killed at random moments."""
    cfg = settings(tmp_path, save_retain_interval=100)
    random_moments = random.Random(5)
    run = Run(cfg).train(1)
    assert run.save()

    def save_forever():
        os.write(ready[1], b"x")
        while True:
            run.state = TrainState()
            run.checkpointer._saved.clear()
            for _ in range(7):
                run.state.iteration += 1
                run.save()

    for _ in range(12):
        ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                save_forever()
            finally:
                os._exit(70)
        os.close(ready[1])
        assert os.read(ready[0], 1) == b"x", "the saving process did not start"
        select.select([], [], [], random_moments.uniform(0.0, 0.04))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        survivor = Run(cfg)
        assert survivor.load().iteration in range(1, 8)
        assert survivor.bits()[0] == snapshots[1][0]
        os.close(ready[0])


def test_a_full_disk_keeps_the_old_checkpoint_and_is_reported(tmp_path, monkeypatch, snapshots):
    run = Run(settings(tmp_path)).train(2)
    assert run.save()

    def full(file, tensor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_blocks", full)
        assert run.train(1).save() is False and run.save() is False
        assert run.checkpointer.failed_saves == 2
    assert {p.name for p in tmp_path.iterdir()} == {TRACKER, ".lock", "iter_0000002"}
    other = Run(settings(tmp_path))
    other.load()
    assert other.bits() == snapshots[2]
    assert run.save() and run.checkpointer.failed_saves == 0


def test_a_system_limit_on_file_sizes_is_survived(tmp_path):
    """The same with an error from the system itself."""
    import resource

    run = Run(settings(tmp_path)).train(1)

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
        return 0 if run.save() is False else 1

    assert in_child(limited) == 0
    assert {p.name for p in tmp_path.iterdir()} == {".lock"}


def test_a_second_job_is_kept_from_the_same_folder(tmp_path):
    run = Run(settings(tmp_path))

    def second_job():
        try:
            Run(settings(tmp_path))
        except CheckpointError as error:
            return 3 if f'"pid": {os.getppid()}' in str(error) and "--save" in str(error) else 4

    assert in_child(second_job) == 3
    run.checkpointer.close()
    assert in_child(second_job) == 0
    assert in_child(lambda: SaveLock(tmp_path) and 0) == 0
    SaveLock(tmp_path).release()  # the holder is dead, its lock does not matter


# ---- trackers


BAD_TRACKERS = [b"", b"\n", b"abc", b"-5", b"\xff\xfe", b"7", b"99999999999999999999", b"1.5", None]


@pytest.mark.parametrize("content", BAD_TRACKERS)
def test_a_bad_tracker_falls_back_to_the_newest_complete_checkpoint(two, content, caplog):
    logging.getLogger("megatron").propagate = True
    (two / TRACKER).unlink()
    if content is not None:
        (two / TRACKER).write_bytes(content)
    with caplog.at_level(logging.WARNING, "megatron"):
        assert find_checkpoint(two).iteration == 2
    assert TRACKER in caplog.text or "iter_0000007" in caplog.text
    (two / "iter_0000002" / "metadata.json").unlink()
    assert find_checkpoint(two).iteration == 1
    (two / "iter_0000001" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_checkpoint(two)


def test_line_ends_in_a_tracker_do_not_matter(two):
    (two / TRACKER).write_bytes(b" 1\r\n")
    assert find_checkpoint(two).iteration == read_tracker(two) == 1


def test_damage_is_refused_and_an_earlier_checkpoint_named(two):
    path = two / "iter_0000002" / "optimizer_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="optimizer_00000.safetensors: optimizer.*is damaged.*--ckpt-step 1"):
        Run(settings(two)).load()
    assert Run(settings(two, ckpt_step=1)).load().iteration == 1


def test_a_renamed_checkpoint_is_refused(two):
    (two / "iter_0000002").rename(two / "iter_0000009")
    (two / TRACKER).write_text("9")
    with pytest.raises(CheckpointError, match="of iteration 2: it was renamed"):
        Run(settings(two)).load()
