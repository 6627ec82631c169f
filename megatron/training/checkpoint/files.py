"""Files of a checkpoint folder: ``iter_0001000/`` and the tracker ``latest_checkpointed_iteration.txt``.

The tracker is written last, by one rename. A load selects the checkpoint of --ckpt-step, else of the tracker, else (if
the tracker is missing or names a missing one) the newest. A damaged selection is an error that names an earlier
checkpoint; only the user can decide which one to trust. Only the first rank calls these functions."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.files import (
    RELEASE,
    TRACKER,
    checkpoint_directory,
    get_checkpoint_name,
    read_tracker,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST, read_manifest
from megatron.core.dist_checkpointing.writer import TEMPORARY, Fault, no_fault, recover, write_file_atomically
from megatron.core.safe_files import fsync_path, remove

logger = logging.getLogger(__name__)

_ITERATION = re.compile(r"iter_([0-9]{7}|[1-9][0-9]{7,17})")


def saved_iterations(folder: str | os.PathLike) -> list[int]:
    """Return the iterations that have a directory, newest first, complete or not; empty if ``folder`` is missing."""
    names = [path.name for path in Path(folder).glob("iter_*")]
    matches = [_ITERATION.fullmatch(name) for name in names]
    return sorted({int(match[1]) for match in matches if match}, reverse=True)


def write_tracker(folder: str | os.PathLike, iteration: int, fault: Fault = no_fault) -> None:
    """Write ``iteration`` to the tracker atomically."""
    write_file_atomically(Path(folder) / TRACKER, str(iteration).encode(), fault)


@dataclass(frozen=True)
class Found:
    """Location of a complete checkpoint."""

    directory: str
    iteration: int
    """0 for a release."""
    release: bool = False
    run_id: str = ""
    """Identifier of the save that wrote it; copies share it."""


def is_hugging_face_folder(folder: str | os.PathLike) -> bool:
    """Whether ``folder`` is a model in Hugging Face's format, whatever its name; checkpoints have a manifest."""
    return os.path.isfile(Path(folder) / "config.json") and not os.path.lexists(Path(folder) / MANIFEST)


def find_checkpoint(folder: str | os.PathLike | None, step: int | None = None, *, repair: bool = False) -> Found | None:
    """Return the checkpoint that --load and --ckpt-step select: of ``step``, else of the tracker, else (the tracker is
    unusable or names a missing one; logs a warning) the newest. None if ``folder`` is None, missing or holds no
    checkpoint, without ``step``. Reads no tensors. ``folder`` may be one checkpoint, ``…/iter_0001000``, which must
    exist. ``repair`` (one process only) restores a checkpoint whose replacement was interrupted. CheckpointError, which
    names an earlier complete checkpoint, if the selected one is missing or damaged."""
    one = None if folder is None or step is not None else _ITERATION.fullmatch(Path(folder).name)
    if folder is not None and one and is_hugging_face_folder(folder):
        return None
    if folder is not None and one and not os.path.lexists(Path(folder) / TRACKER):
        return _open(Path(folder).parent, int(one[1]))
    if folder is None or not os.path.isdir(folder):
        if step is not None:
            raise CheckpointError(f"--ckpt-step {step}: there is no folder {folder}")
        return None
    if repair and os.access(folder, os.W_OK):
        recover(folder)
    if step is not None:
        try:
            return _open(folder, step)
        except CheckpointError as error:
            raise CheckpointDamagedError(f"--ckpt-step {step}: {error}") from None
    problem, latest = None, None
    try:
        latest = read_tracker(folder)
    except FileNotFoundError:
        problem = f"{Path(folder) / TRACKER} is missing"
    except CheckpointError as error:
        problem = str(error)
    if latest is not None:
        if os.path.lexists(checkpoint_directory(folder, latest)):
            checkpoint = _open(folder, latest)
            _report_newer(folder, checkpoint)
            return checkpoint
        problem = f"{Path(folder) / TRACKER} names {checkpoint_directory(folder, latest)}, which is not there"
    return _newest(folder, str(problem))


def _open(folder: str | os.PathLike, which: int | str) -> Found:
    """Raises CheckpointDamagedError, which names an earlier checkpoint if there is one."""
    directory, iteration = checkpoint_directory(folder, which), 0 if which == RELEASE else int(which)
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        raise CheckpointDamagedError(f"{error}{alternative(folder, iteration)}") from None
    return Found(directory, iteration, which == RELEASE, manifest["run_id"])


def _newest(folder: str | os.PathLike, problem: str) -> Found | None:
    """Return the newest checkpoint, else a release, if the tracker is unusable for the reason ``problem``; None without
    both. Raises CheckpointError if only the tracker exists, CheckpointDamagedError if the newest is damaged."""
    which: list[int | str] = [*saved_iterations(folder)]
    if Path(get_checkpoint_name(folder, 0, release=True)).is_dir():
        which.append(RELEASE)
    if not which and not os.path.lexists(Path(folder) / TRACKER):
        return None
    if not which:
        raise CheckpointError(f"{problem}, and {folder} holds no checkpoint: restore one or choose another --load")
    try:
        checkpoint = _open(folder, which[0])
    except CheckpointError as error:
        raise CheckpointDamagedError(f"{problem}; {error}") from None
    logger.warning("WARNING: %s; taking the newest checkpoint, %s", problem, checkpoint.directory)
    return checkpoint


def _report_newer(folder: str | os.PathLike, checkpoint: Found) -> None:
    """Warn if a complete checkpoint is newer than the tracker, which was set back by hand or is corrupted."""
    newest = newest_complete(folder)
    if newest is not None and newest > checkpoint.iteration:
        logger.warning(
            "WARNING: %s names iteration %s, but the newest complete checkpoint there is of iteration %d. Taking what"
            " the tracker names; --ckpt-step %d takes the newest. The first save of a run moves newer ones aside.",
            Path(folder) / TRACKER,
            RELEASE if checkpoint.release else checkpoint.iteration,
            newest,
            newest,
        )


def newest_complete(folder: str | os.PathLike, before: int | None = None) -> int | None:
    """Return the newest iteration (below ``before``) with a valid manifest and all files in their sizes, or None."""
    for iteration in saved_iterations(folder):
        if before is None or iteration < before:
            with suppress(CheckpointError):
                read_manifest(get_checkpoint_name(folder, iteration))
                return iteration
    return None


def alternative(folder: str | os.PathLike, iteration: int) -> str:
    """Return the end of a message that names a complete checkpoint before ``iteration``, or an empty string."""
    earlier = newest_complete(folder, iteration)
    return "" if earlier is None else f"; --ckpt-step {earlier} continues from an earlier one, and keeps this one aside"


def delete_checkpoint(folder: str | os.PathLike, iteration: int, fault: Fault = no_fault) -> None:
    """Delete a checkpoint, after a durable rename to a hidden name: a half-deleted directory never looks like a
    checkpoint. The tracker stays. Raises FileNotFoundError."""
    directory = Path(get_checkpoint_name(folder, iteration))
    condemned = directory.with_name(f".{directory.name}{TEMPORARY}deleted")
    remove(condemned)
    os.rename(directory, condemned)
    fsync_path(directory.parent)  # else a power loss may restore the name without all files
    fault("mid_delete")
    remove(condemned)
