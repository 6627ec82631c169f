"""Wrong paths and folders are found together with wrong flags, before torch is imported."""

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import manifest
from megatron.core.schedules.learning_rate import schedule_plan
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.stored_settings import config_to_dict

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 2 --lr 1e-3 --train-iters 4"
)
NULL = "--tokenizer-type NullTokenizer --vocab-size 100"


@pytest.fixture
def problems_of(python_without_torch, tmp_path):
    """Run pretrain_gpt.py where importing torch ends the program; return the lines of stderr."""
    (tmp_path / "without" / "torch").mkdir(parents=True)
    (tmp_path / "without" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "used" / "iter_0000007").mkdir(parents=True)

    def run(flags):
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'without'}{os.pathsep}{ROOT}"}
        command = [python_without_torch, str(ROOT / "pretrain_gpt.py"), *f"{TINY} {flags}".split()]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 2 and "torch was imported" not in result.stderr, result.stderr
        return result.stderr

    return run


@pytest.mark.parametrize("flags, expected", [
    (f"{NULL} --data-path nope", ["no data set at nope"]),
    (f"{NULL} --data-path nope --save used", ["no data set at nope", "--save used: holds checkpoints up to iteration"]),
    (f"{NULL} --data-path nope --save used --hidden-size 33",
     ["--hidden-size 33", "no data set at nope", "--save used"]),
    ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model nope --mock-data", ["--tokenizer-model nope"]),
    (f"{NULL} --mock-data --load nope --exit-on-missing-checkpoint", ["--load nope: there is no such folder"]),
    (f"{NULL} --mock-data --pretrained-checkpoint nope --wandb-project x --save used",
     ["--pretrained-checkpoint nope: there is no such folder", "--wandb-exp-name: is required", "--save used"]),
    ("--load-hf nope --mock-data --save used", ["--load-hf nope: there is no such folder", "--save used"]),
    (f"{NULL} --mock-data --load without --exit-on-missing-checkpoint", ["--load without: holds no checkpoint"]),
    ("--use-checkpoint-args --load nope --exit-on-missing-checkpoint --mock-data", ["--load nope: there is no"]),
])  # fmt: skip
def test_all_problems_are_found_without_torch(problems_of, flags, expected):
    errors = problems_of(flags)
    assert all(item in errors for item in expected) and f"{len(expected)} problem" in errors, errors


def write_checkpoint(folder, flags, iteration=3, tokenizer="", **objects):
    """Write a checkpoint without tensors that a run with these flags could have saved."""
    cfg = validate_args(parse_args(f"{TINY} {NULL} --mock-data {flags}".split()), 1)
    fingerprint = tokenizer or build_tokenizer(cfg.tokenizer).fingerprint
    objects = {"args": config_to_dict(cfg.flat), "tokenizer": fingerprint, **objects}
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    (folder / name).mkdir(parents=True)
    content = {
        "format": manifest.FORMAT, "format_version": 1, "run_id": "a", "world_size": 1, "objects": objects,
        "assets": {}, "files": {}, "tensors": {},
    }  # fmt: skip
    (folder / name / manifest.MANIFEST).write_bytes(manifest.encode(json.loads(json.dumps(content))))
    (folder / "latest_checkpointed_iteration.txt").write_text("release" if iteration is None else str(iteration))


OTHER = "has another architecture: num_layers is 2, the checkpoint has 3"
TOKENIZER = "was trained with another tokenizer"


@pytest.mark.parametrize("stored, flags, expected", [
    ("--num-layers 3", "--load a", [OTHER]),
    ("--num-layers 3", "--load a --ckpt-step 3 --finetune", [OTHER]),
    ("--num-layers 3", "--pretrained-checkpoint a", [OTHER]),
    ("--num-layers 3", "--load none --pretrained-checkpoint a", [OTHER]),
    ("--num-layers 3", "--load a --save used2 --data-path nope", [OTHER, "no data set at nope"]),
    ("--num-layers 3", "--load a --hidden-size 33", ["num_layers is 2, the checkpoint has 3", "--hidden-size 33"]),
    ("--vocab-size 99", "--load a", [TOKENIZER]),
    ("--vocab-size 99 --num-layers 3", "--load a", [TOKENIZER, OTHER]),
    ("--swiglu", "--load a", ["swiglu is False, the checkpoint has True"]),
    ("--ffn-hidden-size 64", "--pretrained-checkpoint a --num-experts 4 --moe-use-upcycling --moe-ffn-hidden-size 48",
     ["its feed-forward width 64 is not 1"]),
])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_found_without_torch(problems_of, tmp_path, stored, flags, expected):
    write_checkpoint(tmp_path / "a", stored)
    data = "" if "--data-path" in flags else "--mock-data"
    errors = problems_of(f"{NULL} {data} {flags}")
    assert all(item in errors for item in expected) and f"{len(expected)} problem" in errors, errors


PLAN = schedule_plan(validate_args(parse_args(f"{TINY} {NULL} --mock-data".split()), 1).flat)
STATE = {
    "scheduler": {**asdict(PLAN), "num_steps": 4}, "train_state": {"consumed_train_samples": 4}, "optimizer": {},
}  # fmt: skip


@pytest.mark.parametrize("flags, expected", [
    ("--train-iters 8", "--lr-decay-iters: the learning rate now decays over 16 samples, in the checkpoint over 8"),
    ("--lr 2e-3", "the learning rate schedule differs from the checkpoint's (max_lr: checkpoint 0.001, now 0.002)"),
])  # fmt: skip
def test_another_schedule_is_found_without_torch(problems_of, tmp_path, flags, expected):
    write_checkpoint(tmp_path / "a", "", **STATE)
    errors = problems_of(f"{NULL} --mock-data --load a {flags}")
    assert expected in errors and "1 problem" in errors, errors


@pytest.mark.parametrize("stored, flags, iteration", [
    ("", "--load a", 3),
    ("", "--load a --train-iters 8 --override-opt_param-scheduler", 3),
    ("", "--load a --train-iters 8 --use-checkpoint-opt_param-scheduler", 3),
    ("", "--load a --train-iters 8 --no-load-optim", 3),
    ("", "--load a --train-iters 8 --finetune", 3),
    ("", "--load a --eval-interval 8", 3),
    ("--vocab-size 99", "--load a --finetune", 3),
    ("--vocab-size 99", "--pretrained-checkpoint a", 3),
    ("--vocab-size 99", "--load a", None),
    ("--normalization RMSNorm", "--load a --finetune", 3),
    ("--normalization RMSNorm", "--load a --skip-train", 3),
    ("--moe-ffn-hidden-size 16", "--load a", 3),
    ("--num-layers 3", "--load a --ckpt-step 2", 3),
    ("--ffn-hidden-size 64", "--load a --num-experts 4 --moe-use-upcycling --moe-ffn-hidden-size 64", 3),
])  # fmt: skip
def test_a_checkpoint_that_fits_or_is_searched_by_the_load_is_not_reported(
    python_without_torch, tmp_path, stored, flags, iteration
):
    write_checkpoint(tmp_path / "a", stored, iteration, **STATE)
    command = [python_without_torch, "-c", STARTS, *f"{TINY} {NULL} --mock-data {flags}".split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


STARTS = """
import sys
from megatron.training.arguments import parse_args
from megatron.training.report.dry_run import preflight
preflight(parse_args(None))
assert "torch" not in sys.modules
"""
