"""One --save folder holds one history of a run: nothing in it is overwritten by another."""

import logging
import shutil

import pytest

from megatron.core.dist_checkpointing import CheckpointError
from megatron.training.checkpoint import history
from megatron.training.checkpoint.files import saved_iterations
from megatron.training.checkpoint.history import check_save_folder
from tests.test_utils.checkpointed_run import TRACKER, Run, settings


def test_a_used_save_folder_is_rejected_without_load(two, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        check_save_folder(settings(save=str(two)))
    for words in (f"--save {two}", "iteration 2", f"--load {two}", "--start-over", "set-aside-001"):
        assert words in str(caught.value)
    check_save_folder(settings(two))
    check_save_folder(settings(two, ckpt_step=1))
    check_save_folder(settings(save=str(two), start_over=True))
    check_save_folder(settings(save=str(two), skip_train=True))
    check_save_folder(settings(save=str(tmp_path / "new")))
    check_save_folder(settings(load=str(two)))


def test_a_used_save_folder_is_rejected_with_another_load(two, tmp_path):
    """Fine-tuning that is started a second time, and a branch into a folder that holds another one."""
    other = tmp_path / "other"
    Run(settings(other)).train(1).save()
    with pytest.raises(CheckpointError, match="--start-over"):
        check_save_folder(settings(save=str(two), load=str(other)))
    with pytest.raises(CheckpointError, match=f"--load {two} --pretrained-checkpoint {other} without --finetune"):
        check_save_folder(settings(save=str(two), load=str(other), finetune=True))
    with pytest.raises(CheckpointError, match="without --finetune"):
        check_save_folder(settings(two, finetune=True))
    with pytest.raises(CheckpointError, match="--start-over"):
        check_save_folder(settings(save=str(two), load=str(tmp_path / "missing")))


def test_a_copy_of_a_checkpoint_continues_where_it_was_written(two, tmp_path, monkeypatch):
    """Staged to a local disk and loaded from there."""
    shutil.copytree(two, tmp_path / "staged", ignore=shutil.ignore_patterns(".lock"))
    cfg = settings(save=str(two), load=str(tmp_path / "staged"))
    check_save_folder(cfg)
    run = Run(cfg)
    run.load()
    assert run.train(1).save()
    assert saved_iterations(two) == [3, 2, 1] and not (two / "set-aside-001").exists()
    (tmp_path / "link").symlink_to(two)
    check_save_folder(settings(save=str(two), load=str(tmp_path / "link")))
    monkeypatch.chdir(two)
    check_save_folder(settings(save=str(two), load="."))


def test_weights_to_start_from_are_not_in_the_way(two):
    (two / "iter_0000002").rename(two / "release")
    shutil.rmtree(two / "iter_0000001")
    (two / TRACKER).write_text("release")
    for changes in ({}, {"finetune": True}):
        check_save_folder(settings(two, **changes))
    with pytest.raises(CheckpointError, match=f"holds release and {TRACKER}"):
        check_save_folder(settings(save=str(two)))
    run = Run(settings(two))
    assert run.load().iteration == 0 and run.train(1).save()
    assert (two / "release").is_dir() and saved_iterations(two) == [1]


def test_starting_over_loses_nothing(two, caplog):
    before = {path.relative_to(two): path.read_bytes() for path in two.rglob("*") if path.is_file()}
    run = Run(settings(save=str(two), start_over=True))
    assert run.load() is None
    assert {path.name for path in two.iterdir()} == {"iter_0000001", "iter_0000002", TRACKER, ".lock"}
    with caplog.at_level(logging.WARNING, "megatron"):
        assert run.train(1).save()
    assert "set-aside-001" in caplog.text
    for name, content in before.items():
        assert name.name == ".lock" or (two / "set-aside-001" / name).read_bytes() == content
    assert saved_iterations(two) == [1] and (two / TRACKER).read_text() == "1"
    assert Run(settings(two)).load().iteration == 1
    repeated = Run(settings(save=str(two), start_over=True)).train(2)
    assert repeated.save() and saved_iterations(two) == [2]
    assert saved_iterations(two / "set-aside-002") == [1]


def test_rollback_keeps_abandoned_records(two):
    run = Run(settings(two, ckpt_step=1))
    run.load()
    assert saved_iterations(two) == [2, 1], "nothing moves before there is something new"
    run.train(1)
    assert run.save() and run.train(1).save()
    assert saved_iterations(two) == [3, 2, 1] and saved_iterations(two / "set-aside-001") == [2]


def test_where_checkpoints_were_moved_to_outlives_a_loss_of_power(two, monkeypatch):
    synced = []
    monkeypatch.setattr(history, "fsync_path", synced.append)
    history.set_aside(str(two), 1)
    assert synced == [two, two / "set-aside-001", two]
