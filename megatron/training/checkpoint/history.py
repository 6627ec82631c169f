"""Keep one history of checkpoints per --save folder.

A run that writes to --save either continues from a checkpoint in it or finds none; otherwise it is rejected before
anything is built, unless --start-over is passed. Checkpoints newer than the one that a run continues from (--ckpt-step,
a tracker that was set back, a damaged newest one) belong to an abandoned history. They would be overwritten one by one
and mixed with new ones, so the first save moves them, unopened, to ``<save>/set-aside-001``. Nothing is deleted.

Checkpoints of --non-persistent-save-interval live in a separate ("fast") folder, possibly on another disk, and belong
to the same history. They store the identity of their --save folder, a file in it, so that a run never loads fast
checkpoints of another run or a deleted folder."""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import read_regular_file
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.core.dist_checkpointing.writer import write_file_atomically
from megatron.core.safe_files import fsync_path
from megatron.training.checkpoint import files
from megatron.training.config.checkpointing import CheckpointConfig
from megatron.training.config.pretrain_config import PretrainConfig

logger = logging.getLogger(__name__)

SET_ASIDE = "set-aside"
IDENTITY = "folder.id"


def same_folder(one: str | None, other: str | None) -> bool:
    """Whether both paths name the same existing folder."""
    try:
        return one is not None and other is not None and os.path.samefile(one, other)
    except OSError:
        return False


def fast_folder(cfg: CheckpointConfig) -> str | None:
    """Return the folder of fast checkpoints (default: ``non_persistent`` in --save, else in --load), or None."""
    base = cfg.save or cfg.load
    if cfg.non_persistent_ckpt_type == "local":
        return cfg.non_persistent_local_ckpt_dir
    return cfg.non_persistent_global_ckpt_dir or (None if base is None else os.path.join(base, "non_persistent"))


def identity(folder: str, *, make: bool = False) -> str | None:
    """Return the identity of a --save folder, or None; ``make`` creates it (CheckpointError). One process only."""
    path = Path(folder) / IDENTITY
    with suppress(FileNotFoundError):
        return read_regular_file(path, 100).decode("ascii", "replace").strip()
    if not make:
        return None
    try:
        write_file_atomically(path, uuid.uuid4().hex.encode())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from None
    return identity(folder)


def _belongs(fast: files.Found, base: str) -> bool:
    return read_manifest(fast.directory)["objects"].get("folder") == identity(base) is not None


def _newest_fast(cfg: CheckpointConfig, repair: bool) -> files.Found | None:
    """Return the newest fast checkpoint if it belongs to the run in --load, which must be the --save folder if that is
    set. Warns about a damaged one and returns None."""
    fast, base = fast_folder(cfg), cfg.save or cfg.load
    if fast is None or base is None or not same_folder(cfg.load, base):
        return None
    try:
        checkpoint = files.find_checkpoint(fast, repair=repair)
        return checkpoint if checkpoint is not None and _belongs(checkpoint, base) else None
    except CheckpointError as error:
        logger.warning("WARNING: %s: not loaded: %s", fast, error)
        return None


def find_resumable(cfg: CheckpointConfig, *, repair: bool = False) -> files.Found | None:
    """Return the checkpoint that --load and --ckpt-step select, or None. By default the fast checkpoint if it is newer
    than all iterations in --load, with --ckpt-step the fast one of that iteration unless it is also the newest in
    --load; else as `find_checkpoint`, which raises CheckpointError."""
    fast = _newest_fast(cfg, repair)
    if fast is not None:
        assert cfg.load is not None
        newest = max(files.saved_iterations(cfg.load), default=-1)
        if fast.iteration > newest if cfg.ckpt_step is None else fast.iteration == cfg.ckpt_step != newest:
            return fast
    return files.find_checkpoint(cfg.load, cfg.ckpt_step, repair=repair)


