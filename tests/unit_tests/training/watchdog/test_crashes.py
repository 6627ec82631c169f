"""A crash in native code shows the stacks of all threads, in a process without a launcher too."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
CRASH = """
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.watchdog import Watchdog

def read_a_file_that_was_cut():
    import os, signal
    os.kill(os.getpid(), signal.SIGBUS)

with Watchdog(PretrainConfig()):
    read_a_file_that_was_cut()
"""


def test_one_process_shows_where_it_crashed():
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [sys.executable, "-c", CRASH], env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert result.returncode < 0
    assert "Bus error" in result.stderr and "read_a_file_that_was_cut" in result.stderr
