"""Context-parallel attention: ring, all-gather and all-to-all (Ulysses).

``RingAttention``       K/V blocks circulate while each rank attends to the block it holds (Liu et al. 2023)
``AllGatherAttention``  all-gathers K/V in forward, and again in backward; saves local K/V only
``AllToAllAttention``   exchanges heads for sequence, so that each rank has full sequences of a / n heads (Jacobs et
                        al. 2023); the inner attention may be a ring over an outer group (hierarchical, a2a+p2p)

Without context parallelism and sinks the attention is the kernel's ``attend`` on full sequences.
Inputs and outputs are local tensors [s, b, heads, d] in the order of the token layout. Memory saved for backward does
not grow with the group: local tensors, or for all-to-all equally many elements with fewer heads and longer sequences.

Legend: s sequence (local), b batch, a query heads, g key/value groups, d head dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.attention.context_parallel.block_attention import BlockGradients, GradientSum, OnlineSoftmax
from megatron.core.attention.context_parallel.exchange import neighbour_exchange
from megatron.core.attention.context_parallel.zigzag import Spans
from megatron.core.attention.kernels.base import Form, Kernel
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.masks import Mask
from megatron.core.attention.sink import sink_gradient
from megatron.core.attention.tiles import Tile, plan_tiles
from megatron.core.attention.token_layout import ONE_RANK, TokenLayout
from megatron.core.autograd_context import AutogradContext
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.extensions.cudnn import cudnn_supports_lengths
from megatron.core.fusions.batch_invariant_attention import Scores, Span, batch_invariant_attention

Attention = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
"""``(query, key, value, mask) -> out``, as ``Kernel.attend``."""


@dataclass(frozen=True)
class _Plan:
    """Arguments of one attention call: layout of the key blocks, kernel (with dropout and bias set), and the tiles of
    each block."""

    layout: TokenLayout
    kernel: Kernel
    blocks: tuple[tuple[Tile, ...], ...]
    forward: Callable[..., tuple[Tensor, Tensor]] | None = None
    """(query, all keys, all values, sink) -> output and log-sum-exp, in place of the kernel's forward (all-gather)."""


class _Ring(torch.autograd.Function):
    """Ring attention. Forward saves query, local keys and values, output and log-sum-exp; backward circulates keys and
    values again, with their gradients one step after them."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        bias: Tensor | None,
        plan: _Plan,
    ) -> Tensor:
        """Return the output [s, b, a, d] in the dtype of ``query``. Each step attends to the held K/V block while the
        next one is exchanged with the neighbors: len(``plan.blocks``) - 1 exchanges over the layout's group. Saves
        query, local K/V, output and log-sum-exp."""
        local = block = torch.stack((key, value))  # one message per step instead of two
        softmax = OnlineSoftmax(query, plan.kernel)
        for step, tiles in enumerate(plan.blocks):
            # start before the attention that overlaps it; the last block needs no further transfer
            coming = neighbour_exchange(block, plan.layout.group) if step < len(plan.blocks) - 1 else None
            softmax.add_block(block[0], block[1], tiles)
            block = block if coming is None else coming.wait()
        out, lse = softmax.finish(sink)
        # save local K/V only: saving every block would grow memory with the CP size
        ctx.save_for_backward(query, local, out, lse, sink)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of query, key, value, sink and bias; the latter two are None without sink or bias, and
        sums over local queries only. K/V blocks circulate again, and their gradients, summed in fp32, follow one step
        later, so that they end at their rank: n - 1 exchanges each over the layout's group. Gradients of query, key and
        value have the query's dtype."""
        query, local, out, lse, sink = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gradients = BlockGradients(grad, query, out, lse, plan.kernel)
        # process the local block last: its dK/dV from other ranks arrive while it is computed
        coming = neighbour_exchange(local, plan.layout.group) if len(plan.blocks) > 1 else None
        travelling = None  # dK/dV of the held block, summed over the ranks that have held it before
        for step, tiles in enumerate(plan.blocks[1:], 2):
            assert coming is not None
            block = coming.wait()
            coming = neighbour_exchange(block, plan.layout.group) if step < len(plan.blocks) else None
            sums = GradientSum(2, block[0], travelling)
            gradients.add_block(block, tiles, sums)
            # keys are in flight between the same ranks: gloo matches messages by tag, NCCL by order, so that all ranks
            # must issue both exchanges in this order
            travelling = neighbour_exchange(sums.total(), plan.layout.group, tag=1)
        sums = GradientSum(2, local[0], travelling)
        gradients.add_block(local, plan.blocks[0], sums)
        grad_key, grad_value = sums.result()
        of_sink = None if sink is None else sink_gradient(grad, out, lse, sink)
        return gradients.grad_query(), grad_key, grad_value, of_sink, gradients.grad_bias, None


