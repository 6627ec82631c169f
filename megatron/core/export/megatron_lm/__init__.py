"""Checkpoints of Megatron-LM itself, both formats, to and from this project's names (``Interchange``).

``torch`` (``mp_rank_…/model_optim_rng.pt``) and ``torch_dist`` (``__R_C.distcp``) hold pickles; these are only ever
read by ``unpickler.py``, which builds tensors and plain data and calls nothing. ``names.py`` is the one table of names
and splits.
"""

from __future__ import annotations

import os

from megatron.core.export.interchange import Interchange
from megatron.core.export.megatron_lm.torch_dist import load_torch_dist
from megatron.core.export.megatron_lm.torch_format import load_torch
from megatron.core.export.megatron_lm.writer import save_torch_dist


def load_megatron_torch(
    folder: str | os.PathLike, step: int | None = None, *, padded_vocabulary: bool = False
) -> Interchange:
    """The model, and training state, of a ``--ckpt-format torch`` folder of any tensor- and pipeline-parallel sizes.

    Arguments and errors as for :func:`load_megatron_torch_dist`.
    """
    return load_torch(folder, step, padded_vocabulary=padded_vocabulary)


def load_megatron_torch_dist(
    folder: str | os.PathLike, step: int | None = None, *, padded_vocabulary: bool = False
) -> Interchange:
    """The model, and training state, of a ``--ckpt-format torch_dist`` folder. Tensors are read later, one at a time.

    Args:
        folder: what ``--load`` names, or one ``iter_…`` in it.
        step: the iteration; None: the one that the tracker names.
        padded_vocabulary: keep the rows that pad the vocabulary. Its softmax includes them, so that a run goes on with
            exactly the losses that it would have had; without them it goes on with the true vocabulary.

    Raises:
        CheckpointError: a file is missing, damaged or being written; a crafted pickle; a layer without counterpart.
    """
    return load_torch_dist(folder, step, padded_vocabulary=padded_vocabulary)


def save_megatron_torch_dist(interchange: Interchange, folder: str | os.PathLike) -> None:
    """Write ``<folder>/iter_…`` (``release`` without an iteration) and its tracker, for Megatron-LM's loader.

    A layer at a time is in memory. Optimizer state is that of its optimizer that is not distributed. There are no
    random states: it takes --no-load-rng to go on from it.

    Raises:
        CheckpointError: it exists already; a tensor has no counterpart there.
    """
    save_torch_dist(interchange, folder)
