"""Measure start-up times: ``--help``, a rejected command line, ``--dry-run``, ``import torch``.

python benchmarks/bench_startup.py
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL_FLAGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 32000"
)
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import megatron.core.parallel_state": ["-c", "import megatron.core.parallel_state"],
    "pretrain_gpt.py --help": ["pretrain_gpt.py", "--help"],
    "pretrain_gpt.py, refused flags": ["pretrain_gpt.py", "--bf16", "--fp16"],
    "pretrain_gpt.py --dry-run": ["pretrain_gpt.py", *MODEL_FLAGS.split(), "--dry-run"],
    "tools/preprocess_data.py --help": ["tools/preprocess_data.py", "--help"],
}
REPETITIONS = 7


def seconds(arguments: list[str]) -> float:
    """Wall time of one fresh interpreter."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=False)
    return time.perf_counter() - started


def main() -> None:
    """Prints medians and writes benchmarks/results/startup.json."""
    results = {}
    for name, arguments in COMMANDS.items():
        times = sorted(seconds(arguments) for _ in range(REPETITIONS))
        results[name] = {"median_s": statistics.median(times), "min_s": times[0], "max_s": times[-1]}
        print(f"{name:40s} {statistics.median(times):6.2f} s  ({times[0]:.2f} to {times[-1]:.2f})")
    report = {"command": "python benchmarks/bench_startup.py", "python": platform.python_version(), "results": results}
    (ROOT / "benchmarks/results/startup.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
