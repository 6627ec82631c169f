"""A third-party entry script runs as it is, and equals the suite's own where it computes the same."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.test_utils.gpt_runs import MODEL_FLAGS, losses, train, write_dataset

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_script_trains_like_the_suites_own(gloo_pool, tmp_path):
    dataset = write_dataset(tmp_path / "numbers")
    flags = ["--data-path", str(dataset), "--split", "80,10,10", "--hidden-dropout", "0", "--attention-dropout", "0"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = ["examples/pretrain_custom_gpt.py", "--label_smoothing=0", "--save", str(tmp_path / "classic")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        launcher + script + MODEL_FLAGS + flags, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "building a GPT model of this script's own" in result.stdout
    gloo_pool.run(train, 1, flags + ["--save", str(tmp_path / "own")])
    np.testing.assert_allclose(losses(tmp_path / "classic"), losses(tmp_path / "own"), rtol=2e-5)
