"""A third-party entry script runs as it is, and equals the suite's own where it computes the same."""

import os
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.test_utils.gpt_runs import MODEL_FLAGS, losses, train, write_dataset

ROOT = Path(__file__).resolve().parents[2]


NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
"""Under which a script's loss is that of the suite's own task."""


@pytest.fixture(scope="module")
def launch(warm_python):
    """``launch(script, argv, ranks=1)``: a script in processes of its own, as a user starts it; its standard output."""
    return partial(_launch, warm_python)


def _launch(python, script, argv, ranks=1):
    launcher = [python] if ranks == 1 else [
        python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        launcher + [script] + MODEL_FLAGS + argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    dataset = write_dataset(tmp_path_factory.mktemp("data") / "numbers")
    return ["--data-path", str(dataset), "--split", "80,10,10"]


@pytest.fixture(scope="module")
def own_losses(gloo_pool, flags, tmp_path_factory):
    """The suite's own losses, with a vocabulary as large as what the scripts build, so that the sums agree."""
    folder = tmp_path_factory.mktemp("own")
    gloo_pool.run(train, 1, flags + NO_DROPOUT + ["--save", str(folder), "--make-vocab-size-divisible-by", "64"])
    return losses(folder)


def test_the_example_script_trains_like_the_suites_own(launch, flags, own_losses, tmp_path):
    argv = flags + NO_DROPOUT + ["--label_smoothing=0", "--save", str(tmp_path)]
    output = launch("examples/pretrain_custom_gpt.py", argv, ranks=2)
    assert "building a GPT model of this script's own" in output
    np.testing.assert_allclose(losses(tmp_path), own_losses, rtol=2e-5)


EXPERTS = ["--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "2"]
"""Such a script does not tell the model which tokens count."""


@pytest.mark.parametrize(
    "script, ranks, more",
    [("2024", 2, []), ("2025", 2, ["--reset-attention-mask", "--reset-position-ids"]), ("2025", 1, ["--old-loss"]),
     ("2024", 2, EXPERTS)],
    ids=["2024", "2025", "old-loss", "experts"],
)
def test_scripts_of_earlier_years_run_as_they_are(launch, flags, own_losses, tmp_path, gloo_pool, script, ranks, more):
    argv = flags + NO_DROPOUT + ["--make-vocab-size-divisible-by", "64", "--save", str(tmp_path / "script")]
    launch(f"tests/functional_tests/scripts/pretrain_classic_{script}.py", argv + more, ranks)
    if more and more != ["--old-loss"]:
        gloo_pool.run(train, 1, argv[:-1] + [str(tmp_path / "own")] + more)
        own_losses = losses(tmp_path / "own")
    np.testing.assert_allclose(losses(tmp_path / "script"), own_losses, rtol=2e-5)


@pytest.mark.parametrize("more", [[], ["--old-loss"]], ids=["sum", "mean"])
def test_scripts_predict_further_tokens_whatever_their_loss_function_returns(launch, flags, tmp_path, gloo_pool, more):
    """No token is masked, so that a mean of micro-batches' means is that over all tokens."""
    argv = [*flags, *NO_DROPOUT, "--make-vocab-size-divisible-by", "64", "--mtp-num-layers", "2"]
    script = "tests/functional_tests/scripts/pretrain_classic_2025.py"
    launch(script, [*argv, *more, "--save", str(tmp_path / "script")])
    gloo_pool.run(train, 1, [*argv, "--save", str(tmp_path / "own")])
    np.testing.assert_allclose(losses(tmp_path / "script"), losses(tmp_path / "own"), rtol=2e-5)
    assert "mtp_2 loss" in (tmp_path / "script/metrics.jsonl").read_text()


def test_a_script_with_dropout_resumes_bit_for_bit(launch, flags, tmp_path):
    """Although it does not know of the sample indices that dropout masks depend on."""
    script = "tests/functional_tests/scripts/pretrain_classic_2024.py"
    whole, parts = (flags + ["--save", str(tmp_path / name), "--seed", "5"] for name in ("whole", "parts"))
    launch(script, whole)
    launch(script, parts + ["--exit-interval", "4"])
    launch(script, parts + ["--load", str(tmp_path / "parts")])
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()
