"""The forms of context-parallel attention: how queries meet all keys.

``WholeSequence``       a ring of one rank: nothing travels, and the kernel's output is the result
``RingAttention``       keys and values travel round while each rank attends to the block it holds (Liu et al. 2023)
``AllGatherAttention``  every rank gathers all keys and values, again in backward, and keeps only its own
``AllToAllAttention``   heads are exchanged for sequence: each rank has whole sequences of some heads (Jacobs et al.
                        2023); inside, any attention, such as a ring over an outer group (two levels)

All take and give local tensors [s, b, heads, d] in zig-zag order and store local tensors alone for backward (the third
form: as many elements, of fewer heads and longer sequences).

Legend: s sequence (local), b batch, a query heads, g key/value groups, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.context_parallel.block_attention import BlockGradients, GradientSum, OnlineSoftmax
from megatron.core.attention.context_parallel.exchange import gather_heads, neighbour_exchange, scatter_heads
from megatron.core.attention.context_parallel.zigzag import Spans
from megatron.core.attention.kernels.base import Form, Kernel
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.masks import Mask
from megatron.core.attention.sink import has_sink, sink_gradient
from megatron.core.attention.tiles import Tile, plan_tiles
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups import collective_names
from megatron.core.groups.process_groups import Group, ProcessGroups

Attention = Callable[..., Tensor]
"""``(query, key, value, mask, sink=None) -> out``; ``sink`` [a] joins every softmax (``sink.py``)."""
_ALONE = Group("alone")


@dataclass(frozen=True)
class _Plan:
    """One call of a form: the tiles of each block of keys, kernel with dropout and bias, group."""

    group: Group
    kernel: Kernel
    blocks: tuple[tuple[Tile, ...], ...]


class _Ring(torch.autograd.Function):
    """Forward keeps query, own keys and values, output and log-sum-exp; backward sends keys and values round again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Tensor | None, plan: _Plan
    ) -> Tensor:
        own = held = torch.stack((key, value))  # one message a step instead of two
        softmax = OnlineSoftmax(query, plan.kernel)
        for step, tiles in enumerate(plan.blocks):
            # before the attention that hides it; the last block has been everywhere
            coming = neighbour_exchange(held, plan.group) if step < len(plan.blocks) - 1 else None
            softmax.add_block(held[0], held[1], tiles)
            held = held if coming is None else coming.wait()
        out, lse = softmax.finish(sink)
        # own keys and values alone, though all were seen: what is kept must not grow with the group
        ctx.save_for_backward(query, own, out, lse, sink)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, own, out, lse, sink = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gradients = BlockGradients(grad, query, out, lse, plan.kernel)
        # own keys come last: what other ranks add to their gradients arrives beside the computation of this rank's
        coming = neighbour_exchange(own, plan.group) if len(plan.blocks) > 1 else None
        travelling = None  # the gradient of the block that is held comes from the ranks that held it before
        for step, tiles in enumerate(plan.blocks[1:], 2):
            assert coming is not None
            held = coming.wait()
            coming = neighbour_exchange(held, plan.group) if step < len(plan.blocks) else None
            sums = GradientSum(2, held[0], travelling)
            gradients.add_block(held, tiles, sums)
            # keys travel between the same ranks meanwhile: gloo tells them apart by the tag, NCCL by the order, which
            # is therefore the same on all ranks
            travelling = neighbour_exchange(sums.total(), plan.group, tag=1)
        sums = GradientSum(2, own[0], travelling)
        gradients.add_block(own, plan.blocks[0], sums)
        grad_key, grad_value = sums.result()
        of_sink = None if sink is None else sink_gradient(grad, out, lse, sink)
        return gradients.grad_query(), grad_key, grad_value, of_sink, gradients.grad_bias, None


