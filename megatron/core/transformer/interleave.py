"""Tensor-parallel communication of one half of a micro-batch behind the computation of the other half.

Under sequence parallelism a layer waits four times: positions are gathered before the first product of attention and
of the feed-forward network, and sums are scattered after the last. The sequences of a micro-batch have nothing to do
with each other, so two halves take turns. A layer is six pieces per half, each of which ends where a collective is
started or begins where one is waited for:

    norm, gather >   > qkv, attention   proj, scatter >   > add, norm, gather >   > fc1, activation   fc2, scatter >

One half is two pieces ahead, and they alternate. So every collective has a piece with products beside it; in backward,
where autograd goes back the same way, as well. (Collectives need the other half's independent work and not pieces of
the same product: a gather takes longer than the product of query, key and value that it feeds.)

Legend: s sequence (local), b batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import RotaryTables
from megatron.core.random.dropout import DropoutCoordinates

Walk = Generator[None, None, Tensor]
"""Computation that stops between its pieces."""


class Surroundings(NamedTuple):
    """What layers take besides the hidden states."""

    attention_mask: Tensor | None
    rotary_pos_emb: RotaryTables | None
    packed_seq_params: PackedSeqParams | None
    dropout: DropoutCoordinates | None


def can_be_halved(hidden_states: Tensor, around: Surroundings) -> bool:
    """Whether there are two equal halves; packed documents are numbered through the whole micro-batch."""
    return hidden_states.shape[1] % 2 == 0 and around.packed_seq_params is None


def halves(around: Surroundings, batch: int) -> list[Surroundings]:
    """The two halves of a micro-batch of ``batch`` sequences; what is the same for all of them goes to both."""

    def part(x: Tensor, half: int, dim: int = 0) -> Tensor:
        return x.chunk(2, dim)[half] if x.shape[dim] == batch else x

    result = []
    for half in range(2):
        mask, rotary, _, dropout = around
        mask = None if mask is None else part(mask, half)
        rotary = None if rotary is None else RotaryTables(*(part(table, half, 1) for table in rotary))
        if dropout is not None:
            dropout = replace(dropout, sample_b=part(dropout.sample_b, half))
        result.append(Surroundings(mask, rotary, None, dropout))
    return result


def walk_through(layers: Sequence[Any], hidden_states: Tensor, around: Surroundings) -> Walk:
    """One half through ``layers``, which have :attr:`TransformerLayer.pieces`."""
    for layer in layers:
        hidden_states = yield from layer.pieces(hidden_states, around)
    return hidden_states


def take_turns(ahead: Walk, behind: Walk) -> tuple[Tensor, Tensor]:
    """Runs both to their ends, the first two pieces ahead."""
    results: dict[Walk, Tensor] = {}
    waiting = chain((ahead, behind, ahead), _for_ever(ahead, behind))
    while len(results) < 2:
        walk = next(waiting)
        if walk not in results:
            try:
                next(walk)
            except StopIteration as end:
                results[walk] = end.value
    return results[ahead], results[behind]


def _for_ever(*walks: Walk) -> Generator[Walk, None, None]:
    while True:
        yield from walks


def run_interleaved(layers: Sequence[Any], hidden_states: Tensor, around: Surroundings) -> Tensor:
    """[s, b, h] -> [s, b, h], b even."""
    batch = hidden_states.shape[1]
    inputs = [half.contiguous() for half in hidden_states.chunk(2, dim=1)]
    walks = [walk_through(layers, half, own) for half, own in zip(inputs, halves(around, batch))]
    return torch.cat(take_turns(*walks), dim=1)
