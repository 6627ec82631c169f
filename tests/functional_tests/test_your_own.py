"""The task of docs/guides/your_own.md trains as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.test_utils.gpt_runs import MODEL_FLAGS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "your_own.md"


def test_the_task_of_the_guide_trains(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "task.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, str(tmp_path / "task.py"), *MODEL_FLAGS, "--mock-data", "--train-iters", "4", "--save", "run"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "training is complete after iteration 4" in result.stdout and "iteration 4 is safe" in result.stdout
