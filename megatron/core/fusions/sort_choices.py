"""A stable counting sort of small numbers, and its inverse: a kernel counts each key in every block of choices, a
running sum over keys and blocks says where rows of each block begin, and a second kernel writes each choice's place.

No atomic additions: same places every run. The reference is ``permute.sort_choices``.

Legend: t tokens, j choices of a token, n choices (t * j).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

_BLOCK, _NUM_WARPS = 128, 4
"""Choices of a program, which compares each with each: 128 comparisons a thread."""


if triton is not None:

    @triton.jit
    def _within_block(keys, num_choices, BLOCK: tl.constexpr):
        """(choice, whether it is one, its key, equal keys before it in the block, and all of them) of a program."""
        lane, block = tl.arange(0, BLOCK), tl.program_id(0) * BLOCK
        choice = block + lane
        inside = choice < num_choices
        key = tl.load(keys + choice, mask=inside, other=-1)
        # columns are read again: a transposed vector would go through shared memory
        alike = (key[:, None] == tl.load(keys + choice, mask=inside, other=-1)[None, :]).to(tl.int32)
        before = tl.sum(tl.where(lane[None, :] < lane[:, None], alike, 0), axis=1)
        return choice, inside, key, before, tl.sum(alike, axis=1)

    @triton.jit
    def _count_kernel(keys, counts, num_choices, num_blocks, BLOCK: tl.constexpr):
        """Counts of one block, at ``counts`` [keys + 1, blocks], which is zero where a key does not occur."""
        choice, inside, key, before, total = _within_block(keys, num_choices, BLOCK)
        first = inside & (before == 0)  # one writer for each key
        tl.store(counts + key * num_blocks + tl.program_id(0), total, mask=first)

    @triton.jit
    def _place_kernel(
        keys, running, choices, tokens, places, ends, num_choices, num_blocks, num_keys, per_token,
        BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Places of one block's choices, given the ``running`` sums of the counts."""
        choice, inside, key, before, total = _within_block(keys, num_choices, BLOCK)
        upto = tl.load(running + key * num_blocks + tl.program_id(0), mask=inside, other=0)
        place = (upto - total + before).to(tl.int64)
        chosen = key < num_keys
        tl.store(places + choice, tl.where(chosen, place, -1), mask=inside)
        tl.store(choices + place, tl.where(chosen, choice, -1).to(tl.int64), mask=inside)
        tl.store(tokens + place, tl.where(chosen, choice // per_token, -1).to(tl.int64), mask=inside)
        if tl.program_id(0) == 0:
            column = tl.arange(0, WIDTH)
            within = column < num_keys
            last = tl.load(running + (column + 1) * num_blocks - 1, mask=within, other=0)
            tl.store(ends + column, last, mask=within)


def sorted_places(key_tj: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(choice_r, token_r, place_tj, ends) of ``permute.Permutation``, of int64 [t, j] keys up to ``num_keys``, which
    stands for none."""
    key_tj = key_tj.contiguous()
    num_choices, device = key_tj.numel(), key_tj.device
    num_blocks = triton.cdiv(num_choices, _BLOCK)
    choice_r, token_r = torch.empty(2, num_choices, dtype=torch.int64, device=device)
    place_tj = torch.empty_like(key_tj)
    if not num_choices:
        return choice_r, token_r, place_tj, torch.zeros(num_keys, dtype=torch.int32, device=device)
    ends = torch.empty(num_keys, dtype=torch.int32, device=device)
    counts = torch.zeros((num_keys + 1) * num_blocks, dtype=torch.int32, device=device)
    tile = {"BLOCK": _BLOCK, "num_warps": _NUM_WARPS}
    _count_kernel[(num_blocks,)](key_tj, counts, num_choices, num_blocks, **tile)
    _place_kernel[(num_blocks,)](
        key_tj, counts.cumsum(0, dtype=torch.int32), choice_r, token_r, place_tj, ends, num_choices, num_blocks,
        num_keys, key_tj.shape[1], WIDTH=triton.next_power_of_2(num_keys), **tile,
    )  # fmt: skip
    return choice_r, token_r, place_tj, ends
