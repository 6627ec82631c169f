"""The torture programs must not call a failure a success: what they look for, planted."""

import json
import random

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, save
from tests.torture import common, faults, flips, odd_flags
from tests.torture.common import Failure

OBJECTS = {"iteration": 2, "train_state": {"iteration": 2}, "optimizer": {"step": 2}, "scheduler": {}}


def write_run(folder, weight=1.0, loss=4.0, objects=OBJECTS):
    """Write the files of a finished run, reduced to one weight and one record."""
    tensor = torch.full((2,), weight, dtype=torch.float64)
    save({"w": ShardedTensor("model.w", tensor, (2,), (0,))}, folder / "iter_0000002", objects=objects)
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "train", "iteration": 2, "lm loss": loss}) + "\n")
    return folder


@pytest.mark.parametrize("change", [
    {"weight": 1.0 + 2**-52}, {"loss": 4.0 + 2**-50}, {"objects": {**OBJECTS, "train_state": {"iteration": 3}}},
], ids=["weight", "loss", "counter"])  # fmt: skip
def test_the_last_bit_of_a_run_is_compared(tmp_path, change):
    reference, same, other = (tmp_path / name for name in ("reference", "same", "other"))
    write_run(reference)
    assert common.compare_runs(write_run(same), reference, 2) == ""
    assert common.compare_runs(write_run(other, **change), reference, 2)


@pytest.mark.parametrize("name, value", [("weight", 1.0), ("loss", 4.0)])
def test_a_tolerance_lets_small_differences_pass_only(tmp_path, name, value):
    reference, near, far = (tmp_path / folder for folder in ("reference", "near", "far"))
    write_run(reference)
    assert common.compare_runs(write_run(near, **{name: value * (1 + 1e-12)}), reference, 2, tolerance=1e-9) == ""
    assert common.compare_runs(write_run(far, **{name: value * (1 + 1e-6)}), reference, 2, tolerance=1e-9)


def station(tmp_path, **change):
    """A damaged run's place and the undamaged end."""
    place, end = tmp_path / "place", tmp_path / "end"
    (end / "log").mkdir(parents=True)
    (end / "log" / "rank0").write_text("iteration 1\n")
    for folder, changes in ((place, change), (end, {})):
        save_folder = folder / "save"
        write_run(save_folder, **changes)
        (save_folder / "iter_0000002").rename(save_folder / f"iter_{flips.ITERATIONS:07d}")
    return place, end


def test_verdicts_of_damage(tmp_path):
    place, end = station(tmp_path)
    path = place / "data" / "a.idx"
    assert flips.verdict(0, "iteration 1\n", path, (place, end)) == "harmless"
    assert flips.verdict(0, f"iteration 1\n{path}: rebuilt\n", path, (place, end)) == "noticed, went on"
    assert flips.verdict(1, f"error: {path} is damaged\n", path, (place, end)) == "noticed"
    for code, output in [(None, ""), (1, "Traceback (most recent call last)"), (1, "error: something is damaged\n")]:
        with pytest.raises(Failure):
            flips.verdict(code, output, path, (place, end))


def test_a_silent_difference_is_a_failure(tmp_path):
    place, end = station(tmp_path, weight=1.5)
    assert flips.verdict(0, "", place / "data" / "a.bin", (place, end)) == "token changed"
    with pytest.raises(Failure, match="silent difference"):
        flips.verdict(0, "", place / "data" / "a.idx", (place, end))


def test_verdicts_of_odd_values():
    judge = odd_flags.judge
    assert judge("--lr", ["x"], 2, "pretrain_gpt.py: 1 problem\n  --lr x: is not a number\n", 10) == "refused"
    assert judge("--lr", ["1"], 0, "", 10) == "accepted"
    for code, output in [(None, ""), (1, "Traceback"), (-11, ""), (1, "error: something\n"), (2, "  --seed x: no\n")]:
        with pytest.raises(Failure):
            judge("--lr", ["x"], code, output, 10)


class Ended:
    def __init__(self, *codes):
        self.codes = dict(enumerate(codes))


def test_verdicts_of_faults():
    judge = faults.judge
    assert judge(faults.FullDisk, Ended(0), "") == "finished"
    assert judge(faults.FullDisk, Ended(75), "saving failed") == "ended with 75"
    for kind, codes, output in [(faults.FullDisk, [1], ""), (faults.FullDisk, [0], "Traceback"),
                                (faults.FullDisk, [-7], "error"), (faults.StoppedForAWhile, [1], "error")]:  # fmt: skip
        with pytest.raises(Failure):
            judge(kind, Ended(*codes), output)


def test_a_flip_is_one_bit_and_can_be_repeated():
    data = bytes(range(256))
    changed, what = flips.flip_bit(data, random.Random("1/7"))
    assert (changed, what) == flips.flip_bit(data, random.Random("1/7"))
    assert sum(bin(a ^ b).count("1") for a, b in zip(data, changed)) == 1
