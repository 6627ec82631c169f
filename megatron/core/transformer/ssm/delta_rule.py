"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) in chunks, in plain torch or by kernels. Per head, a state
S [k, v]:

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T,   o_t = S_t^T q_t

With a log-decay g per key channel (Kimi delta attention, arXiv 2510.26692), exp(g_t) is a diagonal matrix.
Within a chunk, the corrections u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t) of its tokens solve a triangular system
(section 3.3 of the paper).

Legend: s sequence, b batch, h value heads, a key heads, n chunks, c tokens of a chunk, k channels of a key, v of
a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.linear_attention import linear_attention
from megatron.core.transformer.ssm.chunks import channel_decays, decays, from_chunks, in_chunks
from megatron.core.transformer.ssm.description import CHUNK
from megatron.core.transformer.ssm.kernel_check import kernels_serve


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    follows: Tensor | None,
    state: Tensor,
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return (outputs [s, b, h, v], state [b, h, k, v] after the last token), in the dtype of ``state``; outputs of the
    kernels are bf16.

    Args:
        query: [s, b, a, k], scaled. h / a consecutive value heads have the same query and key head.
        key: [s, b, a, k].
        value: [s, b, h, v].
        log_decay: g, at most 0, [s, b, h], or [s, b, h, k] per channel.
        beta: [s, b, h].
        follows: whether a token follows another one of its document, bool [s, b] (``chunks.decays``).
        state: before the first token, [b, h, k, v]; the computation has its dtype, fp32 or fp64.
        size: tokens of a chunk, with decays per channel rounded to a power of two; results differ by rounding only.
    """
    per_channel = log_decay.ndim == 4
    if kernels_serve(delta_rule, key, value, per_channel):
        return linear_attention(query, key, value, log_decay, beta, follows, state)
    length, shared = len(value), value.shape[2] // key.shape[2]
    size = min(size, length)  # one new token needs no full chunk
    if per_channel:
        size = 1 << (size - 1).bit_length()
    query, key = (in_chunks(x.to(state.dtype).repeat_interleave(shared, 2), size) for x in (query, key))
    value, beta = in_chunks(value.to(state.dtype), size), in_chunks(beta.to(state.dtype), size).unsqueeze(-1)
    log_decay = log_decay.to(state.dtype)
    if per_channel:
        left = torch.stack((key, query))
        (overlap, scores), start, end = channel_decays(left, key, in_chunks(log_decay, size), follows)
    else:
        decay = decays(log_decay, follows, size)
        start, end = decay.start.unsqueeze(-1), decay.end.unsqueeze(-1)
        overlap, scores = key @ key.mT * decay.within, query @ key.mT * decay.within
    # (1 + lower) u = beta v - beta k exp(g) S: one triangular system, whose right side is linear in the state
    lower = (beta * overlap).tril(-1)
    sides = torch.cat((beta * value, beta * start * key), dim=-1)
    solved = torch.linalg.solve_triangular(lower, sides, upper=False, unitriangular=True)
    new, old = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    query, key, total = query * start, key * end, start[..., -1:, :].mT
    outputs = []
    for chunk in range(len(value)):
        corrections = new[chunk] - old[chunk] @ state
        outputs.append(query[chunk] @ state + scores[chunk] @ corrections)
        state = total[chunk] * state + key[chunk].mT @ corrections
    return from_chunks(torch.stack(outputs), length), state