def check_save_folder(cfg: PretrainConfig) -> None:
    """Reject a run that would mix its checkpoints with those from another run. --save may be empty, be --load (without
    --finetune), or hold the original or a copy of the checkpoint in --load; the fast folder must belong to --save. One
    process only. CheckpointError names what exists and the flags to continue or to start over."""
    checkpoint = cfg.checkpoint
    if checkpoint.save is None or cfg.validation.skip_train or checkpoint.start_over:
        return
    fast = fast_folder(cfg.checkpoint)
    if (
        fast is not None
        and (newest_fast := _any_complete(fast)) is not None
        and not _belongs(newest_fast, checkpoint.save)
    ):
        raise CheckpointError(
            f"{fast}: holds checkpoints that do not belong to --save {checkpoint.save}: choose another folder, or"
            f" delete them, or --start-over, which keeps them in {fast}/{SET_ASIDE}-001"
        )
    folders = [checkpoint.save, fast] if fast else [checkpoint.save]
    iterations = sorted({iteration for folder in folders for iteration in files.saved_iterations(folder)}, reverse=True)
    unnumbered = [
        name for name in (files.RELEASE, files.TRACKER) if os.path.lexists(os.path.join(checkpoint.save, name))
    ]
    same = same_folder(checkpoint.load, checkpoint.save)
    if not iterations and (same or not unnumbered):  # a release holds only initial weights: no conflict
        return
    if same and not checkpoint.finetune:
        return
    if checkpoint.load is not None and not same and not checkpoint.finetune:
        loaded = files.find_checkpoint(checkpoint.load, checkpoint.ckpt_step)
        if loaded is not None and continues(checkpoint.save, loaded):
            return
    newest = f"checkpoints up to iteration {iterations[0]}" if iterations else " and ".join(unnumbered)
    base = f" --pretrained-checkpoint {checkpoint.load}" if checkpoint.finetune and not same else ""
    base += " without --finetune" if checkpoint.finetune else ""
    raise CheckpointError(
        f"--save {checkpoint.save}: holds {newest}, from which this run would not continue: it would overwrite them"
        f" one by one. To continue from the newest: --load {checkpoint.save}{base}. To"
        f" start again in the same folder: --start-over, which keeps them in {checkpoint.save}/{SET_ASIDE}-001. Or"
        " choose another --save"
    )


def _any_complete(folder: str) -> files.Found | None:
    with suppress(CheckpointError):
        return files.find_checkpoint(folder)
    return None


def continues(folder: str, checkpoint: files.Found) -> bool:
    """Whether ``folder`` holds ``checkpoint`` or its original: one of the same iteration and ``run_id``."""
    if same_folder(str(Path(checkpoint.directory).parent), folder):
        return True
    try:
        manifest = read_manifest(files.get_checkpoint_name(folder, checkpoint.iteration, checkpoint.release))
    except CheckpointError:
        return False
    return manifest["run_id"] == checkpoint.run_id


def set_aside(folder: str, newer_than: int | None) -> None:
    """Move checkpoints of later iterations, complete or not, to a new folder ``set-aside-…`` in ``folder`` and log a
    warning; None: all, including release and tracker. Raises CheckpointError if they cannot be moved."""
    parent = Path(folder)
    names = [
        Path(files.get_checkpoint_name(folder, iteration)).name
        for iteration in files.saved_iterations(folder)
        if newer_than is None or iteration > newer_than
    ]
    if newer_than is None:  # tracker first: it must never name a missing checkpoint
        names = [name for name in (files.TRACKER, files.RELEASE) if os.path.lexists(parent / name)] + names
    if not names:
        return
    try:
        target = _new_folder(parent)
        for name in names:
            os.rename(parent / name, target / name)
        fsync_path(target)
        fsync_path(parent)
    except OSError as error:
        raise CheckpointError(f"{folder}: older checkpoints cannot be moved aside ({error.strerror})") from error
    start = "it starts over" if newer_than is None else f"it continued from iteration {newer_than}"
    logger.warning(
        "WARNING: %s: moved to %s, as this run does not continue from them: %s. Delete them if you do not need them.",
        ", ".join(names),
        target,
        start,
    )


def _new_folder(parent: Path) -> Path:
    """Create the first free ``set-aside-001``, ``-002``, …; syncs ``parent``."""
    number = 1
    while True:
        target = parent / f"{SET_ASIDE}-{number:03d}"
        try:
            target.mkdir()
            fsync_path(parent)  # else a power loss could lose the folder and its contents
            return target
        except FileExistsError:
            number += 1
