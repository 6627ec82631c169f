"""Split the joint QKV projection and rotate queries and keys: one read and one write in each direction.

    packed [s, b, g, p + 2, d]  ->  query [s, b, g p, d],  key [s, b, g, d],  value [s, b, g, d]

Per group the packed dim holds p query heads, the key head and the value head. Outputs are contiguous, as fused
attention kernels need, and do not keep the projection alive. Backward rotates by the negative angle and writes one
packed gradient, from gradients of any strides. Tables and rotation are fp32. Without rotary embedding the outputs are
views, and only their gradients need a kernel.

Legend: s sequence, b batch, g key/value groups, p query heads per group, d head dim, r half of the rotated width."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.fusions.dispatch import ByDevice, kernels_serve
from megatron.core.fusions.installed_triton import tl, triton
from megatron.core.fusions.rope import apply_rotary

_ELEMENTS, _NUM_WARPS = 2048, 4
"""Elements per program, in full heads: 4 KiB of 16-bit values read and 4 KiB written."""


class Rotary(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, /) -> Tensor:
        """Return rotated ``x`` [s, b, a, d], a copy in the dtype of ``x``."""


class SplitHeads(Protocol):
    def __call__(self, packed: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Split into (query, key, value) without rotation."""


class SplitRotary(Protocol):
    def __call__(self, packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, /) -> tuple[Tensor, Tensor, Tensor]:
        """Return (query, key, value); query and key rotated by tables [s, 1, 1, r] up to channel 2 r."""


