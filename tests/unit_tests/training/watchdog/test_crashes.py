"""A crash in native code shows the stacks of all threads, in a process without a launcher too."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
CRASH = """
from megatron.training.arguments import parse_args
from megatron.training.run import run

def read_a_file_that_was_cut(*args):
    import os, signal
    os.kill(os.getpid(), signal.SIGBUS)

run(parse_args(None), read_a_file_that_was_cut)
"""
FLAGS = [
    "--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8", "--mock-data",
    "--max-position-embeddings", "8", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--distributed-backend", "gloo",
]  # fmt: skip


def test_one_process_shows_where_it_crashed():
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [sys.executable, "-c", CRASH, *FLAGS], env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode < 0
    assert "Bus error" in result.stderr and "read_a_file_that_was_cut" in result.stderr
