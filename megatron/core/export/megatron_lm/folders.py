"""Where a checkpoint of Megatron-LM lies: ``<load>/iter_0001000``, named by the tracker, or the folder itself."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import TRACKER, directory_of, read_tracker


def find_folder(folder: Path, step: int | None, marker: str) -> Path:
    """The directory of the checkpoint: ``folder`` itself if it holds ``marker`` (a pattern of file names).

    Raises:
        CheckpointError: neither it nor what its tracker (or ``step``) names holds one.
    """
    if step is None and any(folder.glob(marker)):
        return folder
    try:
        which = read_tracker(folder) if step is None else step
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no checkpoint of this format: neither {marker} nor {TRACKER}") from None
    found = Path(directory_of(folder, which))
    if not any(found.glob(marker)):
        raise CheckpointError(
            f"{found}: holds no {marker}: missing, of another format, or being written (.metadata is last)"
        )
    return found
