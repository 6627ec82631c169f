"""The state-space recurrence of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) in chunks, in plain torch or by kernels.
Per head, a state S [k, v]:

    S_t = exp(g_t) S_(t-1) + k_t v_t^T,   o_t = S_t^T q_t

Legend: s sequence, b batch, h heads, a groups, n chunks, c tokens of a chunk, k channels of a key, v of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.linear_attention import linear_attention
from megatron.core.transformer.ssm.chunks import decays, from_chunks, in_chunks
from megatron.core.transformer.ssm.description import CHUNK
from megatron.core.transformer.ssm.kernel_check import kernels_serve


def state_space(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    follows: Tensor | None,
    state: Tensor,
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return (outputs [s, b, h, v], state [b, h, k, v] after the last token), in the dtype of ``state``; outputs of the
    kernels are bf16.

    Args:
        query: [s, b, a, k]. h / a consecutive heads have the same query and key.
        key: [s, b, a, k].
        value: [s, b, h, v].
        log_decay: g, at most 0, [s, b, h].
        follows: whether a token follows another one of its document, bool [s, b] (``chunks.decays``).
        state: before the first token, [b, h, k, v]; the computation has its dtype, fp32 or fp64.
        size: tokens of a chunk; results differ by rounding only.
    """
    if kernels_serve(state_space, key, value):
        return linear_attention(query, key, value, log_decay, None, follows, state)
    length, shared = len(value), value.shape[2] // key.shape[2]
    size = min(size, length)  # one new token needs no full chunk
    query, key = (in_chunks(x.to(state.dtype), size) for x in (query, key))
    scores = (query @ key.mT).repeat_interleave(shared, 2)
    query, key = (x.repeat_interleave(shared, 2) for x in (query, key))
    value, decay = in_chunks(value.to(state.dtype), size), decays(log_decay.to(state.dtype), follows, size)
    inside = (scores * decay.within) @ value
    added = (key * decay.end.unsqueeze(-1)).mT @ value
    outputs = []
    for chunk in range(len(value)):
        outputs.append(inside[chunk] + (query[chunk] * decay.start[chunk].unsqueeze(-1)) @ state)
        state = decay.total[chunk, ..., None, None] * state + added[chunk]
    return from_chunks(torch.stack(outputs), length), state
