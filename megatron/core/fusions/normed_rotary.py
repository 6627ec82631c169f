"""Split the joint QKV projection, normalize its query and key heads (RMSNorm) and rotate them: one read and one write.

    packed [s, b, g, p + 2, d]  ->  query [s, b, g p, d],  key [s, b, g, d],  value [s, b, g, d]
    y = rotate(n (w + o)),  n = x r,  r = 1 / sqrt(mean(x^2) + eps)        for each query or key head x
    dx = r (h - n mean(h n)),  h = g (w + o),  g = rotate back(dy),  dw = sum over tokens and heads of g n

Separate kernels copy strided heads for the norm and store normalized heads. For 8192 tokens of 32 + 4 + 4 heads of 128
channels (H200, bf16) forward takes 59 us, 259 with separate kernels; backward 92 us. Backward reads ``packed`` and
computes r again. Arithmetic is fp32; results are rounded once, where separate kernels also round
normalized heads. Weight gradients are summed in two stages in a fixed order: same bits every run.

Legend: s sequence, b batch, g key/value groups, p query heads per group, d head dim, r half of the rotated width."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.dispatch import num_sms
from megatron.core.fusions.installed_triton import tl, triton

WIDEST = 512
"""Maximum head dim: a program holds full heads in registers."""
_ELEMENTS, _NUM_WARPS = 2048, 4
"""Elements per program and step, in full heads."""
_PROGRAMS_PER_SM, _STAGES = 8, 3
"""Backward: programs per SM, each of which writes partial sums of weight gradients, and pipeline stages; the best of 16
on an H200 (without pipelining 100 us)."""


class HeadNorms(NamedTuple):
    """RMSNorms of query and key heads, which have the same epsilon and offset."""

    query_weight: Tensor
    """[d]."""
    key_weight: Tensor
    eps: float
    offset: float
    """Constant added to the stored weights."""


if triton is not None:
    from megatron.core.fusions.split_rotary import _head_pointers, _load_heads, _store_heads

    @triton.jit
    def _head_scale(query_weight, key_weight, channel, inside, is_query, is_key, offset):
        """Norm weights of a tile of heads, fp32 [heads, channels]: 1 for values."""
        of_query = tl.load(query_weight + channel, mask=inside, other=0.0).to(tl.float32) + offset
        of_key = tl.load(key_weight + channel, mask=inside, other=0.0).to(tl.float32) + offset
        return tl.where(is_query, of_query, tl.where(is_key, of_key, 1.0))

    @triton.jit
    def _pair_channels(pair, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
        """Channels [1, pairs] of both members of the rotated pairs."""
        first = pair[None, :] * 2 if INTERLEAVED else pair[None, :]
        return first, first + (1 if INTERLEAVED else PAIRS)

    @triton.jit
    def _normed_rotary_forward(
        packed, query, key, value, query_weight, key_weight, cos, sin, batch, heads, tiles, eps, offset, query_s,
        query_b, query_a, key_s, key_b, key_a, value_s, value_b, value_a, PER_GROUP: tl.constexpr,
        CHANNELS: tl.constexpr, PAIRS: tl.constexpr, PADDED_PAIRS: tl.constexpr, REST: tl.constexpr,
        PADDED_REST: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        """HEADS heads of one token: queries and keys are normalized and rotated up to the REST, values copied."""
        token = (tl.program_id(0) // tiles).to(tl.int64)
        head = (tl.program_id(0) % tiles) * HEADS + tl.arange(0, HEADS)
        query, key, value, slot = _head_pointers(
            query, key, value, token, head, batch, PER_GROUP, query_s, query_b, query_a, key_s, key_b, key_a,
            value_s, value_b, value_a,
        )  # fmt: skip
        exists = (head < heads)[:, None]
        is_query, is_key = exists & (slot < PER_GROUP)[:, None], exists & (slot == PER_GROUP)[:, None]
        is_value = exists & (slot == PER_GROUP + 1)[:, None]
        source = packed + ((token * heads + head) * CHANNELS)[:, None]
        pair = tl.arange(0, PADDED_PAIRS)
        is_pair = (pair < PAIRS)[None, :]
        first, second = _pair_channels(pair, PAIRS, INTERLEAVED)
        x1 = tl.load(source + first, mask=exists & is_pair, other=0.0).to(tl.float32)
        x2 = tl.load(source + second, mask=exists & is_pair, other=0.0).to(tl.float32)
        square = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if REST > 0:
            rest = 2 * PAIRS + tl.arange(0, PADDED_REST)[None, :]
            is_rest = rest < CHANNELS
            tail = tl.load(source + rest, mask=exists & is_rest, other=0.0).to(tl.float32)
            square += tl.sum(tail * tail, axis=1)
        rstd = tl.where(is_value, 1.0, tl.rsqrt(square / CHANNELS + eps)[:, None])
        x1 *= rstd * _head_scale(query_weight, key_weight, first, is_pair, is_query, is_key, offset)
        x2 *= rstd * _head_scale(query_weight, key_weight, second, is_pair, is_query, is_key, offset)
        at = (token // batch) * PAIRS + pair
        cosine = tl.load(cos + at, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
        sine = tl.load(sin + at, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
        y1 = tl.where(is_value, x1, x1 * cosine - x2 * sine)
        y2 = tl.where(is_value, x2, x2 * cosine + x1 * sine)
        _store_heads(query, key, value, first, is_query & is_pair, is_key & is_pair, is_value & is_pair, y1)
        _store_heads(query, key, value, second, is_query & is_pair, is_key & is_pair, is_value & is_pair, y2)
        if REST > 0:
            tail *= rstd * _head_scale(query_weight, key_weight, rest, is_rest, is_query, is_key, offset)
            _store_heads(query, key, value, rest, is_query & is_rest, is_key & is_rest, is_value & is_rest, tail)

    @triton.jit
    def _store_sums(sums, channel, inside, is_query, is_key, total, CHANNELS: tl.constexpr):
        """The sums over query heads, and after CHANNELS elements those over key heads."""
        tl.store(sums + channel, tl.sum(tl.where(is_query, total, 0.0), axis=0)[None, :], mask=inside)
        tl.store(sums + CHANNELS + channel, tl.sum(tl.where(is_key, total, 0.0), axis=0)[None, :], mask=inside)

    @triton.jit
    def _normed_rotary_backward(
        packed, query, key, value, query_weight, key_weight, cos, sin, grad_packed, sums, tokens, batch, heads, tiles,
        eps, offset, query_s, query_b, query_a, key_s, key_b, key_a, value_s, value_b, value_a, steps,
        PER_GROUP: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr, PADDED_PAIRS: tl.constexpr,
        REST: tl.constexpr, PADDED_REST: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        """HEADS heads of ``steps`` tokens, and this program's sums for both weight gradients, fp32 [2, CHANNELS]."""
        head = (tl.program_id(0) % tiles) * HEADS + tl.arange(0, HEADS)
        exists = (head < heads)[:, None]
        slot = head % (PER_GROUP + 2)
        is_query, is_key = exists & (slot < PER_GROUP)[:, None], exists & (slot == PER_GROUP)[:, None]
        is_value = exists & (slot == PER_GROUP + 1)[:, None]
        pair = tl.arange(0, PADDED_PAIRS)
        is_pair = (pair < PAIRS)[None, :]
        first, second = _pair_channels(pair, PAIRS, INTERLEAVED)
        scale1 = _head_scale(query_weight, key_weight, first, is_pair, is_query, is_key, offset)
        scale2 = _head_scale(query_weight, key_weight, second, is_pair, is_query, is_key, offset)
        sum1 = tl.zeros((HEADS, PADDED_PAIRS), dtype=tl.float32)
        sum2 = tl.zeros((HEADS, PADDED_PAIRS), dtype=tl.float32)
        rest = 2 * PAIRS + tl.arange(0, PADDED_REST)[None, :]
        is_rest = rest < CHANNELS
        sum_rest = tl.zeros((HEADS, PADDED_REST), dtype=tl.float32)
        start = (tl.program_id(0) // tiles).to(tl.int64) * steps
        for token in tl.range(start, tl.minimum(start + steps, tokens), num_stages=STAGES):
            in_query, in_key, in_value, _ = _head_pointers(
                query, key, value, token, head, batch, PER_GROUP, query_s, query_b, query_a, key_s, key_b, key_a,
                value_s, value_b, value_a,
            )  # fmt: skip
            at = ((token * heads + head) * CHANNELS)[:, None]
            y1 = _load_heads(in_query, in_key, in_value, first, is_query & is_pair, is_key & is_pair,
                             is_value & is_pair)  # fmt: skip
            y2 = _load_heads(in_query, in_key, in_value, second, is_query & is_pair, is_key & is_pair,
                             is_value & is_pair)  # fmt: skip
            x1 = tl.load(packed + at + first, mask=exists & is_pair, other=0.0).to(tl.float32)
            x2 = tl.load(packed + at + second, mask=exists & is_pair, other=0.0).to(tl.float32)
            in_table = (token // batch) * PAIRS + pair
            cosine = tl.load(cos + in_table, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
            sine = tl.load(sin + in_table, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
            square = tl.sum(x1 * x1 + x2 * x2, axis=1)
            if REST > 0:
                tail = tl.load(packed + at + rest, mask=exists & is_rest, other=0.0).to(tl.float32)
                grad_tail = _load_heads(in_query, in_key, in_value, rest, is_query & is_rest, is_key & is_rest,
                                        is_value & is_rest)  # fmt: skip
                square += tl.sum(tail * tail, axis=1)
            rstd = tl.rsqrt(square / CHANNELS + eps)[:, None]
            x1, x2 = x1 * rstd, x2 * rstd
            g1, g2 = y1 * cosine + y2 * sine, y2 * cosine - y1 * sine
            sum1 += g1 * x1
            sum2 += g2 * x2
            g1, g2 = g1 * scale1, g2 * scale2
            mean = tl.sum(g1 * x1 + g2 * x2, axis=1)
            if REST > 0:
                tail *= rstd
                sum_rest += grad_tail * tail
                scaled = grad_tail * _head_scale(query_weight, key_weight, rest, is_rest, is_query, is_key, offset)
                mean += tl.sum(scaled * tail, axis=1)
            mean = (mean / CHANNELS)[:, None]
            g1, g2 = tl.where(is_value, y1, (g1 - x1 * mean) * rstd), tl.where(is_value, y2, (g2 - x2 * mean) * rstd)
            tl.store(grad_packed + at + first, g1.to(grad_packed.dtype.element_ty), mask=exists & is_pair)
            tl.store(grad_packed + at + second, g2.to(grad_packed.dtype.element_ty), mask=exists & is_pair)
            if REST > 0:
                result = tl.where(is_value, grad_tail, (scaled - tail * mean) * rstd)
                tl.store(grad_packed + at + rest, result.to(grad_packed.dtype.element_ty), mask=exists & is_rest)
        sums += tl.program_id(0).to(tl.int64) * 2 * CHANNELS
        _store_sums(sums, first, is_pair, is_query, is_key, sum1, CHANNELS)
        _store_sums(sums, second, is_pair, is_query, is_key, sum2, CHANNELS)
        if REST > 0:
            _store_sums(sums, rest, is_rest, is_query, is_key, sum_rest, CHANNELS)


def _sizes(packed: Tensor, pairs: int, interleaved: bool) -> tuple[int, dict[str, int]]:
    """Return the tiles of heads per token, and the sizes that both kernels take."""
    groups, per_group, channels = packed.shape[2:]
    num_heads, rest = groups * per_group, channels - 2 * pairs
    at_once = max(1, min(_ELEMENTS // triton.next_power_of_2(channels), triton.next_power_of_2(num_heads)))
    return triton.cdiv(num_heads, at_once), {
        "PER_GROUP": per_group - 2, "CHANNELS": channels, "PAIRS": pairs,
        "PADDED_PAIRS": triton.next_power_of_2(pairs), "REST": rest,
        "PADDED_REST": triton.next_power_of_2(max(rest, 1)), "HEADS": at_once, "INTERLEAVED": interleaved,
        "num_warps": _NUM_WARPS,
    }  # fmt: skip


class _SplitNormedRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor,
        interleaved: bool, eps: float, offset: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Saves ``packed``, the weights and the tables."""
        length, batch, groups, per_group, channels = packed.shape
        packed, tables = packed.contiguous(), [x.reshape(length, x.shape[-1]).contiguous() for x in (cos, sin)]
        parts = [packed.new_empty(length, batch, n * groups, channels) for n in (per_group - 2, 1, 1)]
        tiles, sizes = _sizes(packed, tables[0].shape[1], interleaved)
        if packed.numel():
            _normed_rotary_forward[(length * batch * tiles,)](
                packed, *parts, query_weight, key_weight, *tables, batch, groups * per_group, tiles, eps, offset,
                *(stride for x in parts for stride in x.stride()[:3]), **sizes,
            )  # fmt: skip
        ctx.save_for_backward(packed, query_weight, key_weight, *tables)
        ctx.interleaved, ctx.eps, ctx.offset = interleaved, eps, offset
        query, key, value = parts
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients of query, key and value may have any strides."""
        packed, query_weight, key_weight, cos, sin = ctx.saved_tensors
        grads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        length, batch, groups, per_group, channels = packed.shape
        tokens, (tiles, sizes) = length * batch, _sizes(packed, cos.shape[1], ctx.interleaved)
        steps = max(1, triton.cdiv(tokens * tiles, _PROGRAMS_PER_SM * num_sms(packed.device)))
        programs = triton.cdiv(tokens, steps) * tiles
        grad_packed = torch.empty_like(packed)
        sums = torch.empty(programs, 2, channels, dtype=torch.float32, device=packed.device)
        if programs:
            _normed_rotary_backward[(programs,)](
                packed, *grads, query_weight, key_weight, cos, sin, grad_packed, sums, tokens, batch,
                groups * per_group, tiles, ctx.eps, ctx.offset, *(stride for x in grads for stride in x.stride()[:3]),
                steps, STAGES=_STAGES, **sizes,
            )  # fmt: skip
        grad_query, grad_key = sums.sum(0).to(query_weight.dtype)
        return grad_packed, grad_query, grad_key, None, None, None, None, None


def split_normed_rotary_triton(
    packed: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (query, key, value) of ``packed`` [s, b, g, p + 2, d]: contiguous copies, query and key heads normalized
    and then rotated by tables [s, 1, 1, r] up to channel 2 r. One kernel in forward; one in backward, and a sum over
    its programs. Tables are used in fp32; not differentiable in them. d is at most WIDEST."""
    return _SplitNormedRotary.apply(
        packed, norms.query_weight, norms.key_weight, cos, sin, interleaved, norms.eps, norms.offset
    )
