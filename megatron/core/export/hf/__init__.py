"""Models in Hugging Face's format, both ways. Families of models are tables in ``families/``.

    settings, attention_settings   rules between config.json and the command line's settings
    layouts                        how a tensor of ours lies in theirs
    family, registry               the table of a family, all of them, that of a folder
    conversion                     tensors made of each other, when they are read
    reader, writer                 folders
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron.core.export.files import Target
    from megatron.core.export.interchange import Interchange

MAX_SHARD_BYTES = 5 * 10**9


def load_hf_settings(folder: str | os.PathLike) -> dict[str, Any]:
    """The settings that the ``config.json`` of ``folder`` says.

    Raises:
        UserError: the family is not known, or a key has a value that no setting can represent.
    """
    from megatron.core.export.hf.registry import load_settings

    return load_settings(Path(folder))[1]


def load_hf(folder: str | os.PathLike) -> Interchange:
    """The model in ``folder``: ``config.json`` and safetensors or ``.bin``, of one file or several with their index.

    Tensors are read one at a time, when they are asked for. Its assets are the tokenizer's files (``tokenizer/…``), and
    ``hf/config.json`` and ``hf/generation_config.json``, from which :func:`save_hf` takes what settings do not say.

    Raises:
        UserError: a key of config.json that cannot be represented, or any tensor that is missing, left over, damaged or
            of another shape than config.json makes it.
    """
    from megatron.core.export.hf.reader import load

    return load(Path(folder))


def save_hf(
    model: Interchange, folder: str | os.PathLike | Target, *, dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES, family: str | None = None,
) -> None:  # fmt: skip
    """Write ``model`` as the new folder ``folder``; it appears complete or not at all. A ``Target`` is filled, where an
    earlier attempt at it ended, and left for the caller to publish.

    Args:
        dtype: of the weights; None: as they are.
        max_shard_bytes: of one file; a larger tensor has a file of its own.
        family: the ``model_type`` to write; None: that of the folder where the model came from, if its settings are
            still such a model's, else the first whose they are.

    Raises:
        UserError: the folder exists or cannot be written; no family has such a model; a tensor is missing or left over.
    """
    from megatron.core.export.hf.writer import save

    where = Path(folder) if isinstance(folder, str | os.PathLike) else folder
    save(model, where, dtype, max_shard_bytes=max_shard_bytes, family=family)
