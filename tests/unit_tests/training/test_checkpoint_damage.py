"""No death while writing, damage, bad tracker, full disk or second job costs the last good checkpoint."""

import errno
import json
import logging
import os
import random
import select
import shutil
import signal
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import CheckpointDamagedError, CheckpointError, writer
from megatron.training.checkpoint.files import find_checkpoint, read_tracker
from megatron.training.checkpoint.lock import SaveLock
from megatron.training.train_state import TrainState
from tests.test_utils.checkpointed_run import TRACKER, Run, settings

# ---- dying and failing


def in_child(action):
    """Return the exit status of a forked process, which is the result of ``action``.

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


def outlive_death(cfg, phase, save, snapshots):
    """The run that follows on one that died at ``phase`` of ``save(run)``: it has loaded the old or the new checkpoint,
    and saved again."""
    repeated, armed = phase == "between_renames", []
    run = Run(cfg, fault=lambda name: os._exit(9) if armed and name == phase else None).train(2)
    assert run.save()
    run.train(0 if repeated else 2)
    armed.append(1)
    assert in_child(lambda: save(run)) == 9
    survivor = Run(cfg)
    survivor.load()
    assert survivor.state.iteration in ((2,) if repeated else (2, 4))
    assert survivor.bits() == snapshots[survivor.state.iteration]
    assert survivor.train(1).save()
    assert not [p for p in Path(cfg.checkpoint.save).glob(".*") if p.name != ".lock"], "the next save cleans up"
    return survivor


@pytest.mark.parametrize("phase", PHASES)
def test_death_at_any_phase_leaves_the_old_or_the_new_checkpoint(tmp_path, phase, snapshots):
    cfg = settings(tmp_path, save_retain_interval=10)
    survivor = outlive_death(cfg, phase, Run.save, snapshots)
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
            run.checkpointer._written.clear()
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

    def full(file, *blocks):
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
    """The operating system itself reports the error."""
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


def test_foreign_lock_files_are_not_changed(tmp_path):
    """A link planted as .lock must not have a job cut or write the file that it points to."""
    victim, save = tmp_path / "victim", tmp_path / "save"
    victim.write_text("precious")
    lock = save / ".lock"
    save.mkdir()
    open_files = len(os.listdir("/proc/self/fd"))
    for make in (
        lambda: lock.symlink_to(victim), lambda: os.link(victim, lock), lambda: os.mkfifo(lock), lock.mkdir,
        lambda: lock.write_text("notes"), lambda: lock.symlink_to(tmp_path / "new"),
    ):  # fmt: skip
        make()
        with pytest.raises(CheckpointError, match="choose another"):
            SaveLock(save)
        assert victim.read_text() == "precious" and not (tmp_path / "new").exists()
        assert not lock.is_file() or lock.is_symlink() or lock.read_text() in ("notes", "precious")
        lock.rmdir() if lock.is_dir() and not lock.is_symlink() else lock.unlink()
    assert len(os.listdir("/proc/self/fd")) == open_files
    SaveLock(save).release()
    lock.write_text('{"host": "' + "x" * 300)
    retained = SaveLock(save)
    assert json.loads(lock.read_text()[:200])["pid"] == os.getpid()
    retained.release()


def test_a_folder_to_which_nothing_was_written_is_left_as_it_was_found(tmp_path):
    SaveLock(tmp_path / "a" / "b").release()
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    retained, file = SaveLock(tmp_path / "a"), tmp_path / "a" / "file"
    assert in_child(lambda: SaveLock(tmp_path / "a") and 0) == 70
    assert file.with_name(".lock").exists(), "another job's lock stays"
    file.touch()
    retained.release()
    assert {path.name for path in file.parent.iterdir()} == {".lock", "file"}


def test_lock_that_its_holder_removes_is_acquired_again(tmp_path, monkeypatch):
    take, first = SaveLock._take, []

    def late(self, descriptor, folder):
        if not first:
            first.append((tmp_path / ".lock").unlink())
        take(self, descriptor, folder)

    monkeypatch.setattr(SaveLock, "_take", late)
    retained = SaveLock(tmp_path)
    assert os.fstat(retained._descriptor).st_ino == (tmp_path / ".lock").stat().st_ino
    retained.release()


# ---- trackers


BAD_TRACKERS = [b"", b"\n", b"abc", b"-5", b"\xff\xfe", b"7", b"99999999999999999999", b"1.5", b"2" * 5000, None]


@pytest.mark.parametrize("content", BAD_TRACKERS)
def test_a_bad_tracker_falls_back_to_the_newest_checkpoint(two, content, caplog):
    logging.getLogger("megatron").propagate = True
    (two / TRACKER).unlink()
    if content is not None:
        (two / TRACKER).write_bytes(content)
    with caplog.at_level(logging.WARNING, "megatron"):
        assert find_checkpoint(two).iteration == 2
    assert TRACKER in caplog.text or "iter_0000007" in caplog.text
    for iteration in (1, 2):
        shutil.rmtree(two / f"iter_000000{iteration}")
    if content is None:
        assert find_checkpoint(two) is None
    else:
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            find_checkpoint(two)


def test_a_tracker_that_is_no_small_file_is_not_read(two, tmp_path_factory, caplog):
    """A pipe would hang every start, a device or a huge file fill the memory."""
    tracker, elsewhere = two / TRACKER, tmp_path_factory.mktemp("elsewhere")
    tracker.rename(elsewhere / "tracker")
    for make in (
        lambda: os.mkfifo(tracker), lambda: tracker.symlink_to("/dev/zero"), tracker.mkdir,
        lambda: tracker.symlink_to(tracker), lambda: os.truncate(tracker, 2**40) if tracker.touch() is None else None,
    ):  # fmt: skip
        make()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "megatron"):
            assert find_checkpoint(two).iteration == 2
        assert len(caplog.records) == 1 and str(tracker) in caplog.text
        tracker.rmdir() if tracker.is_dir() and not tracker.is_symlink() else tracker.unlink()
    tracker.symlink_to(elsewhere / "tracker")
    assert read_tracker(two) == 2, "a link to a tracker is one"


def test_a_tracker_that_was_set_back_is_believed_with_a_warning(two, caplog):
    (two / TRACKER).write_text("1")
    with caplog.at_level(logging.WARNING, "megatron"):
        run = Run(settings(two))
        assert run.load().iteration == 1
    assert "newest complete checkpoint there is of iteration 2" in caplog.text and "--ckpt-step 2" in caplog.text
    newer = (two / "iter_0000002" / "metadata.json").read_bytes()
    assert run.train(1).save()
    assert (two / "set-aside-001" / "iter_0000002" / "metadata.json").read_bytes() == newer
    assert Run(settings(two)).load().iteration == 2
    run.train(1).save()
    assert not (two / "set-aside-002").exists(), "a run's own checkpoints stay"


def test_line_ends_in_a_tracker_do_not_matter(two):
    (two / TRACKER).write_bytes(b" 1\r\n")
    assert find_checkpoint(two).iteration == read_tracker(two) == 1


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "bytes of a shard": (lambda d: flip(d / "optimizer_00000.safetensors", -3), "optimizer_0.*: optimizer.*is damaged"),
    "header of a shard": (lambda d: flip(d / "model_00000.safetensors", 20), "model_00000.*header is damaged"),
    "manifest": (lambda d: flip(d / "metadata.json", 300), "metadata.json: damaged"),
    "no manifest": (lambda d: (d / "metadata.json").unlink(), "metadata.json is missing"),
    "no shard": (lambda d: (d / "rng_00000.safetensors").unlink(), "rng_00000.safetensors is missing"),
    "shard cut": (lambda d: os.truncate(d / "rng_00000.safetensors", 100), "rng_00000.safetensors has 100 bytes"),
}


@pytest.mark.parametrize("damage, words", DAMAGE.values(), ids=DAMAGE.keys())
def test_any_damage_to_the_newest_is_rejected_and_kept(two, damage, words):
    """One rule for all of it; who then takes an earlier one overwrites no evidence."""
    damage(two / "iter_0000002")
    evidence = {path.name: path.read_bytes() for path in (two / "iter_0000002").iterdir() if path.is_file()}
    with pytest.raises(CheckpointDamagedError, match=f"{words}.*--ckpt-step 1"):
        Run(settings(two)).load()
    run = Run(settings(two, ckpt_step=1))
    assert run.load().iteration == 1 and run.train(1).save()
    retained = two / "set-aside-001" / "iter_0000002"
    assert {path.name: path.read_bytes() for path in retained.iterdir() if path.is_file()} == evidence
    assert Run(settings(two)).load().iteration == 2


def test_the_earlier_checkpoint_that_is_named_is_complete(tmp_path):
    run = Run(settings(tmp_path))
    for _ in range(3):
        run.train(1).save()
    flip(tmp_path / "iter_0000003" / "model_00000.safetensors", -3)
    (tmp_path / "iter_0000002" / "model_00000.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match="--ckpt-step 1 "):
        Run(settings(tmp_path)).load()
    with pytest.raises(CheckpointError, match="another architecture") as caught:
        Run(settings(tmp_path, ckpt_step=1, num_layers=3)).load()
    assert "--ckpt-step" not in str(caught.value), "an earlier one does not fit either"


def test_a_renamed_checkpoint_is_rejected(two):
    (two / "iter_0000002").rename(two / "iter_0000009")
    (two / TRACKER).write_text("9")
    with pytest.raises(CheckpointError, match="of iteration 2: it was renamed"):
        Run(settings(two)).load()
