"""Which form of context parallelism a layer's attention has, and which heads this rank then computes.

Legend: s sequence (local), b batch, a query heads, g key/value groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.core.attention.context_parallel.forms import (
    AllGatherAttention,
    AllToAllAttention,
    Attention,
    RingAttention,
    WholeSequence,
)
from megatron.core.attention.kernels.base import Form, Kernel
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import Group, ProcessGroups

_ALONE = Group("alone")


class Layout(NamedTuple):
    """How a layer's queries meet all keys."""

    needs: Form
    """What the kernel must do."""
    form: Callable[[Kernel], Attention]
    first_head: int
    """Global number of the first head that this rank computes."""


def layout_of_layer(config: TransformerConfig, layer_number: int, groups: ProcessGroups) -> Layout:
    """The form that ``cp_comm_type`` names for this layer; a ring of one rank is attention over whole sequences.

    Raises:
        UserError: all-to-all cannot give every rank the same number of heads.
    """
    kind = comm_type_of_layer(config.cp_comm_type, layer_number) if groups.cp.size > 1 else "p2p"
    assert config.num_attention_heads is not None
    local_heads = config.num_attention_heads // groups.tp.size
    first_head = groups.tp.rank * local_heads
    if kind == "p2p":
        return _ring(groups.cp, first_head)
    if kind == "allgather":
        return Layout("gather", lambda kernel: AllGatherAttention(groups.cp, kernel), first_head)
    inside, outside = (groups.cp, _ALONE) if kind == "a2a" else (groups.cp_a2a, groups.cp_p2p)
    _check_heads(config, groups.tp, inside)
    if inside.size * outside.size != groups.cp.size:
        raise UserError(
            f"cp_comm_type a2a+p2p: context_parallel_size {groups.cp.size} is not split into two levels; give "
            "hierarchical_context_parallel_sizes to initialize_model_parallel"
        )
    ring = _ring(outside, first_head + inside.rank * (local_heads // inside.size))
    return ring._replace(form=lambda kernel: AllToAllAttention(inside, ring.form(kernel)))


def _ring(group: Group, first_head: int) -> Layout:
    if group.size == 1:
        return Layout("whole", WholeSequence, first_head)
    return Layout("ring", lambda kernel: RingAttention(group, kernel), first_head)


def comm_type_of_layer(kinds: Sequence[str] | str, layer_number: int) -> str:
    """One for all layers, or one per layer of the whole model (from 1)."""
    if isinstance(kinds, str):
        return kinds
    return kinds[0] if len(kinds) == 1 else kinds[layer_number - 1]


def _check_heads(config: TransformerConfig, tp: Group, group: Group) -> None:
    for name in ("num_attention_heads", "num_query_groups"):
        count = getattr(config, name)
        if count % (tp.size * group.size):
            raise UserError(
                f"{name} {count}: cp_comm_type a2a gives {group.size} ranks the same number of heads each, so it must "
                f"be a multiple of tensor_model_parallel_size {tp.size} x {group.size}; take p2p or allgather instead"
            )
