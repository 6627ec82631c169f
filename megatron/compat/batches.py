"""Batches of entry scripts as ``megatron.core.utils`` shares them since 2026: dictionaries that the first
tensor-parallel rank reads.

The names are ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` [b, s], ``attention_mask`` (bool [b, 1, s, s],
True where hidden, or None) and for documents packed into rows ``cu_seqlens`` [b, n] and ``max_seqlen`` [b]."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import AnyGroup
from megatron.core.tensor_parallel.data import broadcast_batch
from megatron.training.data import batch as batches
from megatron.training.data.batch import Batch

PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")
PER_BATCH = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
NAMES = (*PER_TOKEN, "attention_mask", *PER_BATCH)
"""Keys of every batch; values that a batch lacks are None."""


def get_batch_on_this_tp_rank(
    batch: Batch, has_cu_seqlens: bool | None = False, is_hybrid_cp: bool | None = False, **options: object
) -> Batch:
    """Return the first tensor-parallel rank's ``batch`` on every rank of its group, with all of :data:`NAMES` (None if
    missing) and its further keys. Collective: the other ranks' ``batch`` is not read.

    Without ``has_cu_seqlens`` (``is_sft`` in earlier releases) document boundaries of our data sets become an attention
    mask, and ``cu_seqlens`` None. ``options`` (groups, ranks, sizes) are ignored: the running program has them.
    Raises UserError for ``is_hybrid_cp``."""
    if is_hybrid_cp:
        _reject_hybrid()
    shared = broadcast_batch({**dict.fromkeys(NAMES), **batch})
    if not (has_cu_seqlens or options.get("is_sft")):
        shared = {**with_attention_mask(shared), "cu_seqlens": None}
    return shared


def with_attention_mask(batch: Batch) -> Batch:
    """``batch`` with ``attention_mask``: made from our data sets' ``cu_seqlens`` (of the flattened [b * s] tokens)
    if it does not exist yet, else None."""
    mask = batch.get("attention_mask")
    if mask is None and batch.get("cu_seqlens") is not None:
        mask = _document_mask(batch["cu_seqlens"], *batch["tokens"].shape)
    return {**batch, "attention_mask": mask}


def _document_mask(cu_seqlens: Tensor, batch_size: int, length: int) -> Tensor:
    """Mask of positions hidden by causality or document boundaries, bool [b, 1, s, s]."""
    tokens = torch.arange(batch_size * length, device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens.long(), tokens, right=True).view(batch_size, length)
    visible = documents[:, :, None] == documents[:, None, :]
    return ~visible.tril()[:, None]


def get_batch_on_this_cp_rank(
    batch: Batch,
    is_hybrid_cp: AnyGroup | bool = False,
    cp_group: AnyGroup = None,
    *,
    sequence_keys: Collection[str] = (),
    whole_keys: Collection[str] = (),
    **ignored: object,
) -> Batch:
    """Return this context-parallel rank's tokens of the tensors [b, s] of ``batch``: two of 2 x CP chunks of every row,
    also if rows contain several documents (``use_per_sequence_balancing``). Without context parallelism returns
    ``batch`` itself.

    Args:
        is_hybrid_cp: True is rejected. Older releases have ``cp_group`` in this position; a group is accepted here too.
        cp_group: context-parallel group; None: the running program's.
        sequence_keys, whole_keys: see ``megatron.training.data.batch``."""
    if is_hybrid_cp is True:
        _reject_hybrid()
    group = cp_group if isinstance(is_hybrid_cp, bool | None) else is_hybrid_cp
    per_token = {name: value for name, value in batch.items() if name not in PER_BATCH}
    split = batches.get_batch_on_this_cp_rank(per_token, group, sequence_keys=sequence_keys, whole_keys=whole_keys)
    return batch if split is per_token else {**batch, **split}


def flatten_batch_for_packed_sequences(batch: Batch) -> Batch:
    """Return a copy with its rows concatenated, [1, b * s], and ``cu_seqlens`` [1, n]; ``batch`` itself without
    ``cu_seqlens``. A row of ``cu_seqlens`` [b, n] counts from 0 to s and may repeat s at its end."""
    if batch.get("cu_seqlens") is None:
        return batch
    flat = dict(batch)
    for name in PER_TOKEN:
        if flat.get(name) is not None:
            flat[name] = flat[name].reshape(1, -1)
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if flat.get(name) is not None:
            flat[name] = _end_to_end(flat[name])[None]
    if flat.get("max_seqlen") is not None:
        flat["max_seqlen"] = flat["max_seqlen"].max().reshape(1)
    return flat


def _end_to_end(cu_seqlens: Tensor) -> Tensor:
    """Boundaries [n] of the concatenated rows, from those [b, n] of every row."""
    lengths = cu_seqlens.diff(dim=1).flatten()
    return F.pad(lengths[lengths > 0].cumsum(0), (1, 0)).to(cu_seqlens.dtype)


def _reject_hybrid() -> NoReturn:
    raise UserError(
        "--hybrid-context-parallel: not available in the batches of a program; use pretrain_gpt.py of this library"
    )