class _AllGather(torch.autograd.Function):
    """Forward keeps query, own keys and values, output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Tensor | None, plan: _Plan
    ) -> Tensor:
        own = torch.stack((key, value))
        everything = _gather_whole(own, plan.group)
        softmax = OnlineSoftmax(query, plan.kernel)
        softmax.add_block(everything[0], everything[1], plan.blocks[0])
        out, lse = softmax.finish(sink)
        ctx.save_for_backward(query, own, out, lse, sink)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, own, out, lse, sink = ctx.saved_tensors
        plan: _Plan = ctx.plan
        everything = _gather_whole(own, plan.group)
        gradients = BlockGradients(grad, query, out, lse, plan.kernel)
        sums = GradientSum(2, everything[0])
        gradients.add_block(everything, plan.blocks[0], sums)
        grad_key, grad_value = _sum_local(sums.total(), plan.group).to(query.dtype)
        of_sink = None if sink is None else sink_gradient(grad, out, lse, sink)
        return gradients.grad_query(), grad_key, grad_value, of_sink, gradients.grad_bias, None


def _gather_whole(own: Tensor, group: Group) -> Tensor:
    """[2, s, b, g, d] of every rank -> whole sequences in natural order."""
    if group.size == 1:
        return own
    parts = own.new_empty((group.size * own.shape[0], *own.shape[1:]))
    collective_names.all_gather(parts, own, group=group.handle)
    return zigzag.whole(parts.chunk(group.size), dim=1)


def _sum_local(total: Tensor, group: Group) -> Tensor:
    """The sum over ranks of [2, whole s, b, g, d], this rank's tokens of it."""
    if group.size == 1:
        return total
    parts = torch.cat([zigzag.local_part(total, rank, group.size) for rank in range(group.size)])
    result = parts.new_empty((total.shape[0], *parts.shape[1:]))
    collective_names.reduce_scatter(result, parts, group=group.handle)
    return result


def _refuse_dense(mask: Mask) -> None:
    if mask.hidden is not None:
        raise UserError(
            "attention_mask: context parallelism and attention sinks take no dense masks; describe documents by "
            "packed_seq_params, windows by window_size"
        )


@dataclass(frozen=True)
class WholeSequence:
    """Attention where no rank shares a sequence, without a sink."""

    kernel: Kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, sink: None = None) -> Tensor:
        """query [s, b, a, d], key [t, b, g, d], value [t, b, g, e] -> [s, b, a, e]."""
        assert sink is None, "a sink needs a form with the log-sum-exp"
        return self.kernel.attend(query, key, value, mask)


@dataclass(frozen=True)
class EqualHeads:
    """``inner`` for kernels and forms whose keys and values have heads of one size: zeros fill up the smaller ones."""

    inner: Attention
    only_documents: bool = False
    """Whether ``inner`` takes heads of two sizes but for packed documents."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, sink: Tensor | None = None) -> Tensor:
        """query [s, b, a, d], key [t, b, g, d], value [t, b, g, e] -> [s, b, a, e]."""
        if self.only_documents and mask.documents is None:
            return self.inner(query, key, value, mask, sink)
        width = max(key.shape[-1], value.shape[-1])
        parts = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        return self.inner(*parts, mask, sink)[..., : value.shape[-1]]


@dataclass(frozen=True)
class _BlockAttention:
    """Blocks of keys, whose partial results are merged. query [s, b, a, d], key and value [s, b, g, d] -> [s, b, a,
    d]."""

    group: Group
    kernel: Kernel

    def _plan(self, query: Tensor, key: Tensor, mask: Mask, blocks: Sequence[Spans]) -> _Plan:
        """The plan of this rank's queries and ``blocks`` of whole sequences of keys, which may be others than those of
        the queries."""
        _refuse_dense(mask)
        length, key_length = (len(x) * self.group.size for x in (query, key))
        queries, kernel = zigzag.spans(length, self.group.rank, self.group.size), self.kernel
        merge = mask.dropout is None and mask.bias is None  # both go by positions
        if not merge:
            assert isinstance(kernel, UnfusedAttention)
            kernel = kernel.with_mask(mask)
        documents, of_keys = mask.bounds or (None, None)
        others = None if of_keys is None or of_keys is documents else (of_keys, key_length)
        tiles = (plan_tiles(queries, keys, mask.visibility, length, documents, merge, others) for keys in blocks)
        return _Plan(self.group, kernel, tuple(tiles))


class RingAttention(_BlockAttention):
    """Keys and values go round ``group``; the transfer of the next block runs beside the computation of this one."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, sink: Tensor | None = None) -> Tensor:
        size, rank = self.group.size, self.group.rank
        spans = [zigzag.spans(len(key) * size, (rank - step) % size, size) for step in range(size)]
        return _Ring.apply(query, key, value, sink, mask.bias, self._plan(query, key, mask, spans))


