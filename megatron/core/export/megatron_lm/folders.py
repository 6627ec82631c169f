"""Where a checkpoint of Megatron-LM lies: ``<load>/iter_0001000``, named by the tracker, or the folder itself."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import read_regular_file

TRACKER = "latest_checkpointed_iteration.txt"


def find_folder(folder: Path, step: int | None, marker: str) -> Path:
    """The directory of the checkpoint: ``folder`` itself if it holds ``marker`` (a pattern of file names).

    Raises:
        CheckpointError: neither it nor what its tracker (or ``step``) names holds one.
    """
    if step is None and any(folder.glob(marker)):
        return folder
    if step is None:
        path = folder / TRACKER
        try:
            text = read_regular_file(path, 4096, follow=True).decode(errors="replace").strip()
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: no checkpoint of this format: neither {marker} nor {TRACKER}") from None
        if text != "release" and not (text.isascii() and text.isdigit() and len(text) < 19):
            raise CheckpointError(f"{path} holds {text[:40]!r} instead of an iteration or 'release'")
        name = text if text == "release" else f"iter_{int(text):07d}"
    else:
        name = f"iter_{step:07d}"
    if not any((folder / name).glob(marker)):
        raise CheckpointError(
            f"{folder / name}: holds no {marker}: missing, of another format, or being written (.metadata is last)"
        )
    return folder / name
