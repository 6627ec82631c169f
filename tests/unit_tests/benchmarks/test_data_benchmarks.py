"""The benchmarks of the data path run, tiny."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_benchmarks_run(tmp_path):
    for name, flags in {
        "bench_index_build.py": ["--documents", "2000"],
        "bench_loader.py": ["--documents", "500", "--samples", "5"],
    }.items():
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / name),
            *flags,
            "--runs",
            "1",
            "--output",
            str(tmp_path / "x.json"),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0 and (tmp_path / "x.json").exists(), result.stderr
        (tmp_path / "x.json").unlink()
