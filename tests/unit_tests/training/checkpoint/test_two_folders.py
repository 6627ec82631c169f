"""A fast folder in addition to --save: the newest checkpoint of both is loaded; the last K; one checkpoint by name."""

import logging
import shutil

import pytest

from megatron.core.dist_checkpointing import CheckpointError, writer
from megatron.training.checkpoint import checkpointer
from megatron.training.checkpoint.files import find_checkpoint, read_tracker, saved_iterations
from megatron.training.checkpoint.history import check_save_folder, fast_folder, find_resumable
from megatron.training.checkpoint.lock import SaveLock
from megatron.training.checkpoint.settings import apply_checkpoint_args
from megatron.training.rules.checkpoints import non_persistent_folder
from megatron.training.rules.run_all import unmet_requirements
from tests.test_utils.checkpointed_run import Run, settings


def both(tmp_path, **changes):
    """Settings of a run that saves to two folders."""
    folder = str(tmp_path / "fast")
    changes = {"non_persistent_save_interval": 1, "non_persistent_global_ckpt_dir": folder, **changes}
    return settings(tmp_path / "slow", **changes)


def start(cfg):
    """A run as the program starts it."""
    check_save_folder(cfg)
    run = Run(cfg)
    run.load()
    return run


def save_fast(run):
    assert run.checkpointer.start_save(run.state, fast=True).saved


@pytest.fixture
def run(tmp_path):
    """Saved at 1 and 3 to the slow folder, at 2 and 4 to the fast one."""
    run = start(both(tmp_path))
    for iteration in range(1, 5):
        run.train(1)
        run.save() if iteration % 2 else save_fast(run)
    yield run
    run.checkpointer.close()


def test_the_fast_folder_keeps_one_and_the_newest_of_both_is_loaded(run, tmp_path, snapshots):
    assert saved_iterations(tmp_path / "slow") == [3, 1] and saved_iterations(tmp_path / "fast") == [4]
    run.checkpointer.close()
    repeated = start(both(tmp_path))
    assert repeated.state.iteration == 4 and repeated.bits() == snapshots[4]
    repeated.train(1).save()
    assert saved_iterations(tmp_path / "slow") == [5, 3, 1], "what was there is of the same history"
    assert saved_iterations(tmp_path / "fast") == [4] and not list(tmp_path.glob("*/set-aside*"))
    repeated.checkpointer.close()
    assert start(both(tmp_path)).state.iteration == 5


def test_the_fast_folder_is_below_save_else_below_load():
    cfg = settings()
    assert fast_folder(cfg.checkpoint) is None
    for inputs, base in (({"save": "a"}, "a"), ({"save": "a", "load": "b"}, "a"), ({"load": "b"}, "b")):
        assert fast_folder(cfg.with_settings(**inputs).checkpoint) == f"{base}/non_persistent"


def test_a_load_restores_a_checkpoint_whose_replacement_was_interrupted(run, tmp_path):
    newest = tmp_path / "slow/iter_0000003"
    newest.rename(tmp_path / f"slow/.{newest.name}{writer.REPLACED}")
    cfg = both(tmp_path, ckpt_step=3)
    with pytest.raises(CheckpointError, match="--ckpt-step 3"):
        find_resumable(cfg.checkpoint)
    assert find_resumable(cfg.checkpoint, repair=True).iteration == 3 and newest.is_dir()


def test_it_is_loaded_without_the_interval_too_and_under_save_by_default(tmp_path):
    run = start(settings(tmp_path, non_persistent_save_interval=1))
    save_fast(run.train(3))
    assert saved_iterations(tmp_path / "non_persistent") == [3]
    assert start(settings(tmp_path, save=None)).state.iteration == 3
    inputs = apply_checkpoint_args(settings(tmp_path, use_checkpoint_args=True, hidden_size=None))
    assert inputs.model.hidden_size == 8
    with pytest.raises(CheckpointError, match="holds checkpoints up to iteration 3"):
        check_save_folder(settings(tmp_path, load=None))


def test_a_step_is_found_in_either_and_sets_newer_ones_of_both_aside(run, tmp_path):
    run.checkpointer.close()
    assert start(both(tmp_path, save=None, ckpt_step=4)).state.iteration == 4
    repeated = start(both(tmp_path, ckpt_step=1))
    assert repeated.state.iteration == 1
    repeated.train(1).save()
    assert saved_iterations(tmp_path / "slow") == [2, 1] and saved_iterations(tmp_path / "fast") == []
    assert saved_iterations(tmp_path / "slow/set-aside-001") == [3]
    assert saved_iterations(tmp_path / "fast/set-aside-001") == [4]


def test_a_fast_one_that_is_damaged_or_cut_short_is_passed_over(run, tmp_path, caplog):
    next((tmp_path / "fast/iter_0000004").glob("model*")).write_bytes(b"short")
    run.checkpointer.close()
    with caplog.at_level(logging.WARNING, "megatron"):
        assert start(both(tmp_path)).state.iteration == 3
    assert "not loaded" in caplog.text and "iter_0000004" in caplog.text


def test_a_slow_one_that_is_damaged_gives_way_to_a_newer_fast_one_only(run, tmp_path):
    next((tmp_path / "slow/iter_0000003").glob("model*")).write_bytes(b"short")
    run.checkpointer.close()
    assert find_checkpoint(tmp_path / "fast").iteration == 4 == start(both(tmp_path, save=None)).state.iteration
    shutil.rmtree(tmp_path / "fast")
    with pytest.raises(CheckpointError, match="iter_0000003.*--ckpt-step 1"):
        start(both(tmp_path, save=None))


