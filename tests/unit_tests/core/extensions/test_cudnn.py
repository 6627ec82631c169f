"""A process loads one cuDNN. Empty libraries stand in for its parts, because only their names are searched."""

import os
import subprocess
import sys

import pytest

from megatron.core.extensions.cudnn import cudnn_supports_lengths
from tests.test_utils.gpt_runs import MODEL_FLAGS

PARTS = ["libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_ops.so.9"]


@pytest.fixture
def two_versions(tmp_path):
    """Directories "torch" and "system", each with all parts."""
    for home in ("torch", "system"):
        (tmp_path / home).mkdir()
        for part in PARTS:
            command = ["c++", "-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,{part}", "-o", tmp_path / home / part]
            subprocess.run(command, check=True)
    return tmp_path


def run(root, *lines):
    """Prints of a new process, in which torch's cuDNN is loaded first."""
    setup = [
        "import ctypes, os", "from megatron.core.extensions.cudnn import loaded_cudnn, one_cudnn, require_one_cudnn",
        f"root = {str(root)!r}", "ctypes.CDLL(root + '/torch/libcudnn.so.9')",
    ]  # fmt: skip
    return subprocess.run([sys.executable, "-c", "\n".join([*setup, *lines])], capture_output=True, text=True)


def test_who_asks_for_a_part_by_name_gets_that_of_torch(two_versions):
    outcome = run(
        two_versions,
        "try: ctypes.CDLL('libcudnn_graph.so.9')",
        "except OSError: print('not found before')",
        "with one_cudnn():",
        "    print(os.environ['CUDNN_HOME'])",
        "    for part in ('graph', 'ops'): ctypes.CDLL(f'libcudnn_{part}.so.9')",
        "print('CUDNN_HOME' in os.environ, *loaded_cudnn())",
    )  # fmt: skip
    home = two_versions / "torch"
    assert outcome.stdout.splitlines() == ["not found before", str(home), f"False {home}"], outcome.stderr


@pytest.mark.parametrize("where", ["with one_cudnn(): load()", "load(); require_one_cudnn()"])
def test_parts_of_another_one_are_rejected(two_versions, where):
    load = "load = lambda: ctypes.CDLL(root + '/system/libcudnn_graph.so.9')"
    error = run(two_versions, "require_one_cudnn()", load, where).stderr
    assert "UserError" in error and "import torch first" in error
    assert all(str(two_versions / home) in error for home in ("torch", "system"))


def test_training_does_not_start_with_parts_of_two(two_versions):
    both = f"{two_versions}/torch/libcudnn.so.9:{two_versions}/system/libcudnn_graph.so.9"
    command = [sys.executable, "pretrain_gpt.py", *MODEL_FLAGS, "--mock-data"]
    outcome = subprocess.run(command, env={**os.environ, "LD_PRELOAD": both}, capture_output=True, text=True)
    assert outcome.returncode == 2 and "iteration " not in outcome.stdout
    assert outcome.stderr.count("this process has loaded cuDNN from") == 1 and "Traceback" not in outcome.stderr


def test_one_cudnn_restores_the_users_cudnn_home(two_versions):
    lines = "os.environ['CUDNN_HOME'] = '/mine'", "with one_cudnn(): pass", "print(os.environ['CUDNN_HOME'])"
    assert run(two_versions, *lines).stdout == "/mine\n"


@pytest.mark.parametrize("lengths, taken", [((128, 256), True), ((128, 200), False), ((64, 128), False)])
def test_lengths_are_multiples_of_a_tile(lengths, taken):
    assert cudnn_supports_lengths(*lengths) == taken