class _AllGather(torch.autograd.Function):
    """All-gather attention. Forward saves query, local keys and values, output and log-sum-exp; backward all-gathers
    keys and values again and reduce-scatters their gradients in fp32."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        bias: Tensor | None,
        plan: _Plan,
    ) -> Tensor:
        """All-gather keys and values over the layout's group and attend to all of them; return the output [s, b, a, d]
        in the dtype of ``query``. Saves query, local K/V, output and log-sum-exp, not the gathered tensors."""
        local = torch.stack((key, value))
        everything = plan.layout.full(local, 1)
        if plan.forward is None:
            softmax = OnlineSoftmax(query, plan.kernel)
            softmax.add_block(everything[0], everything[1], plan.blocks[0])
            out, lse = softmax.finish(sink)
        else:
            out, lse = plan.forward(query, everything[0], everything[1], sink)
        ctx.save_for_backward(query, local, out, lse, sink)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of query, key, value, sink and bias; the latter two are None without sink or bias, and
        sums over local queries only. All-gathers keys and values again; reduce-scatters their gradients in fp32 and
        casts them to the dtype of ``query``."""
        query, local, out, lse, sink = ctx.saved_tensors
        plan: _Plan = ctx.plan
        everything = plan.layout.full(local, 1)
        gradients = BlockGradients(grad, query, out, lse, plan.kernel)
        sums = GradientSum(2, everything[0])
        gradients.add_block(everything, plan.blocks[0], sums)
        grad_key, grad_value = plan.layout.sum_local(sums.total(), 1).to(query.dtype)
        of_sink = None if sink is None else sink_gradient(grad, out, lse, sink)
        return gradients.grad_query(), grad_key, grad_value, of_sink, gradients.grad_bias, None


def _refuse_dense(mask: Mask) -> None:
    """Raise UserError if ``mask`` has a dense mask."""
    if mask.hidden is not None:
        raise UserError(
            "attention_mask: context parallelism and attention sinks take no dense masks; describe documents by "
            "packed_seq_params, windows by window_size"
        )


@dataclass(frozen=True)
class EqualHeads:
    """Zero-pads heads to one dim for an ``inner`` that requires it (MLA), and cuts the output to the value head dim."""

    inner: Attention
    for_cudnn: bool = False
    """Whether ``inner`` is cuDNN's kernel, which leaves packed documents and some lengths to the flash kernel, and only
    these require equal head dims."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [s, b, a, d], key [t, b, g, d] and value [t, b, g, e] to [s, b, a, e]. Pads copies of the narrower
        tensors with zeros to max(d, e), calls ``inner``, and returns a view of the first e channels; calls ``inner``
        directly where cuDNN computes."""
        if self.for_cudnn and mask.documents is None and cudnn_supports_lengths(len(query), len(key)):
            return self.inner(query, key, value, mask)
        width = max(key.shape[-1], value.shape[-1])
        q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        return self.inner(q, k, v, mask)[..., : value.shape[-1]]


@dataclass(frozen=True)
class _BlockAttention:
    """Base of attention over key blocks whose partial results are merged. Maps query [s, b, a, d], key and value
    [s, b, g, d] to [s, b, a, d]. Raises UserError for dense masks."""

    layout: TokenLayout
    kernel: Kernel

    def _plan(self, query: Tensor, key: Tensor, mask: Mask, blocks: Sequence[Spans]) -> _Plan:
        """Return the kernel, with the mask's dropout and bias, and for each of ``blocks`` (spans of global key
        positions) the tiles of this rank's queries. Keys may belong to another sequence. Tiles of different
        spans are merged unless there is dropout or a bias, which require the unfused kernel. Raises UserError for dense
        masks and lengths that the ranks cannot split. Reading document bounds may wait for the GPU."""
        _refuse_dense(mask)
        length, key_length = (self.layout.full_length(len(x)) for x in (query, key))
        queries, kernel = self.layout.spans(length), self.kernel
        merge = mask.dropout is None and mask.bias is None  # both depend on positions
        if not merge:
            assert isinstance(kernel, UnfusedAttention)
            kernel = kernel.with_mask(mask)
        documents, of_keys = mask.bounds or (None, None)
        key_documents = None if of_keys is None or of_keys is documents else (of_keys, key_length)
        tiles = (plan_tiles(queries, keys, mask.visibility, length, documents, merge, key_documents) for keys in blocks)
        return _Plan(self.layout, kernel, tuple(tiles))


