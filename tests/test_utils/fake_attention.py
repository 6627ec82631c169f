"""Plain-torch attention with the call signatures of the flash-attn package, versions 2, 3 and 4."""

import sys
import types

import torch

from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.tiles import Tile
from megatron.core.extensions.flash_attn import MODULES


def attention(query, key, value, scale, causal, window):
    """[b, s, a, d] and [b, s, g, d] -> [b, s, a, d]."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
    scores = torch.einsum("bqad,bkad->baqk", query, key) * scale
    length = query.shape[1]
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    left, right = window
    hidden = (distance > 0) & causal
    hidden |= (distance < -left) & (left >= 0)
    hidden |= (distance > right) & (right >= 0)
    return torch.einsum("baqk,bkad->bqad", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def packed_attention(query, key, value, bounds, scale, causal, window):
    """[t, a, d]: documents one after the other."""
    parts = [
        attention(query[None, start:end], key[None, start:end], value[None, start:end], scale, causal, window)[0]
        for start, end in zip(bounds.tolist(), bounds.tolist()[1:])
    ]
    return torch.cat(parts)


def version_2_or_3(version, calls):
    """A module ``flash_attn``, or ``flash_attn_interface`` of an early release, which returns (out, lse). Takes the
    arguments that both versions have; every call's name is added to ``calls``."""
    module = types.ModuleType(MODULES[version])

    def returned(out):
        return out if version == 2 else (out, None)

    def flash_attn_func(q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False):
        calls.append("dense")
        return returned(attention(q, k, v, softmax_scale, causal, window_size))

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale=None, causal=False,
        window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and max_seqlen_q >= cu_seqlens_q.diff().max()
        calls.append("packed")
        return returned(packed_attention(q, k, v, cu_seqlens_q, softmax_scale, causal, window_size))

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


def _tiles_of(query, key, options):
    """(tile, places of its queries, places of its keys) of each segment; limits from the lower right corner."""
    bounds_q, bounds_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if bounds_q is None:
        places = [((row, slice(None)), (row, slice(None))) for row in range(len(query))]
        sizes = [(query.shape[1], key.shape[1])] * len(query)
    else:
        assert bounds_q.dtype == bounds_k.dtype == torch.int32
        spans_q, spans_k = (list(zip(item.tolist(), item.tolist()[1:])) for item in (bounds_q, bounds_k))
        places = [((slice(*q),), (slice(*k),)) for q, k in zip(spans_q, spans_k, strict=True)]
        sizes = [(q[1] - q[0], k[1] - k[0]) for q, k in zip(spans_q, spans_k, strict=True)]
        for max_length, name in zip(map(max, zip(*sizes)), ("max_seqlen_q", "max_seqlen_k"), strict=True):
            assert max_length <= options[name]
    left, right = options.get("window_size_left"), options.get("window_size_right")
    for (at_q, at_k), (num_queries, num_keys) in zip(places, sizes):
        shift = num_keys - num_queries
        limits = None if left is None else left - shift, None if right is None else right + shift
        if num_queries:
            yield Tile(None, 0, num_queries, 0, num_keys, *limits, 0, 0), at_q, at_k


def version_4(calls):
    """A module ``flash_attn.cute.interface``."""
    module = types.ModuleType(MODULES[4])

    def heads_first(x):
        return x.transpose(0, 1).unsqueeze(0)

    def _flash_attn_fwd(q, k, v, *, softmax_scale, out=None, return_lse=False, **options):
        assert return_lse and all(x.stride(-1) == 1 for x in (q, k, v))
        calls.append("forward")
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype) if out is None else out
        packed = "cu_seqlens_q" in options
        lse = q.new_empty((q.shape[1], len(q)) if packed else (len(q), q.shape[2], q.shape[1]))
        for tile, at_q, at_k in _tiles_of(q, k, options):
            part, part_lse = UnfusedAttention(softmax_scale).forward(
                *(heads_first(x[at]) for x, at in ((q, at_q), (k, at_k), (v, at_k))), tile
            )
            out[at_q] = part[0].transpose(0, 1)
            (lse[:, at_q[0]] if packed else lse[at_q[0]]).copy_(part_lse[0])
        return out, lse, None, None, None

    def _flash_attn_bwd(q, k, v, out, dout, lse, *, softmax_scale, deterministic=False, **options):
        assert lse.is_contiguous() and q.dtype == dout.dtype
        calls.append("backward")
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for tile, at_q, at_k in _tiles_of(q, k, options):
            part_lse = lse[:, at_q[0]] if "cu_seqlens_q" in options else lse[at_q[0]]
            places = ((dout, at_q), (q, at_q), (k, at_k), (v, at_k), (out, at_q))
            parts = UnfusedAttention(softmax_scale).backward(
                *(heads_first(x[at]) for x, at in places), part_lse.unsqueeze(0), tile
            )
            for total, part, at in zip(grads, parts, (at_q, at_k, at_k), strict=True):
                total[at] = part[0].transpose(0, 1)
        return tuple(grads)

    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    return module


def install(monkeypatch, version):
    """Puts a fake of ``version`` where ``import`` finds it; returns the list that its calls are added to."""
    calls = []
    module = version_4(calls) if version == 4 else version_2_or_3(version, calls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls
