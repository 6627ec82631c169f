"""Recurrences over the tokens of a layout: full sequences on one rank, chunks under context parallelism, or new
tokens of cached sequences.

A context-parallel rank holds chunks of consecutive tokens. A chunk maps the state before it to ``transition @ state +
added``; ranks all-gather these pairs, whose size does not depend on the sequence, and each derives the states before
its chunks. Or all-to-alls give each rank full sequences of some heads (``cp_comm_type`` a2a).

Legend: s sequence (local), b batch, h heads, n chunks, k channels of a key, v of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.attention.context import AttentionContext
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError

Recurrence = Callable[..., tuple[Tensor, Tensor]]
"""``rule(query, key, value, *others, follows, state)`` returns (outputs, state): ``delta_rule.py``. Tensors are
[s, b, heads, ...] each; outputs are linear in (value, state)."""


def follows(ctx: AttentionContext, length: int, batch: int, device: torch.device) -> Tensor | None:
    """Return whether each of this rank's ``length`` tokens follows another one of its document, bool [s, b]; None: no
    token but the first of a sequence begins a document. Raises UserError for a mask, which a recurrence cannot read."""
    layout = ctx.layout
    if ctx.attention_mask is not None:
        raise UserError("attention_mask: linear attention reads documents, not a mask; give packed_seq_params")
    if layout.documents is None or layout.documents.cu_seqlens_q is None:
        return None
    inside = torch.ones(batch * layout.full_length(length) + 1, dtype=torch.bool, device=device)
    inside[layout.documents.cu_seqlens_q.long()] = False
    return inside[:-1].view(batch, -1).T[layout.positions(length, device)]


def scan_heads(
    layout: TokenLayout, layer: int, rule: Recurrence, mask: Tensor | None, *inputs: Tensor, by_heads: bool = False
) -> Tensor:
    """Return the outputs [s, b, h, v] of ``rule`` for ``inputs``: query, key, value and others, [s, b, heads, ...]
    each. Documents by ``mask``; the state is "state" of ``layer``, [b, h, k, v], in fp32 or fp64. ``by_heads``:
    all-to-alls in place of states; the context-parallel ranks must divide the numbers of heads."""
    key, value = inputs[1:3]
    batch, heads = value.shape[1:3]
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    zeros = value.new_zeros((batch, heads, key.shape[-1], value.shape[-1]), dtype=wide)
    if layout.group.size == 1:
        return layout.scan(layer, "state", zeros, lambda *x: rule(*x[:-1], mask, x[-1]), *inputs)
    if by_heads:
        return _scan_by_heads(layout, rule, mask, zeros, *inputs)
    return _scan_by_states(layout, rule, mask, zeros, *inputs)


def rank_chunks(layout: TokenLayout, *tensors: Tensor | None) -> list[list[Tensor | None]]:
    """Return this rank's chunks of each of ``tensors`` [s, ...]; None for None."""
    count = layout.num_chunks
    return [[None] * count if x is None else list(x.chunk(count)) for x in tensors]


def _scan_by_states(
    layout: TokenLayout, rule: Recurrence, mask: Tensor | None, zeros: Tensor, *inputs: Tensor
) -> Tensor:
    """All outputs are linear in the state before a chunk: with the columns of an identity matrix as further columns of
    the state, and zeros as their values, ``rule`` returns what remains of the state at every token."""
    channels, width = zeros.shape[-2:]
    identity = torch.eye(channels, dtype=zeros.dtype, device=zeros.device).expand(*zeros.shape[:2], -1, -1)
    start = torch.cat((zeros, identity), dim=-1)
    results = []
    for query, key, value, *others, links in zip(*rank_chunks(layout, *inputs, mask)):
        padded = torch.cat((value, value.new_zeros((*value.shape[:-1], channels))), dim=-1)
        results.append(rule(query, key, padded, *others, links, start))
    pairs = layout.full(torch.stack([state for _, state in results]), 0)
    states = [zeros]
    for pair in pairs[:-1]:
        added, transition = pair.split((width, channels), dim=-1)
        states.append(transition @ states[-1] + added)
    outputs = []
    for (output, _), state in zip(results, layout.local(torch.stack(states), 0)):
        inside, remains = output.split((width, channels), dim=-1)
        # one product per head, as in the kernels in the dtype of the outputs: broadcasting would copy the state
        outputs.append(inside + torch.einsum("sbhk,bhkv->sbhv", remains, state.to(remains.dtype)))
    return torch.cat(outputs)


def _scan_by_heads(
    layout: TokenLayout, rule: Recurrence, mask: Tensor | None, zeros: Tensor, *inputs: Tensor
) -> Tensor:
    flat = [x if x.ndim == 4 else x.unsqueeze(-1) for x in inputs]
    same = torch.promote_types(zeros.dtype, flat[0].dtype)
    parts = layout.heads(*(x.to(same) for x in flat))
    mine = [(part.squeeze(-1) if x.ndim == 3 else part).to(x.dtype) for part, x in zip(parts, inputs)]
    share = zeros.shape[1] // layout.group.size
    links = None if mask is None else layout.full(mask.to(torch.uint8), 0).bool()
    return layout.tokens(rule(*mine, links, zeros[:, :share])[0].contiguous())
