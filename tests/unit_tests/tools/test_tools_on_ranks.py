"""The tools that generate and score give the text and scores of one rank on several."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.console import run_tool
from tests.unit_tests.tools.test_generate import train

ROOT = Path(__file__).resolve().parents[3]
MODELS = {
    "tp": ("", "--tensor-model-parallel-size 2"),
    "pp": ("", "--pipeline-model-parallel-size 2"),
    "ep": ("--num-experts 4 --moe-ffn-hidden-size 16", "--expert-model-parallel-size 2"),
    "tp of experts": ("--num-experts 4 --moe-ffn-hidden-size 16", ""),
}


def run(rank, world_size, argv):
    """Return exit code, standard output and standard error of a tool on this rank."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_tool(argv[0], argv[1:])
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name", MODELS)
def test_ranks_generate_the_text_of_one_rank(gloo_pool, tmp_path, name):
    flags, layout = MODELS[name]
    training = [*flags.split(), "--mock-data", "--train-iters", "3", "--save", str(tmp_path)]
    assert gloo_pool.run(train, 1, training) == [0]
    argv = ["generate", "--load", str(tmp_path), "--prompt", "1 2", "--prompt", "7 8 9", "--max-new-tokens", "6"]
    ((code, alone, _),) = gloo_pool.run(run, 1, argv)
    assert code == 0 and alone.startswith("1 2")
    first, second = gloo_pool.run(run, 2, [*argv, *layout.split()])
    assert first[:2] == (0, alone), first
    assert second[:2] == (0, ""), second
    wrong = gloo_pool.run(run, 2, [*argv, "--tensor-model-parallel-size", "3"])
    assert all(code == 2 and "there are 2 ranks; use torchrun --nproc-per-node 3" in err for code, _, err in wrong)
    long = gloo_pool.run(run, 2, [*argv, "--prompt", "5 " * 60, *layout.split()])
    assert all(code == 2 and "a prompt has 60 tokens, the model takes 32; several ranks" in err for code, _, err in long)


def test_torchrun_generates_on_two_ranks(gloo_pool, tmp_path):
    assert gloo_pool.run(train, 1, ["--mock-data", "--train-iters", "3", "--save", str(tmp_path)]) == [0]
    argv = ["generate", "--load", str(tmp_path), "--prompt", "1 2", "--max-new-tokens", "4", "--temperature", "0"]
    ((_, alone, _),) = gloo_pool.run(run, 1, argv)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megatron"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, alone), done.stderr
