"""``megatron pretrain --nproc N`` ends with the reason and the exit code of the process that failed first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
import os, sys, time
from megatron.training.exits.endings import notify_launcher
if os.environ["RANK"] == "0":
    time.sleep(60)
if sys.argv[1] == "reason":
    notify_launcher("--lr 0: must be positive")
os.{end}
"""


def launch(folder, end, *words):
    (folder / "program.py").write_text(PROGRAM.format(end=end))
    launcher = [sys.executable, "-m", "megatron.training.start.torchrun", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*launcher, str(folder / "program.py"), *words], env=environment, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("end, word, code, last", [
    ("_exit(75)", "reason", 75, "error: rank 1 failed first: --lr 0: must be positive"),
    ("abort()", "none", 134, "error: rank 1 failed first: Signal 6 (SIGABRT) received by PID "),
    ("_exit(3)", "none", 3, "error: rank 1 failed first: exit code 3, see above"),
])  # fmt: skip
def test_the_first_failure_is_the_last_line(tmp_path, end, word, code, last):
    result = launch(tmp_path, end, word)
    assert result.returncode == code and result.stderr.splitlines()[-1].startswith(last), result.stderr
    assert "Traceback" not in result.stderr