class AllGatherAttention(_BlockAttention):
    """All keys and values on every rank, for the time of one layer's attention."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, sink: Tensor | None = None) -> Tensor:
        everything = ((0, len(key) * self.group.size),)
        return _AllGather.apply(query, key, value, sink, mask.bias, self._plan(query, key, mask, [everything]))


@dataclass(frozen=True)
class AllToAllAttention:
    """Heads for sequence over ``group``: ``inner`` sees a share of the heads and ``group.size`` times the sequence.

    The heads of ``inner`` start at ``group.rank * heads / group.size`` of this rank's; with an inner ring over an outer
    group, local sequences are in that group's zig-zag order.

    Query, key and value travel in one collective: of attention at s 32768 on two H200s, forward and backward
    (``torchrun --nproc-per-node 2 benchmarks/bench_context_parallel.py``), 30.3 ms against 30.8 ms with one each and
    copies element by element. What was measured and lost, on four, where three took 15.6 ms: chunks sent straight into
    their places, with one copy per exchange instead of two, 16.8 ms, as many small messages carry less than one
    collective; halves of the heads, one exchanged beside the attention of the other, 18.4 ms. Through copy engines a
    step of 32 layers took 9.11 s, over NCCL 9.03 s: nothing runs beside an exchange.
    """

    group: Group
    inner: Attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, sink: Tensor | None = None) -> Tensor:
        """query [s, b, a, d], key and value [s, b, g, d] -> [s, b, a, d]; a and g are multiples of the group's size."""
        _refuse_dense(mask)
        query, key, value = scatter_heads((query, key, value), self.group)
        own, bias = (None if x is None else x.chunk(self.group.size)[self.group.rank] for x in (sink, mask.bias))
        return gather_heads(self.inner(query, key, value, replace(mask, bias=bias), own), self.group)


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
    local_heads = config.num_attention_heads // groups.tp.size
    first_head = groups.tp.rank * local_heads
    sink = has_sink(config)
    if kind == "p2p":
        return _ring(groups.cp, first_head, sink)
    if kind == "allgather":
        return Layout("gather", lambda kernel: AllGatherAttention(groups.cp, kernel), first_head)
    inside, outside = (groups.cp, _ALONE) if kind == "a2a" else (groups.cp_a2a, groups.cp_p2p)
    _check_heads(config, groups.tp, inside)
    if inside.size * outside.size != groups.cp.size:
        raise UserError(
            f"cp_comm_type a2a+p2p: context_parallel_size {groups.cp.size} is not split into two levels; give "
            "hierarchical_context_parallel_sizes to initialize_model_parallel"
        )
    ring = _ring(outside, first_head + inside.rank * (local_heads // inside.size), sink)

    def form(kernel: Kernel) -> Attention:
        # plain torch as a ring even of one: blocks keep a log-sum-exp for backward, whole sequences all s^2 weights
        inner = RingAttention(outside, kernel) if isinstance(kernel, UnfusedAttention) else ring.form(kernel)
        return AllToAllAttention(inside, inner)

    return ring._replace(form=form)


def _ring(group: Group, first_head: int, sink: bool) -> Layout:
    """A ring of one is the kernel itself, unless a sink needs its log-sum-exp."""
    if group.size == 1 and not sink:
        return Layout("whole", WholeSequence, first_head)
    if group.size == 1:
        return Layout("gather", lambda kernel: RingAttention(group, kernel), first_head)
    return Layout("ring", lambda kernel: RingAttention(group, kernel), first_head)


def comm_type_of_layer(kinds: Sequence[str] | str, layer_number: int) -> str:
    """One for all layers, or one per layer of the whole model (from 1); layers behind these are as the last."""
    if isinstance(kinds, str):
        return kinds
    return kinds[min(layer_number, len(kinds)) - 1]


def _check_heads(config: TransformerConfig, tp: Group, group: Group) -> None:
    for name in ("num_attention_heads", "num_query_groups"):
        count = getattr(config, name)
        if count % (tp.size * group.size):
            raise UserError(
                f"{name} {count}: cp_comm_type a2a gives {group.size} ranks the same number of heads each, so it must "
                f"be a multiple of tensor_model_parallel_size {tp.size} x {group.size}; take p2p or allgather instead"
            )
