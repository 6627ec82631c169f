"""The git commit of a checkout, read without git."""

import subprocess

import pytest

from megatron.version import __version__, git_commit, version_text

COMMIT = "0123456789abcdef0123456789abcdef01234567"


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
