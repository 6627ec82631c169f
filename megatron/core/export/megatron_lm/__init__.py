"""Checkpoints of Megatron-LM itself, both formats, to and from this project's names (``Interchange``).

``torch`` (``mp_rank_…/model_optim_rng.pt``) and ``torch_dist`` (``__R_C.distcp``) hold pickles; these are only ever read by
``unpickler.py``, which builds tensors and plain data and calls nothing.
"""

from __future__ import annotations

import os

from megatron.core.export.interchange import Interchange


def load_megatron_torch(folder: str | os.PathLike, step: int | None = None) -> Interchange:
    """The model, and training state, of a ``--ckpt-format torch`` folder; ``step``: None for the tracker's."""
    raise NotImplementedError


def load_megatron_torch_dist(folder: str | os.PathLike, step: int | None = None) -> Interchange:
    """The model, and training state, of a ``--ckpt-format torch_dist`` folder; ``step``: None for the tracker's."""
    raise NotImplementedError


def save_megatron_torch_dist(interchange: Interchange, folder: str | os.PathLike) -> None:
    """Write ``<folder>/iter_…`` (``release`` without an iteration) and its tracker, as Megatron-LM's loader takes them."""
    raise NotImplementedError
