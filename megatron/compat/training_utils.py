"""Small helpers that entry scripts import: printing on one rank, batches, averages of losses."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.compat.batches import get_batch_on_this_cp_rank, with_attention_mask
from megatron.compat.script_data import MicroBatches
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.stage_model import unwrapped
from megatron.core.tensor_parallel.data import broadcast_batch
from megatron.data import blend
from megatron.training.data.batch import Batch, to_device
from megatron.training.initialize import training_device

__all__ = [
    "average_losses_across_data_parallel_group",
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_blend_and_blend_per_split",
    "get_ltor_masks_and_position_ids",
    "is_first_or_last_pipeline_stage",
    "print_rank_0",
    "print_rank_last",
    "unwrap_model",
]


def get_blend_and_blend_per_split(
    args: blend.BlendSettings,
) -> tuple[blend.Blend | None, list[blend.Blend | None] | None]:
    """Same as :func:`megatron.data.blend.get_blend_and_blend_per_split`; ``args`` may lack ``mock_data`` (False)."""
    if not hasattr(args, "mock_data"):
        args = Namespace(**vars(args), mock_data=False)
    return blend.get_blend_and_blend_per_split(args)


def _rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def print_rank_0(message: object) -> None:
    """To stdout, from rank 0 only."""
    if _rank_and_world_size()[0] == 0:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def print_rank_last(message: object) -> None:
    """To stdout, from the last rank only."""
    rank, world_size = _rank_and_world_size()
    if rank == world_size - 1:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def get_batch_on_this_tp_rank(data_iterator: Iterator[dict] | None, mtp_on_this_rank: bool = False) -> Batch:
    """Return the next micro-batch on this rank's device: tokens, labels, loss_mask, attention_mask, position_ids, in
    the order in which scripts unpack ``values()``.

    Inside :func:`pretrain` every rank reads its own ``data_iterator``. In a program with a custom loop the first
    tensor-parallel rank reads for its group (collective), and the others may pass None. ``attention_mask`` is None, as
    the causal mask needs no tensor, except with ``--reset-attention-mask``: bool [b, 1, s, s], True where a token may
    not be seen. Your own task passes ``cu_seqlens`` on instead, which is faster. ``mtp_on_this_rank`` is accepted:
    every stage gets all tensors."""
    if isinstance(data_iterator, MicroBatches):
        batch = to_device(next(data_iterator), training_device())
    else:
        reads = parallel_state.get_process_groups().tp.is_first
        batch = broadcast_batch(next(data_iterator) if reads and data_iterator is not None else None)
    batch = with_attention_mask(batch)
    return {name: batch[name] for name in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")}


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Whether this rank reads data: it holds the embedding or the loss."""
    return parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Return the means over data- and context-parallel ranks of scalar losses as one detached tensor [n]; every rank
    counts equally. Collective. ``losses`` are not changed."""
    averaged = torch.cat([loss.detach().clone().view(1) for loss in losses])
    group = parallel_state.get_process_groups().dp_cp
    if group.size > 1:
        dist.all_reduce(averaged, group=group.handle)
        averaged /= group.size
    return averaged


def get_ltor_masks_and_position_ids(
    data: Tensor, eod_token: int, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(attention_mask bool [b or 1, 1, s, s] True where hidden, loss_mask fp32 [b, s], position_ids int64 [b,
    s])`` for ``data`` int64 [b, s], on its device. A document ends with its ``eod_token``: resets apply after it,
    ``eod_mask_loss`` at it. The mask has one row per sample only with ``reset_attention_mask``."""
    is_eod = data == eod_token
    documents = torch.cumsum(torch.nn.functional.pad(is_eod.long(), (1, 0))[:, :-1], dim=1)
    causal = torch.ones(data.shape[1], data.shape[1], dtype=torch.bool, device=data.device).tril()
    visible = causal[None]
    if reset_attention_mask:
        visible = visible & (documents[:, :, None] == documents[:, None, :])
    position_ids = torch.arange(data.shape[1], device=data.device).expand_as(data).clone()
    if reset_position_ids:
        starts = torch.nn.functional.pad(is_eod, (1, 0))[:, :-1]
        position_ids -= torch.where(starts, position_ids, 0).cummax(dim=1).values
    loss_mask = torch.ones(data.shape, dtype=torch.float32, device=data.device)
    if eod_mask_loss:
        loss_mask[is_eod] = 0.0
    return ~visible[:, None], loss_mask, position_ids


def unwrap_model(model: nn.Module | list[nn.Module]) -> nn.Module | list[nn.Module]:
    """The module inside data-parallel wrappers."""
    if isinstance(model, list):
        return [unwrapped(chunk) for chunk in model]
    return unwrapped(model)
