"""Forked workers report results, failures and deaths of tests."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = {
    "test_results.py": """
import pytest

def test_passes(tmp_path): pass
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("a reason")
def test_without_fixture(missing): pass
""",
    "test_files.py": """
import os
import pytest

@pytest.fixture(scope="module")
def opened(request):
    yield
    open(f"{request.path.parent}/closed", "w").close()

@pytest.mark.parametrize("number", range(20))
def test_number(opened, number): print(number)
""",
    "test_death.py": """
import os

def test_dies(): os._exit(0)
def test_never_runs(): pass
""",
}


def run(folder, *names):
    for name in names:
        (folder / name).write_text(TESTS[name])
    options = ["-p", "tests.test_utils.forked_workers", "--workers", "2", "-p", "no:cacheprovider", "-rA"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-m", "pytest", *options, *names]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_workers_report_failures_and_their_exit_code(tmp_path):
    result = run(tmp_path, "test_results.py", "test_files.py")
    assert result.returncode == 1 and (tmp_path / "closed").exists()
    assert "1 failed, 21 passed, 1 skipped, 1 error" in result.stdout and "assert 1 == 2" in result.stdout


def test_workers_pass_if_all_tests_pass(tmp_path):
    result = run(tmp_path, "test_files.py")
    assert result.returncode == 0 and "20 passed" in result.stdout, result.stdout


def test_dead_worker_fails_its_test(tmp_path):
    result = run(tmp_path, "test_death.py", "test_files.py")
    assert result.returncode == 1 and "FAILED test_death.py::test_dies" in result.stdout, result.stdout
