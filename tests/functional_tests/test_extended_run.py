"""A finished run is extended with a larger --train-iters and one flag, which the message names."""

import pytest

from tests.test_utils.gpt_runs import read_records, train, train_with_errors

FLAGS = "--mock-data --lr-decay-style linear --min-lr 1e-4 --lr-warmup-iters 0 --eval-iters 0 --num-layers 1"
KEEP, STRETCH = "--use-checkpoint-opt_param-scheduler", "--override-opt_param-scheduler"


def rates(folder):
    return [item["learning_rate"] for item in read_records(folder / "metrics.jsonl") if item["kind"] == "train"]


@pytest.fixture
def finished(gloo_pool, tmp_path):
    """A complete run of four iterations, and the flags that continue it."""
    argv = [*FLAGS.split(), "--save", str(tmp_path), "--load", str(tmp_path)]
    assert gloo_pool.run(train, 1, [*argv, "--train-iters", "4"]) == [0]
    return tmp_path, [*argv, "--train-iters", "8"]


def test_extending_without_a_flag_names_both_flags_and_their_learning_rates(gloo_pool, finished):
    folder, argv = finished
    ((code, message),) = gloo_pool.run(train_with_errors, 1, argv)
    assert code == 2 and "decays over 64 samples, in the checkpoint over 32; to continue, add one of two" in message
    assert f"{STRETCH} decays over the new length: at sample 32 the rate is 0.00505 instead of 0.0001," in message
    assert f"{KEEP} keeps the stored schedule: the rate ends at 0.0001" in message and len(rates(folder)) == 4


@pytest.mark.parametrize("flag, expected", [(KEEP, [1e-4] * 4), (STRETCH, [0.00505, 0.0038125, 0.002575, 0.0013375])])
def test_one_flag_extends_the_run(gloo_pool, finished, flag, expected):
    folder, argv = finished
    before = rates(folder)
    assert gloo_pool.run(train, 1, [*argv, flag]) == [0]
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "8"
    assert rates(folder)[:4] == before and rates(folder)[4:] == pytest.approx(expected)


def test_other_changes_of_the_schedule_keep_the_full_list(gloo_pool, finished):
    _, argv = finished
    ((code, message),) = gloo_pool.run(train_with_errors, 1, [*argv, "--lr", "2e-2"])
    assert code == 2 and "max_lr: checkpoint 0.01, now 0.02" in message and "lr_decay_steps" in message
