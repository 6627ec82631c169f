"""The git commit of a checkout, read without git; commit and GPUs in the log and in checkpoints."""

import logging
import subprocess

import pytest
import torch

import megatron
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.training.arguments import parse_args
from megatron.training.checkpoint.environment import environment
from megatron.training.checkpoint.live_state import LiveState
from megatron.training.run import log_environment
from megatron.training.train_state import TrainState
from megatron.version import __version__, git_commit, version_text

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_package_has_a_version():
    assert megatron.__version__ == __version__


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return folder


def test_commit_is_the_one_that_git_names(checkout, tmp_path):
    expected = git(checkout, "rev-parse", "HEAD").strip()
    assert git_commit(checkout) == expected
    git(checkout, "worktree", "add", "-q", "-b", "other", str(tmp_path / "linked"))
    git(tmp_path / "linked", "commit", "-q", "--allow-empty", "-m", "second")
    second = git(tmp_path / "linked", "rev-parse", "HEAD").strip()
    assert git_commit(tmp_path / "linked") == second != expected
    git(checkout, "pack-refs", "--all")
    assert (git_commit(checkout), git_commit(tmp_path / "linked")) == (expected, second)
    git(checkout, "checkout", "-q", "--detach", second)
    assert git_commit(checkout) == second


def test_commit_is_unknown_outside_a_checkout(tmp_path):
    assert git_commit(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert git_commit(tmp_path) is None
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/unborn\n")
    assert git_commit(tmp_path) is None


def test_version_text_shortens_the_commit(monkeypatch):
    monkeypatch.setattr("megatron.version.git_commit", lambda: COMMIT)
    assert version_text() == f"megatron-pretraining {__version__} (commit 0123456789ab)"
    monkeypatch.setattr("megatron.version.git_commit", lambda: None)
    assert version_text() == f"megatron-pretraining {__version__}"


@pytest.fixture
def three_gpus(monkeypatch):
    """Three GPUs of two types, a CUDA build of torch and a known commit."""
    names = ["NVIDIA H200", "NVIDIA H200", "NVIDIA L40S"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for module in ("version", "training.checkpoint.environment"):
        monkeypatch.setattr(f"megatron.{module}.git_commit", lambda: COMMIT)
    environment.cache_clear()
    yield
    environment.cache_clear()


def test_commit_and_gpus_are_logged(three_gpus, caplog):
    with caplog.at_level(logging.INFO):
        log_environment()
    assert f"megatron-pretraining {__version__} (commit 0123456789ab) on host " in caplog.text
    assert f"torch {torch.__version__}, CUDA 13.0, 2 x NVIDIA H200, 1 x NVIDIA L40S" in caplog.text


def test_commit_and_gpus_are_in_checkpoints(three_gpus):
    """Only the objects are built: no model, optimizer or schedule."""
    cfg = parse_args([
        "--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8", "--mock-data",
        "--max-position-embeddings", "8", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", "9",
    ])  # fmt: skip
    live = LiveState(cfg, [], None, None, SINGLE_PROCESS, None)
    result = live.objects(TrainState(), None)["environment"]
    assert (result["commit"], result["cuda"], result["gpus"]) == (COMMIT, "13.0", "2 x NVIDIA H200, 1 x NVIDIA L40S")
