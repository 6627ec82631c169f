"""The attention core of ranks that share every sequence: one form of ``core.context_parallel``, chosen once.

Legend: s sequence (local), b batch, a query heads, g key/value groups, d head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.attention.context_parallel.forms import (
    AllGatherAttention,
    AllToAllAttention,
    Attention,
    RingAttention,
)
from megatron.core.attention.context_parallel.kernels import WeightDropout, make_block_kernel
from megatron.core.attention.context_parallel.tiles import Bounds, Visibility
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.random.dropout import DropoutCoordinates

_ALONE = Group("alone")


class WholeSequenceCore:
    """An attention core for whole sequences as the inner attention of an all-to-all."""

    def __init__(self, core: nn.Module) -> None:
        self.core = core

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Bounds | None, dropout: WeightDropout | None
    ) -> Tensor:
        assert dropout is None
        packed = None if documents is None else _boundaries(documents, query.device)
        return self.core(query, key, value, None, packed).unflatten(-1, query.shape[-2:])


@functools.lru_cache(maxsize=8)
def _boundaries(documents: Bounds, device: torch.device) -> PackedSeqParams:
    """On the device; kept, since all layers ask for the same."""
    cu_seqlens = torch.tensor(documents, dtype=torch.int32, device=device)
    return PackedSeqParams(cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, bounds=documents)


class ContextParallelAttention(nn.Module):
    """Query [s, b, a, d], key and value [s, b, g, d] of this rank's tokens -> [s, b, a * d]."""

    def __init__(
        self, form: Attention, config: TransformerConfig, layer_number: int, first_head: int
    ) -> None:
        super().__init__()
        self.form, self.rate, self.first_head = form, config.attention_dropout, first_head
        self.site = ("layer", layer_number, "attention")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        dropout: DropoutCoordinates | None = None,
    ) -> Tensor:
        """Boundaries of packed documents count tokens of the whole sequences."""
        if attention_mask is not None:
            raise UserError(
                "attention_mask: ranks that share a sequence (context parallelism) take no dense masks; describe "
                "documents by packed_seq_params, windows by window_size"
            )
        documents = None if packed_seq_params is None else packed_seq_params.document_bounds()
        return self.form(query, key, value, documents, self._weight_dropout(dropout)).flatten(2)

    def _weight_dropout(self, at: DropoutCoordinates | None) -> WeightDropout | None:
        if not self.rate or not self.training:
            return None
        if at is None:
            raise ValueError(
                f"dropout at {self.site} needs the coordinates of its tokens: pass dropout=DropoutCoordinates(...), "
                "set attention_dropout to 0 or call eval()"
            )
        return WeightDropout(at.stream, self.rate, self.site, self.first_head, at.sample_b)


def make_context_parallel_attention(
    config: TransformerConfig,
    layer_number: int,
    visibility: Visibility,
    scale: float,
    groups: ProcessGroups,
    whole_sequence_core: nn.Module | None,
) -> ContextParallelAttention:
    """The form that ``cp_comm_type`` names for this layer.

    ``whole_sequence_core`` serves all-to-all where nothing but its speed is asked for; None: the reference does.
    """
    kind = comm_type_of_layer(config.cp_comm_type, layer_number)
    assert config.num_attention_heads is not None and config.kv_channels is not None
    kernel = make_block_kernel(
        scale, config.attention_backend, config.params_dtype, channels=config.kv_channels,
        dropout_rate=config.attention_dropout, ring_window=visibility.window is not None and "p2p" in kind,
    )  # fmt: skip
    local_heads = config.num_attention_heads // groups.tp.size
    first_head = groups.tp.rank * local_heads
    form: Attention
    if kind == "p2p":
        form = RingAttention(groups.cp, visibility, kernel)
    elif kind == "allgather":
        form = AllGatherAttention(groups.cp, visibility, kernel)
    else:
        inner_group, outer_group = (groups.cp, _ALONE) if kind == "a2a" else (groups.cp_a2a, groups.cp_p2p)
        _check_heads(config, groups.tp, inner_group)
        if inner_group.size * outer_group.size != groups.cp.size:
            raise UserError(
                f"cp_comm_type a2a+p2p: context_parallel_size {groups.cp.size} is not split into two levels; give "
                "hierarchical_context_parallel_sizes to initialize_model_parallel"
            )
        inner: Attention = RingAttention(outer_group, visibility, kernel)
        if outer_group.size == 1 and whole_sequence_core is not None:
            inner = WholeSequenceCore(whole_sequence_core)
        form = AllToAllAttention(inner_group, inner)
        first_head += inner_group.rank * (local_heads // inner_group.size)
    return ContextParallelAttention(form, config, layer_number, first_head)


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
