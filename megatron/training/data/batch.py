"""A micro-batch on its way to the model: this context-parallel rank's tokens, on this rank's device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError


def get_batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """This context-parallel rank's tokens of tensors [b, s, ...]; what is not per token stays as it is.

    A dense ``attention_mask`` is refused where ranks share sequences: describe documents by ``cu_seqlens``.
    """
    cp = parallel_state.get_process_groups().cp
    if cp.size == 1:
        return batch
    if batch.get("attention_mask") is not None:
        raise UserError(
            f"attention_mask: --context-parallel-size {cp.size} takes no dense masks; pass None, and boundaries of"
            " documents as cu_seqlens (--reset-attention-mask)"
        )

    def part(value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.dim() >= 2
        return zigzag.local_part(value, cp.rank, cp.size) if per_token else value

    return {name: part(value) for name, value in batch.items()}


def longest_first(batch: dict[str, Tensor], lengths: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The rows of tensors [b, ...] by ``lengths`` [b] of their text: kernels are quick on those without padding where
    they stand together (``attention/kernels/padded_rows.py``), and no loss or mask depends on a row's place."""
    order = lengths.argsort(descending=True, stable=True)
    return {name: value[order] for name, value in batch.items()}, lengths[order]


def laid_end_to_end(
    batch: dict[str, Tensor], lengths: Tensor, multiple: int
) -> tuple[dict[str, Tensor], PackedSeqParams]:  # fmt: skip
    """One row [1, n] of the first ``lengths`` (int [b], at least 1) tokens of each of the rows [b, s], and the bounds
    of these documents. Of every token ``document`` and ``position_ids``, its place in the document.

    n is a multiple of ``multiple``. What fills it up is one more document, zeros; its values [b] are 0, its
    ``sample_index`` is -1.
    """
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
    return row, PackedSeqParams("thd", bounds, bounds, longest, longest)


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch on ``device``; to a GPU from page-locked memory, so that the host goes on at once."""
    if device.type == "cuda":
        batch = {name: value if value.is_cuda else value.pin_memory() for name, value in batch.items()}
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
