"""quickstart.sh and the installation step, with a stand-in for Python that records its calls instead of working.

The real commands run in ``test_installed_wheel.py`` and ``test_container.py``.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/bin/sh
# fails once on the call that $INTERRUPTED names; torch is installed once pip has succeeded here
echo "$*" >>"$CALLS"
case "$*" in
*"$INTERRUPTED"*) [ -e "$CALLS.cut" ] || { touch "$CALLS.cut"; exit 130; } ;;
esac
case "$*" in
"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip install"*) touch "$CALLS.installed" ;;
-*device_count*) echo 0 ;;
"-c"*) exit 0 ;;
"-"*) case "$*" in -m*) exit 0 ;; esac; [ -e "$CALLS.installed" ] ;;
esac
"""


@pytest.fixture
def quickstart(tmp_path):
    """``quickstart(interrupted)``: run it in a copy; return (exit code, output, calls of the stand-in in this run)."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "quickstart.sh", tmp_path)
    shutil.copy(ROOT / "scripts/environment.sh", tmp_path / "scripts")
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    calls = tmp_path / "calls"

    def run(interrupted):
        calls.write_text("")
        env = {**os.environ, "PYTHON": str(python), "CALLS": str(calls), "INTERRUPTED": interrupted}
        result = subprocess.run(
            ["bash", "quickstart.sh", "out"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        return result.returncode, result.stdout, [line for line in calls.read_text().splitlines() if line[:1] != "-c"]

    return run


STEPS = ["make_corpus", "train_tokenizer", "preprocess_data", "pretrain_gpt", "unigram_baseline", "generate", "plot"]


@pytest.mark.parametrize("interrupted", STEPS)
def test_an_interrupted_quickstart_continues_at_the_same_step(quickstart, interrupted):
    code, output, calls = quickstart(interrupted)
    number = STEPS.index(interrupted)
    assert code == 130 and sum(interrupted in call for call in calls) == 1
    assert not any(step in call for step in STEPS[number + 1 :] for call in calls), "stops at the failed step"
    code, output, calls = quickstart(interrupted)
    done = STEPS[: min(number, STEPS.index("pretrain_gpt"))]
    assert code == 0 and not any(step in call for step in done for call in calls), "completed steps are not repeated"
    assert output.count("complete since an earlier call: ") >= len(done)
    assert all(any(step in call for call in calls) for step in STEPS[number:])


def test_the_installation_shows_its_progress_and_continues(quickstart):
    code, output, calls = quickstart("-m pip install")
    assert code == 130 and "installing into .venv (once; interrupted, it continues when run again)" in output
    pip = next(call for call in calls if "-m pip install" in call)
    assert "--progress-bar on" in pip and "-c constraints.txt" in pip
    code, output, calls = quickstart("-m pip install")
    assert code == 0 and sum("-m pip install" in call for call in calls) == 1
    code, output, calls = quickstart("-m pip install")
    assert code == 0 and not any("pip install" in call for call in calls) and "installing" not in output