def test_the_fast_folder_of_another_run_is_rejected_and_never_loaded(run, tmp_path):
    run.checkpointer.close()
    shutil.rmtree(tmp_path / "slow")
    with pytest.raises(CheckpointError, match="fast: holds checkpoints that do not belong to --save .*--start-over"):
        check_save_folder(both(tmp_path))
    assert Run(both(tmp_path, save=None)).load() is None
    repeated = start(both(tmp_path, load=None, start_over=True))
    assert repeated.state.iteration == 0
    save_fast(repeated.train(1))
    assert saved_iterations(tmp_path / "fast") == [1] and saved_iterations(tmp_path / "fast/set-aside-001") == [4]


def test_two_jobs_share_neither_folder(run, tmp_path):
    with pytest.raises(CheckpointError, match="non-persistent-save-interval .*fast: another job"):
        in_another_process(tmp_path / "fast")


def in_another_process(folder):
    """POSIX locks do not keep a process from itself."""
    import multiprocessing as mp

    with mp.get_context("fork").Pool(1) as pool:
        pool.apply(SaveLock, (folder, "the folder of --non-persistent-save-interval"))


def test_a_slow_folder_that_fails_counts_although_the_fast_one_works(tmp_path, monkeypatch):
    run, write_file = start(both(tmp_path)), writer.write_file
    run.train(1)

    def fill(folder):
        def full(path, data):
            if folder in str(path):
                raise OSError(28, "No space left on device")
            write_file(path, data)

        monkeypatch.setattr(writer, "write_file", full)

    fill("/slow/")
    for count in (1, 2):
        assert not run.save() and run.checkpointer.failed_saves == count
        save_fast(run)
    monkeypatch.undo()
    assert run.save() and run.checkpointer.failed_saves == 0
    fill("/fast/")
    assert not run.checkpointer.start_save(run.state, fast=True).saved and run.checkpointer.failed_saves == 1
    monkeypatch.undo()
    save_fast(run)
    assert run.checkpointer.failed_saves == 0


def test_local_folders_are_for_one_host(tmp_path, monkeypatch):
    local = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": str(tmp_path / "near")}
    save_fast(start(both(tmp_path, **local)).train(1))
    assert saved_iterations(tmp_path / "near") == [1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(CheckpointError, match="several hosts.*--non-persistent-ckpt-type global"):
        Run(both(tmp_path, **local))
    [problem] = unmet_requirements(both(tmp_path, non_persistent_ckpt_type="local"))
    assert "needs --non-persistent-local-ckpt-dir" in str(problem)
    (tmp_path / "link").symlink_to(tmp_path / "slow")
    for name in ("slow/", "link"):
        [problem] = non_persistent_folder(both(tmp_path, non_persistent_global_ckpt_dir=f"{tmp_path}/{name}"))
        assert "is the folder of --save" in str(problem)


@pytest.mark.parametrize("retain, left", [(None, [7, 6, 5]), (2, [7, 6, 5, 4, 2])])
def test_the_last_k_stay_over_several_jobs(tmp_path, retain, left):
    for target in (4, 7):
        run = Run(settings(tmp_path, keep_last_checkpoints=3, save_retain_interval=retain))
        run.load()
        while run.state.iteration < target:
            run.train(1).save()
        run.checkpointer.close()
    assert saved_iterations(tmp_path) == left and read_tracker(tmp_path) == 7


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, caplog):
    """The new one is complete, and --max-failed-saves does not count it."""
    run = Run(settings(tmp_path, keep_last_checkpoints=1))
    run.train(1).save()

    def moved_away(folder, iteration, fault):
        raise FileNotFoundError(f"{folder}: no iteration {iteration}")

    monkeypatch.setattr(checkpointer, "delete_checkpoint", moved_away)
    run.train(1)
    assert run.save() is True and run.checkpointer.failed_saves == 0 and read_tracker(tmp_path) == 2
    assert "checkpoint of iteration 1 is not deleted" in caplog.text


def test_older_checkpoints_of_a_job_that_kept_all_stay(tmp_path):
    for jobs, retention in ((range(1, 5), {}), (range(5, 7), {"keep_last_checkpoints": 2})):
        run = Run(settings(tmp_path, **retention))
        run.load()
        for _ in jobs:
            run.train(1).save()
        run.checkpointer.close()
    assert saved_iterations(tmp_path) == [6, 5, 2, 1]


def test_one_checkpoint_can_be_named(two, tmp_path, snapshots):
    run = Run(settings(two, load=f"{two}/iter_0000001", save=None))
    assert run.load().iteration == 1 and run.bits() == snapshots[1]
    cfg = settings(two, load=f"{two}/iter_0000001/")
    check_save_folder(cfg)
    run = start(cfg)
    run.train(2).save()
    assert saved_iterations(two) == [3, 1] and saved_iterations(two / "set-aside-001") == [2], "as with --ckpt-step 1"
    assert Run(settings(load=None, pretrained_checkpoint=f"{two}/iter_0000003")).load().iteration == 0
    with pytest.raises(CheckpointError, match="iter_0000009: no checkpoint"):
        Run(settings(load=f"{two}/iter_0000009")).load()
