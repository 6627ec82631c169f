"""Wrong paths and folders are found together with wrong flags, before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 2 --lr 1e-3 --train-iters 4"
)
NULL = "--tokenizer-type NullTokenizer --vocab-size 100"


@pytest.fixture
def problems_of(tmp_path):
    """Run pretrain_gpt.py where importing torch ends the program; return the lines of stderr."""
    (tmp_path / "without" / "torch").mkdir(parents=True)
    (tmp_path / "without" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "used" / "iter_0000007").mkdir(parents=True)

    def run(flags):
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'without'}{os.pathsep}{ROOT}"}
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *f"{TINY} {flags}".split()]
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
    ("--use-checkpoint-args --load nope --exit-on-missing-checkpoint --mock-data", ["--load nope: there is no"]),
])  # fmt: skip
def test_all_problems_are_found_without_torch(problems_of, flags, expected):
    errors = problems_of(flags)
    assert all(each in errors for each in expected) and f"{len(expected)} problem" in errors, errors