class RingAttention(_BlockAttention):
    """Ring attention: K/V blocks circulate in the layout's group during the attention to the current one."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [s, b, a, d], key and value [t, b, g, d] of this rank's tokens to [s, b, a, d]. Collective over the
        group in forward and backward. Raises UserError for dense masks and lengths that the ranks cannot split."""
        group, length = self.layout.group, self.layout.full_length(len(key))
        spans = [self.layout.spans(length, (group.rank - step) % group.size) for step in range(group.size)]
        return _Ring.apply(query, key, value, mask.sink, mask.bias, self._plan(query, key, mask, spans))


class AllGatherAttention(_BlockAttention):
    """All-gather attention: every rank holds all keys and values during one layer's attention, forward and backward."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [s, b, a, d], key and value [t, b, g, d] of this rank's tokens to [s, b, a, d]. Collective over the
        group in forward and backward. Raises UserError for dense masks and lengths that the ranks cannot split."""
        everything = ((0, self.layout.full_length(len(key))),)
        return _AllGather.apply(query, key, value, mask.sink, mask.bias, self._plan(query, key, mask, [everything]))


@dataclass(frozen=True)
class BatchInvariantAttention(AllGatherAttention):
    """All-gather attention whose forward pass is :func:`batch_invariant_attention`, for causal self-attention. The
    backward pass is the kernel's; with dropout of attention weights, in training, the forward pass is, too."""

    soft_cap: float | None = None

    def _plan(self, query: Tensor, key: Tensor, mask: Mask, blocks: Sequence[Spans]) -> _Plan:
        plan = super()._plan(query, key, mask, blocks)
        if mask.dropout is not None:
            return plan
        left, right = mask.visibility.limits
        assert right == 0 and mask.bias is None, "rejected by rules of batch_invariant_mode"
        spans = self._query_spans(query, mask)
        return replace(plan, forward=partial(self._attend, spans=spans, left=left))

    def _query_spans(self, query: Tensor, mask: Mask) -> list[Span]:
        """Return this rank's queries as consecutive tokens of documents, one sample after another."""
        length, batch = query.shape[:2]
        full = self.layout.full_length(length)
        bounds = [index * full for index in range(batch + 1)] if mask.bounds is None else mask.bounds[0]
        spans: list[Span] = []
        for sample in range(batch):
            row = sample * length
            for begin, end in self.layout.spans(full):
                start, stop = sample * full + begin, sample * full + end
                for first, last in zip(bounds[:-1], bounds[1:]):
                    low, high = max(start, first), min(stop, last)
                    if low < high:
                        spans.append(Span(row + low - start, high - low, low - first, first))
                row += end - begin
        return spans

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *, spans: list[Span], left: int | None
    ) -> tuple[Tensor, Tensor]:
        length, batch = query.shape[:2]
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        scores = Scores(self.kernel.scale, left, self.soft_cap, sink)
        outputs = batch_invariant_attention(query, key, value, None, spans, scores)
        out, lse = (x.unflatten(0, (batch, length)).transpose(0, 1).contiguous() for x in outputs)
        return out, lse


@dataclass(frozen=True)
class AllToAllAttention:
    """All-to-all (Ulysses) attention over the layout's group: ``inner`` gets 1 / n of the heads and n times the
    sequence. ``inner`` computes this rank's heads from ``group.rank * heads / n``. With an inner ring over an outer
    group, the sequences that ``inner`` gets are in that group's order. Query, key and value are sent in one collective.
    Attention at s 32768 on two H200s, forward and backward (``torchrun --nproc-per-node 2
    benchmarks/bench_context_parallel.py``), takes 30.3 ms, against 30.8 ms with one collective each and element-wise
    copies. Slower alternatives, measured on four GPUs where three collectives took 15.6 ms: chunks sent directly to
    their final positions (one copy per exchange instead of two), 16.8 ms, because of many small messages; two halves of
    the heads, one exchanged during the attention of the other, 18.4 ms. Copy engines do not help: 9.11 s per step of 32
    layers, against 9.03 s with NCCL, as nothing overlaps the exchange."""

    layout: TokenLayout
    inner: Attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [s, b, a, d], key and value [s, b, g, d] to [s, b, a, d]: one all-to-all of all three, ``inner`` on
        this rank's share of the heads, one all-to-all back. a and g must be divisible by the group size. The
        mask's sink and bias hold all heads of this rank; ``inner`` gets its slice. Raises UserError for dense masks."""
        _refuse_dense(mask)
        group = self.layout.group
        query, key, value = self.layout.heads(query, key, value)
        sink, bias = (None if x is None else x.chunk(group.size)[group.rank] for x in (mask.sink, mask.bias))
        return self.layout.tokens(self.inner(query, key, value, replace(mask, sink=sink, bias=bias)))


