"""Prepare a micro-batch for the model: select this context-parallel rank's tokens, sort or pack rows, copy to the
device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import AnyGroup
from megatron.core.host_memory import copied
from megatron.core.parallel_state import resolve_group
from megatron.training.initialize import training_device

Batch = dict[str, Any]
"""Tensors of a micro-batch by name, and other arguments of the model, such as ``PackedSeqParams``."""

SEQUENCE_TENSORS = frozenset({
    "tokens", "input_ids", "text", "text_enc", "text_dec", "labels", "loss_mask", "position_ids", "types",
    "tokentype_ids", "padding_mask", "enc_mask", "dec_mask", "document",
})  # fmt: skip
"""Names of tensors [b, s, ...] with one value per token, in batches of this library or Megatron-LM."""


def get_batch_on_this_cp_rank(
    batch: Batch, cp_group: AnyGroup = None, *, sequence_keys: Collection[str] = (), whole_keys: Collection[str] = ()
) -> Batch:
    """Return this context-parallel rank's tokens of the ``batch``'s sequences (zig-zag split along dim 1), in a new
    dictionary; with one rank return ``batch`` itself. No communication.

    Args:
        batch: tensors by name. Tensors with fewer than two dims and non-tensors are returned unchanged.
        cp_group: context-parallel group, a torch ``ProcessGroup`` or a ``Group``; None: the running program's.
        sequence_keys: names, besides ``SEQUENCE_TENSORS``, of tensors [b, s, ...] to split.
        whole_keys: names of tensors with two or more dims that every rank needs in full.

    Raises:
        UserError: a dense ``attention_mask`` (pass ``cu_seqlens`` for documents), or tensors of unknown names: it is
            undefined whether their dim 1 counts tokens."""
    cp = resolve_group(cp_group, "cp")
    if cp.size == 1:
        return batch
    if batch.get("attention_mask") is not None:
        raise UserError(
            f"attention_mask: --context-parallel-size {cp.size} takes no dense masks; pass None, and boundaries of"
            " documents as cu_seqlens (--reset-attention-mask)"
        )
    wide = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() >= 2}
    split = (SEQUENCE_TENSORS | set(sequence_keys)) - set(whole_keys)
    unknown = [f"{name} {list(wide[name].shape)}" for name in wide if name not in split | set(whole_keys)]
    if unknown:
        raise UserError(
            f"batch: {', '.join(unknown)}: --context-parallel-size {cp.size} splits sequences, and nothing says if "
            "dim 1 counts tokens; name tensors [b, s, ...] in sequence_keys, and tensors that all ranks need in "
            "whole_keys (arguments of get_batch_on_this_cp_rank, attributes of a task)"
        )
    layout = TokenLayout(cp)
    return {name: layout.local(value, 1) if name in wide.keys() & split else value for name, value in batch.items()}


def sort_by_length(batch: dict[str, Tensor], lengths: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Sort the rows of tensors [b, ...] by ``lengths`` [b], longest first; return (batch, lengths). Kernels are fast if
    rows without padding are contiguous (``attention/kernels/padded_rows.py``); row order affects no loss or mask."""
    order = lengths.argsort(descending=True, stable=True)
    return {name: value[order] for name, value in batch.items()}, lengths[order]


def pack_rows(batch: dict[str, Tensor], lengths: Tensor, multiple: int) -> tuple[dict[str, Tensor], PackedSeqParams]:
    """Pack the first ``lengths[i]`` (int [b], at least 1) tokens of each row [b, s] into one row [1, n]; tensors [b]
    stay, with a value per document. Return the batch, with ``document`` and ``position_ids`` [1, n] of each token, and
    the bounds. n is a multiple of ``multiple``: padding forms one more document of zeros, whose ``sample_index`` is -1.
    On the CPU; needs ``loss_mask`` and ``sample_index``."""
    length = batch["loss_mask"].shape[1]
    if missing := -int(lengths.sum()) % multiple:
        lengths = F.pad(lengths, (0, 1), value=missing)
        batch = {name: torch.cat((value, torch.zeros_like(value[:1]))) for name, value in batch.items()}
        batch["sample_index"][-1] = -1
    places = torch.arange(length).expand(len(lengths), length)
    used = places < lengths[:, None]
    row = {name: value[used][None] if value.dim() > 1 else value for name, value in batch.items()}
    row["position_ids"] = places[used][None]
    row["document"] = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    bounds, longest = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32), int(lengths.max())
    return row, PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest)


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy a batch to ``device``; for a GPU through pinned memory, asynchronously, so that the host does not wait."""
    return {name: copied(value, device) for name, value in batch.items()}


def on_device(batch: dict[str, Tensor], documents: PackedSeqParams | None = None) -> Batch:
    """Return the batch and the bounds of its ``documents`` on this rank's device (asynchronous copy)."""
    device = training_device()
    return {**to_device(batch, device), "documents": documents and documents.on(device)}
