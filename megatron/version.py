"""Version of this package, and the git commit that it runs from. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path

from megatron import __version__

DISTRIBUTION = "megatron-pretraining"
ROOT = Path(__file__).resolve().parents[1]


def git_commit(root: Path = ROOT) -> str | None:
    """Return the commit that is checked out in ``root``, or that pip installed from; None if unknown.

    Reads the files of ``.git``: the program git may be missing, and it rejects checkouts of other users. Changes that
    are not committed are not detected."""
    try:
        return _checked_out(root) if (root / ".git").exists() else _installed(root)
    except (OSError, ValueError, KeyError):
        return None


def _checked_out(root: Path) -> str | None:
    """Return the commit hash that HEAD of the checkout ``root`` names, also in a linked worktree and for packed
    references; None if the branch has no commit. Raises OSError for missing files."""
    folder = root / ".git"
    if folder.is_file():  # a linked worktree: "gitdir: FOLDER"
        folder = root / folder.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
    head = (folder / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head
    reference = head.removeprefix("ref: ")
    common = folder / "commondir"
    shared = folder / common.read_text(encoding="utf-8").strip() if common.is_file() else folder
    if (shared / reference).is_file():
        return (shared / reference).read_text(encoding="utf-8").strip()
    packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {reference}")), None)


def _installed(root: Path) -> str | None:
    """Return the commit that pip recorded for ``pip install git+URL``; None if the package is not installed, or
    ``root`` is not the installed copy. Raises KeyError if pip recorded no commit."""
    from importlib import metadata  # 70 ms, which not every import of the package needs

    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    if Path(str(found.locate_file(""))).resolve() != root:
        return None
    return json.loads(found.read_text("direct_url.json") or "{}")["vcs_info"]["commit_id"]


def version_text() -> str:
    """Return name, version and, if known, the first 12 digits of the commit."""
    commit = git_commit()
    return f"{DISTRIBUTION} {__version__}" + (f" (commit {commit[:12]})" if commit else "")
