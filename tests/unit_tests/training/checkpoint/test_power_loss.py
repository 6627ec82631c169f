"""A power loss during a save leaves the old or the new checkpoint; after a finished save, the new one."""

import os
import time
from pathlib import Path
from unittest import mock

import pytest

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import CheckpointReader
from megatron.training.checkpoint.files import find_checkpoint, read_tracker, saved_iterations
from megatron.training.checkpoint.history import find_resumable
from tests.test_utils.checkpointed_run import TRACKER, Run, settings
from tests.test_utils.power_loss import PowerLoss


def iterations(folder):
    """Return the iterations of the visible checkpoints; assert that each is complete."""
    result = saved_iterations(folder)
    for iteration in result:
        reader = CheckpointReader(folder / f"iter_{iteration:07d}")
        reader.verify()
        assert reader.objects["iteration"] == iteration
    return result


def complete(folder, promise=None):
    """Every checkpoint that is visible is whole; the tracker names one of them, not older than ``promise``."""
    if not folder.is_dir():
        assert promise is None, "the folder itself is gone"
        return
    result = find_checkpoint(folder, repair=True)
    iterations(folder)
    if (folder / TRACKER).exists():
        assert read_tracker(folder) == result.iteration, "what the tracker names is there"
    assert promise is None or (result.iteration >= promise and (folder / TRACKER).exists())


@pytest.fixture
def watch(tmp_path, tmp_path_factory):
    """``watch(check)`` records what happens in the parent of the folders ``slow`` and ``fast``."""

    def watched(check=lambda folder, promise: complete(folder / "slow", promise)):
        return PowerLoss(tmp_path, tmp_path_factory.mktemp("states"), check).recording()

    return watched


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_checkpoint_is_durable_before_the_tracker_names_it(tmp_path, tmp_path_factory, watch, background):
    tokenizer = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.write_text("{}")
    with watch() as power:
        cfg = settings(tmp_path / "slow", tokenizer_model=str(tokenizer), async_save=background)
        run = Run(cfg).train(1)
        for iteration in (1, 2):
            report = run.checkpointer.start_save(run.state, background=background)
            report = run.checkpointer.finish_save(wait=True) if background else report
            assert report.saved
            power.promise = iteration
            run.train(1)
    run.checkpointer.close()
    assert power.num_states > 30


def test_a_checkpoint_that_replaces_another_is_durable_before_that_is_deleted(tmp_path, watch):
    run = Run(settings(tmp_path / "slow")).train(2)
    assert run.save()
    with watch() as power:
        power.promise = 2
        assert run.save()
    assert power.num_states > 15


def test_a_checkpoint_is_never_seen_half_deleted(tmp_path, watch):
    run = Run(settings(tmp_path / "slow", keep_last_checkpoints=1)).train(1)
    assert run.save()
    with watch() as power:
        power.promise = 1
        assert run.train(1).save()
        power.promise = 2
    assert saved_iterations(tmp_path / "slow") == [2] and power.num_states > 20


def test_a_checkpoint_of_the_fast_folder_is_found_by_its_run(tmp_path, watch):
    cfg = settings(
        tmp_path / "slow", non_persistent_save_interval=1, non_persistent_global_ckpt_dir=str(tmp_path / "fast")
    )

    def check(folder, promise):
        complete(folder / "slow")
        complete(folder / "fast")
        local = settings(folder / "slow", non_persistent_global_ckpt_dir=str(folder / "fast"))
        result = find_resumable(local.checkpoint, repair=True)
        assert promise is None or result.iteration >= promise

    with watch(check) as power:
        run = Run(cfg).train(1)
        for _ in range(2):
            assert run.checkpointer.start_save(run.state, fast=True).saved
            power.promise = run.state.iteration
            run.train(1)
    assert power.num_states > 30


@pytest.mark.parametrize("changes", [{"load": None, "start_over": True}, {"ckpt_step": 1}], ids=["all", "newer"])
def test_checkpoints_that_are_set_aside_are_not_lost(tmp_path, watch, changes):
    run = Run(settings(tmp_path / "slow"))
    for _ in range(3):
        assert run.train(1).save()
    run.checkpointer.close()

    def check(folder, promise):
        places = [folder / "slow", *(folder / "slow").glob("set-aside-*")]
        assert {1, 2, 3} <= {iteration for place in places for iteration in iterations(place)}
        if promise is not None:
            complete(folder / "slow", promise)
            assert saved_iterations(folder / "slow")[0] == promise, "no checkpoint of the history that was left"

    with watch(check) as power:
        repeated = Run(settings(tmp_path / "slow", **changes))
        repeated.load()
        repeated.train(1)
        assert repeated.save()
        power.promise = repeated.state.iteration
    assert power.num_states > 20


def ranks_save(rank, world, folder):
    """Return (call, path, begin, end) of this rank's syncs and renames; rank 1 has a slow disk."""
    parallel_state.initialize_model_parallel()
    calls = []

    def noted(name, path_of):
        function = getattr(os, name)

        def call(*args):
            path, begin = path_of(args), time.monotonic()
            function(*args)
            calls.append((name, path, begin, time.monotonic()))

        return mock.patch.object(os, name, call)

    def fault(phase):
        if rank == 1 and phase in ("mid_shard", "before_fsync"):
            time.sleep(0.05)

    run = Run(settings(folder), parallel_state.get_process_groups(), fault=fault).train(1)
    with (
        noted("fsync", lambda args: os.readlink(f"/proc/self/fd/{args[0]}")),
        noted("rename", lambda args: str(args[1])), noted("replace", lambda args: str(args[1])),
    ):  # fmt: skip
        assert run.save()
    run.checkpointer.close()
    return calls


def test_files_of_all_ranks_are_durable_before_the_first_rank_publishes_them(gloo_pool, tmp_path):
    ranks = gloo_pool.run(ranks_save, 3, tmp_path)
    calls = sorted((item for calls in ranks for item in calls), key=lambda call: call[3])
    [(_, _, published, end_of_rename)] = [item for item in calls if item[1] == f"{tmp_path}/iter_0000001"]
    [(_, _, moved, end_of_move)] = [item for item in calls if item[:2] == ("replace", f"{tmp_path}/{TRACKER}")]
    synced = {Path(path).name: end for name, path, _, end in calls if name == "fsync"}
    files = {path.name for path in (tmp_path / "iter_0000001").iterdir()}
    assert len(files) > 6 and all(synced[name] < published for name in files), "files, before the rename"
    for rank, local in enumerate(ranks):
        last = max(end for name, path, _, end in local if path.endswith(f"_{rank:05d}.safetensors"))
        assert any(name == "fsync" and ".iter_0000001.tmp-" in Path(path).name and last <= begin < published
                   for name, path, begin, _ in local), "their names"  # fmt: skip
    parent = [(begin, end) for name, path, begin, end in ranks[0] if path == str(tmp_path)]
    assert any(end_of_rename <= begin and end <= moved for begin, end in parent), "the new name, before the tracker"
    assert any(end_of_move <= begin for begin, _ in parent), "the tracker's"