def _levels(kind: str, layout: TokenLayout) -> tuple[TokenLayout, TokenLayout]:
    """Return the layouts of the all-to-all and the key blocks inside it: for ``a2a`` one block, for ``a2a+p2p``
    both levels, which must make up the group (else UserError); for ``p2p``, ``allgather``, other names and groups of
    one rank no all-to-all. Both keep the token order of ``layout``."""
    inside, outside = {"a2a": (layout.group, ONE_RANK.group), "a2a+p2p": layout.levels}.get(
        kind if layout.group.size > 1 else "p2p", (ONE_RANK.group, layout.group)
    )
    if inside.size * outside.size != layout.group.size:
        raise UserError(
            f"cp_comm_type a2a+p2p: context_parallel_size {layout.group.size} is not split into two levels; give "
            "hierarchical_context_parallel_sizes to initialize_model_parallel"
        )
    return TokenLayout(inside, layout.order), TokenLayout(outside, layout.order)


def kernel_needs(kind: str, layout: TokenLayout, sink: bool, varies: bool = False) -> Form:
    """Return what communication ``kind`` (``cp_comm_type``) requires of kernels: key blocks ("gather" for
    ``allgather``, else "ring") if several ranks hold the keys, "gather" with a ``sink``, which needs the log-sum-exp,
    else full sequences ("whole"). ``varies``: whether the ranks of other micro-batches differ from ``layout``."""
    if _levels(kind, layout)[1].group.size > 1 or (varies and kind != "a2a"):
        return "gather" if kind == "allgather" else "ring"
    return "gather" if sink else "whole"


def build_form(kind: str, layout: TokenLayout, kernel: Kernel, sink: bool) -> Attention:
    """Build the attention of ``kind`` over the ranks of ``layout``: a ring (``p2p``), an all-gather, full sequences
    after an all-to-all (``a2a``), or a ring inside of one (``a2a+p2p``); one rank attends to full sequences. Instead of
    these, a ``sink``, or an unfused ``kernel`` after an all-to-all, uses key blocks of one rank. Raises UserError as
    :func:`_levels`."""
    inside, outside = _levels(kind, layout)
    split = inside.group.size > 1
    # unfused: use a ring even of one rank, which saves the log-sum-exp; full-sequence autograd saves s^2 weights
    in_blocks = outside.group.size > 1 or sink or (split and isinstance(kernel, UnfusedAttention))
    blocks = AllGatherAttention if kind == "allgather" else RingAttention
    inner: Attention = blocks(outside, kernel) if in_blocks else kernel.attend
    return AllToAllAttention(inside, inner) if split else inner


def first_head(kind: str, layout: TokenLayout, local_heads: int) -> int:
    """Return the index of the first head that this rank computes, of its ``local_heads`` before an all-to-all."""
    group = _levels(kind, layout)[0].group
    return group.rank * (local_heads // group.size)


def layer_comm_type(kinds: Sequence[str] | str, layer_number: int) -> str:
    """Return ``kinds`` or its entry for layer ``layer_number`` (from 1); layers after the list use its last entry."""
    if isinstance(kinds, str):
        return kinds
    return kinds[min(layer_number, len(kinds)) - 1]


def check_form(config: TransformerConfig, kind: str, layout: TokenLayout, tp: int) -> None:
    """Raise UserError if ``num_attention_heads`` or ``num_query_groups`` is not divisible by the tensor-parallel size
    ``tp`` times the ranks of the all-to-all, or a2a+p2p lacks hierarchical groups. Without an all-to-all (``p2p``,
    ``allgather``, one rank) any number passes."""
    inside = _levels(kind, layout)[0].group.size
    for name in ("num_attention_heads", "num_query_groups"):
        count = getattr(config, name)
        if inside > 1 and count % (tp * inside):
            raise UserError(
                f"{name} {count}: cp_comm_type a2a gives {inside} ranks the same number of heads each, so it must "
                f"be a multiple of tensor_model_parallel_size {tp} x {inside}; take p2p or allgather instead"
            )
