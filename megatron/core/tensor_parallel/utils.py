"""Splits of tensors and vocabularies under Megatron-LM's names."""

from __future__ import annotations

from torch import Tensor

from megatron import serve_other_names
from megatron.core.groups.process_groups import AnyGroup
from megatron.core.parallel_state import resolve_group
from megatron.core.tensor_parallel import operators


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split the last dim into equal parts: views, or copies with ``contiguous_split_chunks``. Raises ValueError."""
    if tensor.shape[-1] % num_partitions:
        raise ValueError(f"last dim of shape {tuple(tensor.shape)} is not divisible by {num_partitions}")
    parts = tensor.split(tensor.shape[-1] // num_partitions, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False, tp_group: AnyGroup = None) -> Tensor:
    """Return this tensor-parallel rank's chunk of the flattened ``tensor`` (contiguous): a view, or with ``new_buffer``
    a copy without gradient. Raises ValueError if the number of elements is not divisible."""
    part = operators.equal_parts(tensor.view(-1), resolve_group(tp_group), 0)[resolve_group(tp_group).rank]
    return part.detach().clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, tp_group: AnyGroup = None) -> Tensor:
    """All-gather the flattened, equal chunks of all tensor-parallel ranks (``tp_group``; None: the running program's)
    and concatenate them in rank order: a new 1-d tensor without gradient, also for one rank."""
    group, part = resolve_group(tp_group), tensor.detach().view(-1)
    return part.clone() if group.size == 1 else operators.all_gather_along_first_dim(part, group)


class VocabUtility:
    """First and last (exclusive) vocabulary entry of a rank, for an equal split."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range of ``rank`` for shards of ``per_partition_vocab_size`` entries."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return the range of ``rank`` for ``world_size`` equal shards of ``global_vocab_size`` entries; ValueError if
        the size is not divisible."""
        if global_vocab_size % world_size:
            raise ValueError(f"global_vocab_size {global_vocab_size} is not divisible by world_size {world_size}")
        share = global_vocab_size // world_size
        return VocabUtility.vocab_range_from_per_partition_vocab_size(share, rank, world_size)


serve_other_names(__name__)
