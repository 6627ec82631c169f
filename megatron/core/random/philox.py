"""Random numbers that are pure functions of a key and an index, so that no result depends on how a tensor is sliced.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): ten rounds of two
32x32-bit products on a 128-bit counter under a 64-bit key. It passes TestU01's BigCrush, is what cuRAND, JAX and
``tl.philox`` use, and has published test vectors, so a GPU kernel can return the same bits. Here it runs in int64
operations of torch or, on CPUs, of NumPy: products of two 32-bit words wrap modulo 2**64, whose bits are the ones
wanted.

One counter gives four 32-bit words; element ``i`` of a stream is word ``i % 4`` of counter ``i // 4``. Normal numbers
come from Box-Muller on pairs (0,1) and (2,3) in float64, with logarithm, sine and cosine as polynomials in the five
IEEE operations that are exactly rounded everywhere: the library functions differ between vector body, scalar tail and
device, these do not.

Legend: ``words`` are int64 tensors that hold 32-bit unsigned values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_CHUNK_COUNTERS = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Counters per pass. On a CPU the int64 temporaries (128 KiB each) stay in a core's second-level cache; a GPU needs
passes large enough (32 MiB) that launching their kernels does not take longer than running them."""


def key(seed: int, *parts: str | int) -> int:
    """A 64-bit key from a seed and any strings and integers; the same in every process and on every machine."""
    text = "\x1f".join([str(int(seed)), *(f"{type(part).__name__[0]}{part}" for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def philox(counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], key: int) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on a counter of four words (broadcast against each other): four words."""
    tensors = [word for word in counter if isinstance(word, Tensor)]
    if tensors and all(type(word) is Tensor and word.device.type == "cpu" for word in tensors):
        # NumPy takes a third of torch's time for these operations, on large and on small arrays
        arrays = (word.numpy() if isinstance(word, Tensor) else word for word in counter)
        with np.errstate(over="ignore"):
            return tuple(torch.from_numpy(np.asarray(word)) for word in _rounds(tuple(arrays), key))
    return _rounds(counter, key)


def _rounds(counter: tuple[Any, ...], key: int) -> tuple[Any, ...]:
    """:func:`philox` of tensors, arrays or integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    for _ in range(10):
        # only the low halves of c1 and c3 count, so they may carry dirt above bit 31 until they are used
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ c1 ^ k0) & _MASK32
        c2 = ((product_0 >> 32) ^ c3 ^ k1) & _MASK32
        c1, c3 = product_1, product_0
        k0, k1 = (k0 + _WEYL_0) & _MASK32, (k1 + _WEYL_1) & _MASK32
    return c0, c1 & _MASK32, c2, c3 & _MASK32


def _words_of_blocks(key: int, blocks: Tensor) -> Tensor:
    """The four words of each counter of ``blocks`` (int64, any shape), in a new last dim of 4."""
    words = philox((blocks & _MASK32, blocks >> 32, torch.zeros_like(blocks), 0), key)
    return torch.stack(words, dim=-1)


def _uniform_of_words(words: Tensor) -> Tensor:
    """Float64 in (0, 1)."""
    return (words.double() + 0.5) * 2.0**-32


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Horner's rule, highest power first."""
    result = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        result = result.add_(coefficient).mul_(x)
    return result.add_(coefficients[-1])


_ATANH_SERIES = [1.0 / n for n in range(17, 0, -2)]
_SINE_SERIES = [(-1.0) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1)]
_COSINE_SERIES = [(-1.0) ** n / math.factorial(2 * n) for n in range(7, -1, -1)]


def _log_of_uniform(u: Tensor) -> Tensor:
    """log(u) for float64 0 < u < 1, to 1e-14: exponent from the bits, mantissa m in [1, 2) by 2
    artanh((m-1.5)/(m+1.5))."""
    bits = u.view(torch.int64)
    exponent = (bits >> 52).sub_(1023).double()
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(torch.float64)
    ratio = (mantissa - 1.5).div_(mantissa.add_(1.5))
    series = _polynomial(ratio * ratio, _ATANH_SERIES).mul_(ratio).mul_(2.0)
    return series.add_(math.log(1.5)).add_(exponent.mul_(math.log(2.0)))