def split_heads(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split into (query, key, value): views, except for queries of several groups with several heads each."""
    query, key, value = packed.split((packed.shape[3] - 2, 1, 1), dim=3)
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def split_rotary_plain(packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Implement :class:`SplitRotary` in torch operations."""
    query, key, value = split_heads(packed)
    return apply_rotary(query, cos, sin, interleaved), apply_rotary(key, cos, sin, interleaved), value


if triton is not None:

    @triton.jit
    def _head_pointers(
        query, key, value, token, head, batch, per_group, query_s, query_b, query_a, key_s, key_b, key_a,
        value_s, value_b, value_a,
    ):  # fmt: skip
        """Return pointers to the first channel of each packed head, and its slot in the group: query heads, then key,
        then value. Callers mask by slot: only the pointer of the slot's kind is meant."""
        position, row = token // batch, token % batch
        group, slot = head // (per_group + 2), head % (per_group + 2)
        in_query = position * query_s + row * query_b + (group * per_group + slot) * query_a
        in_key = position * key_s + row * key_b + group * key_a
        in_value = position * value_s + row * value_b + group * value_a
        return query + in_query, key + in_key, value + in_value, slot

    @triton.jit
    def _load_heads(query, key, value, channel, is_query, is_key, is_value):
        # at most one mask is true per head: the sum is that load, and the other two are 0
        one = tl.load(query[:, None] + channel, mask=is_query, other=0.0).to(tl.float32)
        two = tl.load(key[:, None] + channel, mask=is_key, other=0.0).to(tl.float32)
        return one + two + tl.load(value[:, None] + channel, mask=is_value, other=0.0).to(tl.float32)

    @triton.jit
    def _store_heads(query, key, value, channel, is_query, is_key, is_value, tile):
        tl.store(query[:, None] + channel, tile.to(query.dtype.element_ty), mask=is_query)
        tl.store(key[:, None] + channel, tile.to(key.dtype.element_ty), mask=is_key)
        tl.store(value[:, None] + channel, tile.to(value.dtype.element_ty), mask=is_value)

    @triton.jit
    def _split_rotary_kernel(
        packed, query, key, value, cos, sin, batch, heads, tiles, direction, query_s, query_b, query_a, key_s, key_b,
        key_a, value_s, value_b, value_a, PER_GROUP: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr,
        PADDED_PAIRS: tl.constexpr, REST: tl.constexpr, PADDED_REST: tl.constexpr, HEADS: tl.constexpr,
        INTERLEAVED: tl.constexpr, PACKS: tl.constexpr,
    ):  # fmt: skip
        """Move HEADS heads of one token from ``packed``, rotating queries and keys in fp32; with PACKS to ``packed``.
        Values and the REST channels after the pairs are copied."""
        token = (tl.program_id(0) // tiles).to(tl.int64)
        head = (tl.program_id(0) % tiles) * HEADS + tl.arange(0, HEADS)
        query, key, value, slot = _head_pointers(
            query, key, value, token, head, batch, PER_GROUP, query_s, query_b, query_a, key_s, key_b, key_a,
            value_s, value_b, value_a,
        )  # fmt: skip
        exists = head < heads
        is_query = (exists & (slot < PER_GROUP))[:, None]
        is_key = (exists & (slot == PER_GROUP))[:, None]
        is_value = (exists & (slot == PER_GROUP + 1))[:, None]
        in_packed = packed + ((token * heads + head) * CHANNELS)[:, None]
        if PAIRS > 0:
            pair = tl.arange(0, PADDED_PAIRS)
            is_pair = (pair < PAIRS)[None, :]
            first = pair[None, :]
            second = first + PAIRS
            if INTERLEAVED:
                first = pair[None, :] * 2
                second = first + 1
            table_at = (token // batch) * PAIRS + pair
            cosine = tl.load(cos + table_at, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
            sine = tl.load(sin + table_at, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :] * direction
            if PACKS:
                x1 = _load_heads(query, key, value, first, is_query & is_pair, is_key & is_pair, is_value & is_pair)
                x2 = _load_heads(query, key, value, second, is_query & is_pair, is_key & is_pair, is_value & is_pair)
            else:
                x1 = tl.load(in_packed + first, mask=exists[:, None] & is_pair, other=0.0).to(tl.float32)
                x2 = tl.load(in_packed + second, mask=exists[:, None] & is_pair, other=0.0).to(tl.float32)
            y1 = tl.where(is_value, x1, x1 * cosine - x2 * sine)
            y2 = tl.where(is_value, x2, x2 * cosine + x1 * sine)
            if PACKS:
                tl.store(in_packed + first, y1.to(packed.dtype.element_ty), mask=exists[:, None] & is_pair)
                tl.store(in_packed + second, y2.to(packed.dtype.element_ty), mask=exists[:, None] & is_pair)
            else:
                _store_heads(query, key, value, first, is_query & is_pair, is_key & is_pair, is_value & is_pair, y1)
                _store_heads(query, key, value, second, is_query & is_pair, is_key & is_pair, is_value & is_pair, y2)
        if REST > 0:
            rest = tl.arange(0, PADDED_REST)[None, :]
            is_rest = rest < REST
            rest += 2 * PAIRS
            if PACKS:
                tile = _load_heads(query, key, value, rest, is_query & is_rest, is_key & is_rest, is_value & is_rest)
                tl.store(in_packed + rest, tile.to(packed.dtype.element_ty), mask=exists[:, None] & is_rest)
            else:
                tile = tl.load(in_packed + rest, mask=exists[:, None] & is_rest, other=0.0).to(tl.float32)
                _store_heads(query, key, value, rest, is_query & is_rest, is_key & is_rest, is_value & is_rest, tile)


def _launch(
    packed: Tensor, heads: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor], interleaved: bool, packs: bool
) -> None:
    """With ``packs`` write ``packed`` from ``heads``, rotated backwards. A 4-dim ``packed`` [s, b, a, d] has query
    heads only; then only the first of ``heads`` is used."""
    length, batch = packed.shape[:2]
    groups, per_group, channels = packed.shape[2:] if packed.dim() == 5 else (1, *packed.shape[2:])
    queries = per_group - 2 if packed.dim() == 5 else per_group
    pairs, num_heads = tables[0].shape[1], groups * per_group
    rest = channels - 2 * pairs
    at_once = max(1, min(_ELEMENTS // triton.next_power_of_2(channels), triton.next_power_of_2(num_heads)))
    tiles = triton.cdiv(num_heads, at_once)
    _split_rotary_kernel[(length * batch * tiles,)](
        packed, *heads, *tables, batch, num_heads, tiles, -1.0 if packs else 1.0,
        *(stride for x in heads for stride in x.stride()[:3]), PER_GROUP=queries, CHANNELS=channels, PAIRS=pairs,
        PADDED_PAIRS=triton.next_power_of_2(max(pairs, 1)), REST=rest, PADDED_REST=triton.next_power_of_2(max(rest, 1)),
        HEADS=at_once, INTERLEAVED=interleaved, PACKS=packs, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _rows(table: Tensor) -> Tensor:
    """View or copy a table [s, 1, 1, r] as contiguous [s, r]."""
    return table.reshape(table.shape[0], -1).contiguous()


class _SplitHeads(torch.autograd.Function):
    """Splits into views of the projection (kernels accept strided heads); packs the gradients in one kernel."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shape = packed.shape
        return split_heads(packed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]
        query, key, value = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        packed = query.new_empty(ctx.shape)
        no_table = packed.new_empty(ctx.shape[0], 0)
        _launch(packed, (query, key, value), (no_table, no_table), False, True)
        return packed


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Saves only the tables."""
        tables = _rows(cos), _rows(sin)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(x.contiguous(), (out, out, out), tables, interleaved, False)
        ctx.save_for_backward(*tables)
        ctx.interleaved = interleaved
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grad_x = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        _launch(grad_x, (grad, grad, grad), ctx.saved_tensors, ctx.interleaved, True)
        return grad_x, None, None, None


class _SplitRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Saves only the tables."""
        length, batch, groups, per_group, channels = packed.shape
        tables = _rows(cos), _rows(sin)
        parts = [packed.new_empty(length, batch, n * groups, channels) for n in (per_group - 2, 1, 1)]
        query, key, value = parts
        _launch(packed.contiguous(), (query, key, value), tables, interleaved, False)
        ctx.save_for_backward(*tables)
        ctx.interleaved, ctx.shape = interleaved, packed.shape
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        packed = query.new_empty(ctx.shape)
        _launch(packed, (query, key, value), ctx.saved_tensors, ctx.interleaved, True)
        return packed, None, None, None


def split_rotary_triton(packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (query, key, value) as :class:`SplitRotary`, contiguous copies, by one kernel in forward and one in
    backward. Tables are used in fp32; not differentiable in them."""
    return _SplitRotary.apply(packed, cos, sin, interleaved)


def split_heads_triton(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split as :func:`split_heads`; one kernel packs the gradients, for which torch needs three passes."""
    return _SplitHeads.apply(packed)


def rotary_triton(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate as :func:`megatron.core.fusions.rope.apply_rotary`, for heads split earlier (query/key norms), but with
    uncast tables in fp32 and rounded once: 16-bit results may differ in the last bit."""
    return _Rotary.apply(x, cos, sin, interleaved)


def choose_rotary(dtype: torch.dtype, enabled: bool = True) -> Rotary:
    """Return the implementation for heads of ``dtype``; ``enabled`` False selects torch operations."""
    return ByDevice(rotary_triton, apply_rotary) if kernels_serve(dtype, enabled) else apply_rotary


def choose_split_heads(dtype: torch.dtype) -> SplitHeads:
    """Return the implementation for projections of ``dtype``."""
    return ByDevice(split_heads_triton, split_heads) if kernels_serve(dtype) else split_heads


def choose_split_rotary(dtype: torch.dtype, enabled: bool = True) -> SplitRotary:
    """Return the implementation for projections of ``dtype``; ``enabled`` False selects torch operations."""
    if kernels_serve(dtype, enabled):
        return ByDevice(split_rotary_triton, split_rotary_plain)
    return split_rotary_plain
