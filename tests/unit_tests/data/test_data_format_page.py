"""What docs/reference/data_format.md shows runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_runs(tmp_path):
    text = (ROOT / "docs" / "reference" / "data_format.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|bash)\n(.*?)```", text, flags=re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "bash"]
    (tmp_path / "parts").mkdir()
    for name in ("megatron", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    for language, block in blocks:
        python = f'python() {{ "{sys.executable}" "$@"; }}\n'
        command = [sys.executable, "-c", block] if language == "python" else ["bash", "-e", "-c", python + block]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    assert "documents  3" in result.stdout


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