def _normal_of_words(words: Tensor) -> Tensor:
    """Box-Muller on the word pairs of the last dim (its size is even): float64 of the same shape."""
    pairs = words.unflatten(-1, (-1, 2))
    radius = _log_of_uniform(_uniform_of_words(pairs[..., 0])).mul_(-2.0).clamp_(min=0.0).sqrt_()
    angle = pairs[..., 1]
    # 30 bits of angle within a quarter circle around 0, one bit turns it by a right angle, one by half a circle
    turn = ((angle & 0x3FFFFFFF) - 0x20000000).double().add_(0.5).mul_(math.pi / 2**31)
    squared = turn * turn
    sine = _polynomial(squared, _SINE_SERIES).mul_(turn)
    cosine = _polynomial(squared, _COSINE_SERIES)
    swap = (angle & 0x40000000) != 0
    radius = radius * (1 - (angle >> 31 << 1)).double()
    first = torch.where(swap, sine, cosine).mul_(radius)
    second = torch.where(swap, cosine, sine).mul_(radius)
    return torch.stack((first, second), dim=-1).flatten(-2)


def _chunk_counters(device: torch.device) -> int:
    return _CHUNK_COUNTERS.get(device.type, _CHUNK_COUNTERS["cpu"])


def _aligned_runs(key: int, starts: Tensor, length: int, transform) -> Iterator[tuple[slice, Tensor]]:
    """Values of runs whose starts and length are multiples of four, a bounded number of runs at a time."""
    blocks_per_run = length // 4
    runs_per_pass = max(1, _chunk_counters(starts.device) // blocks_per_run)
    offsets = torch.arange(blocks_per_run, device=starts.device)
    for first in range(0, len(starts), runs_per_pass):
        runs = slice(first, first + runs_per_pass)
        blocks = (starts[runs, None] >> 2) + offsets
        yield runs, transform(_words_of_blocks(key, blocks)).flatten(1)


def fill_runs_(out: Tensor, key: int, starts: Tensor, distribution: str = "normal") -> Tensor:
    """Fill each row of ``out`` [runs, length] with the stream's elements from ``starts[run]`` on, in place.

    ``distribution`` is ``"normal"`` (standard) or ``"uniform"`` (on (0, 1)). Memory beyond ``out`` is bounded.
    """
    transform = {"normal": _normal_of_words, "uniform": _uniform_of_words}[distribution]
    length = out.shape[1]
    chunk = _chunk_counters(out.device)
    if len(starts) > 1 and length % 4 == 0 and bool((starts % 4 == 0).all()) and length // 4 <= chunk:
        for runs, values in _aligned_runs(key, starts, length, transform):
            out[runs] = values
        return out
    for row, start in zip(out, starts.tolist()):
        for done in range(0, length, 4 * chunk):
            count = min(4 * chunk, length - done)
            first = start + done
            blocks = torch.arange(first >> 2, (first + count + 3) >> 2, device=out.device)
            skipped = first & 3
            row[done : done + count] = transform(_words_of_blocks(key, blocks)).flatten()[skipped : skipped + count]
    return out


@dataclass(frozen=True)
class DropoutStream:
    """Keep-masks as functions of (seed, sample, layer, site, token position, feature), independent of any layout.

    The counter words of one element are: feature // 8, token position, low half of the sample index, and
    (row << 16 | high half of the sample index), where ``row`` tells attention heads apart. The key is (seed, layer,
    site). Each of the eight 16-bit lanes of a counter's four words decides one feature, so that rates are multiples of
    2**-16; ``exact_rate`` is what scales must be computed from.
    """

    seed: int

    @staticmethod
    def exact_rate(rate: float) -> float:
        """The multiple of 2**-16 with which values are dropped."""
        return round(rate * 65536) / 65536

    def key(self, site: tuple[str | int, ...]) -> int:
        """The 64-bit key of the masks of a site."""
        return key(self.seed, "dropout", *site)

    def keep_mask(
        self, rate: float, site: tuple[str | int, ...], sample: Tensor, position: Tensor, row: Tensor | int, feature:
        range
    ) -> Tensor:
        """Bool mask, True with probability 1 - ``exact_rate(rate)``, where :meth:`lanes` are large."""
        return self.lanes(site, sample, position, row, feature) >= round(rate * 65536) - 32768

    def lanes(
        self, site: tuple[str | int, ...], sample: Tensor, position: Tensor, row: Tensor | int, feature: range
    ) -> Tensor:
        """Int16, uniform on [-2**15, 2**15).

        ``sample``, ``position`` and ``row`` are int64 tensors that broadcast to all dims but the last (their own last
        dim is 1); ``feature`` are the consecutive global feature indices along the last dim.
        """
        first, last = feature.start >> 3, (feature.stop + 7) >> 3
        blocks = torch.arange(first, last, device=sample.device)
        high = (sample >> 32) | (row << 16)
        words = philox((blocks, position, sample & _MASK32, high), self.key(site))
        lanes = torch.stack((words[0] | words[1] << 32, words[2] | words[3] << 32), dim=-1).view(torch.int16)
        return lanes.flatten(-2).narrow(-1, feature.start & 7, len(feature))
