"""Draws from a categorical distribution by the Gumbel-max trick, one pass over the logits.

    argmax_i(logits_i - log(-log u_i))

``u_i`` is word i % 4 of Philox4x32-10 on the counter (i // 4, position, low and high word of the seed), as in
``random/philox.py``. Logarithms are fp32, so that a draw may differ from torch's if two sums differ by rounding only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.dropout_add import signed_word
from megatron.core.fusions.installed_triton import tl, triton

_BLOCKS = 512
"""Counters per program, four logits each."""

if triton is not None:
    from megatron.core.fusions.dropout_add import philox_words

    @triton.jit
    def _gumbel_kernel(
        logits, seeds, positions, best, tokens, key_low, key_high, logits_n, size, BLOCKS: tl.constexpr
    ):  # fmt: skip
        """Write the largest sum of 4 * BLOCKS logits and its index; the first one of equal sums."""
        row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        zero = tl.zeros((BLOCKS,), dtype=tl.uint32)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        word_0, word_1, word_2, word_3 = philox_words(
            block.to(tl.uint32), zero + position.to(tl.uint32), zero + seed.to(tl.uint32),
            zero + (seed >> 32).to(tl.uint32), zero + key_low.to(tl.uint32), zero + key_high.to(tl.uint32),
        )  # fmt: skip
        lane = tl.arange(0, 4)[None, :]
        word = tl.where(lane < 2, tl.where(lane == 0, word_0[:, None], word_1[:, None]),
                        tl.where(lane == 2, word_2[:, None], word_3[:, None]))  # fmt: skip
        # u = (word + 1/2) / 2^32. Near 1 it has too few bits in fp32: -log u = -log(1 - v) is about v + v^2 / 2
        upper = (word >> 31) == 1
        complement = ((tl.full(word.shape, 0xFFFFFFFF, tl.uint32) - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
        small = -tl.log((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10)
        series = complement * (1.0 + complement * (0.5 + complement * (0.33333333 + complement * 0.25)))
        exact = -tl.log(1.0 - complement)
        rate = tl.where(upper, tl.where(complement < 0.01, series, exact), small)
        index = block[:, None] * 4 + lane
        inside = index < size
        value = tl.load(logits + row * logits_n + index, mask=inside, other=float("-inf")).to(tl.float32)
        value = tl.where(inside, value - tl.log(rate), float("-inf"))
        largest = tl.max(tl.max(value, 1), 0)
        first = tl.min(tl.min(tl.where(value == largest, index, 2147483647), 1), 0)
        at = row * tl.num_programs(1) + tile
        tl.store(best + at, largest)
        tl.store(tokens + at, tl.minimum(first, size - 1))  # NaN equals nothing


def gumbel_argmax_triton(logits: Tensor, seeds: Tensor, positions: Tensor, key: int) -> Tensor:
    """Return the index, int64 [r], of the largest logit plus Gumbel noise in each row of ``logits`` [r, v]. ``seeds``
    and ``positions`` are int64 [r, 1], ``key`` has 64 bits."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    count, size = logits.shape
    tiles = triton.cdiv(size, 4 * _BLOCKS)
    best = torch.empty(count, tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(count, tiles, dtype=torch.int64, device=logits.device)
    _gumbel_kernel[(count, tiles)](
        logits, seeds.contiguous(), positions.contiguous(), best, tokens, signed_word(key & 0xFFFFFFFF),
        signed_word(key >> 32), logits.stride(0), size, BLOCKS=_BLOCKS,
    )  # fmt: skip
    return tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]
