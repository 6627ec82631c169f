"""Plain-torch attention with the call signatures of the flash-attn package, versions 2 and 3."""

import sys
import types

import torch


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


def version_2(calls):
    """A module ``flash_attn``; every call's name is added to ``calls``."""
    module = types.ModuleType("flash_attn")

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        calls.append("dense")
        return attention(q, k, v, softmax_scale, causal, window_size)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_q >= cu_seqlens_q.diff().max()
        calls.append("packed")
        return packed_attention(q, k, v, cu_seqlens_q, softmax_scale, causal, window_size)

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


def version_3(calls):
    """A module ``flash_attn_interface`` of an early release, which returns (out, lse)."""
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0,
    ):  # fmt: skip
        calls.append("dense")
        return attention(q, k, v, softmax_scale, causal, window_size), None

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0,
    ):  # fmt: skip
        calls.append("packed")
        return packed_attention(q, k, v, cu_seqlens_q, softmax_scale, causal, window_size), None

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


def install(monkeypatch, version):
    """Puts a fake of ``version`` where ``import`` finds it; returns the list that its calls are added to."""
    calls = []
    module = {2: version_2, 3: version_3}[version](calls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls
