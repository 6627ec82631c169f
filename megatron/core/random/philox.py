"""Counter-based random numbers: pure functions of a key and an index, independent of how a tensor is sharded.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): ten rounds of two
32x32-bit products on a 128-bit counter with a 64-bit key. It passes TestU01's BigCrush, is used by cuRAND, JAX and
``tl.philox``, and has published test vectors, so that a GPU kernel can return the same bits. It is implemented in int64
operations of torch or, on CPUs, NumPy: products of two 32-bit words wrap modulo 2**64 to the required bits.

One counter yields four 32-bit words; element ``i`` of a stream is word ``i % 4`` of counter ``i // 4``. Normal numbers
are computed by Box-Muller on pairs (0,1) and (2,3) in float64. Logarithm, sine and cosine are polynomials of the five
IEEE operations that are exactly rounded everywhere: library functions differ between vector body, scalar tail and
device, which would make the bits depend on the sharding.

Legend: ``words`` are int64 tensors that hold 32-bit unsigned values."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any
"""A tensor, or an array of NumPy."""
_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_CHUNK_COUNTERS = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Counters per pass. On a CPU the int64 temporaries (128 KiB each) fit in a core's L2 cache; a GPU needs larger passes
(32 MiB), whose kernels take longer to run than to launch."""


def _array(values: Array) -> Array:
    """Return the memory of a tensor on the CPU as an array of NumPy, and other ``values`` as they are."""
    return values.numpy() if type(values) is Tensor and values.device.type == "cpu" else values


def _tensor(values: Array) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


@functools.lru_cache(1 << 14, typed=True)  # every dropout mask of a step asks for the key of its site
def key(seed: int, *parts: str | int) -> int:
    """Return a 64-bit key (BLAKE2b) of a seed and any strings and integers; equal in all processes and machines."""
    text = "\x1f".join([str(int(seed)), *(f"{type(part).__name__[0]}{part}" for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def philox(counter: tuple[Array, Array, Array, Array], key: int) -> tuple[Array, ...]:
    """Run ten rounds of Philox4x32 on a counter of four words, tensors, arrays or integers (broadcast together), with
    the 64-bit ``key``. Return four int64 tensors with 32-bit unsigned values; arrays or integers if no word is a tensor
    (and none an array). Uses NumPy on CPUs, with equal results."""
    words = list(map(_array, counter))
    if not any(isinstance(word, np.ndarray) for word in words):
        return _rounds(counter, key)
    # NumPy needs a third of torch's time for these operations, for large and small arrays
    with np.errstate(over="ignore"):
        words = list(map(np.asarray, _rounds(words, key)))
    return tuple(map(torch.from_numpy, words) if any(isinstance(word, Tensor) for word in counter) else words)


def _rounds(counter: Sequence[Any], key: int) -> tuple[Any, ...]:
    """Compute :func:`philox` on int64 tensors, arrays or integers; products may wrap modulo 2**64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    for _ in range(10):
        # only the low 32 bits of c1 and c3 matter: they are masked when used, and keep higher bits until then
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ c1 ^ k0) & _MASK32
        c2 = ((product_0 >> 32) ^ c3 ^ k1) & _MASK32
        c1, c3 = product_1, product_0
        k0, k1 = (k0 + _WEYL_0) & _MASK32, (k1 + _WEYL_1) & _MASK32
    return c0, c1 & _MASK32, c2, c3 & _MASK32


def _block_words(key: int, blocks: Array) -> Array:
    """Return the four words of each counter (int64, any shape) in a new last dim of 4."""
    words = philox((blocks & _MASK32, blocks >> 32, 0 * blocks, 0), key)
    return _library(blocks).stack(words, -1)


def _library(x: Array) -> Any:
    return torch if isinstance(x, Tensor) else np


def _double(x: Array) -> Array:
    return x.double() if isinstance(x, Tensor) else x.astype(np.float64)


def _uniform_from_words(words: Array) -> Array:
    return (_double(words) + 0.5) * 2.0**-32


def _polynomial(x: Array, coefficients: list[float]) -> Array:
    """Horner's rule, highest power first."""
    result = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        result += coefficient
        result *= x
    result += coefficients[-1]
    return result


_ATANH_SERIES = [1.0 / n for n in range(17, 0, -2)]
_SINE_SERIES = [(-1.0) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1)]
_COSINE_SERIES = [(-1.0) ** n / math.factorial(2 * n) for n in range(7, -1, -1)]


def _log_uniform(u: Array) -> Array:
    """log(u) to 1e-14: exponent from the bits, mantissa m in [1, 2) by the series of 2 artanh((m-1.5)/(m+1.5))."""
    bits = u.view(_library(u).int64)
    exponent = _double((bits >> 52) - 1023)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(_library(u).float64)
    ratio = (mantissa - 1.5) / (mantissa + 1.5)
    series = _polynomial(ratio * ratio, _ATANH_SERIES)
    series *= ratio
    series *= 2.0
    series += math.log(1.5)
    exponent *= math.log(2.0)
    series += exponent
    return series


def _normal_from_words(words: Array) -> Array:
    """Box-Muller on the pairs (0, 1), (2, 3) of the last dim. The bits are the same on all devices. NumPy on CPUs:
    torch's square root there is not exactly rounded."""
    if _array(words) is not words:
        return torch.from_numpy(_normal_from_words(_array(words)))
    library = _library(words)
    pairs = words.reshape(*words.shape[:-1], -1, 2)
    radius = _log_uniform(_uniform_from_words(pairs[..., 0]))
    radius *= -2.0
    radius = library.sqrt(radius.clip(min=0.0))
    angle = pairs[..., 1]
    # 30 bits: angle within a quarter circle around 0; one bit adds a quarter turn, one bit a half turn
    turn = _double((angle & 0x3FFFFFFF) - 0x20000000)
    turn += 0.5
    turn *= math.pi / 2**31
    squared = turn * turn
    sine = _polynomial(squared, _SINE_SERIES)
    sine *= turn
    cosine = _polynomial(squared, _COSINE_SERIES)
    swap = (angle & 0x40000000) != 0
    radius *= _double(1 - (angle >> 31 << 1))
    first, second = library.where(swap, sine, cosine), library.where(swap, cosine, sine)
    first *= radius
    second *= radius
    return library.stack((first, second), -1).reshape(words.shape)


GUMBEL_KEY = key(0, "gumbel")
"""Key of the noise of draws."""


def gumbel(seeds: Tensor, positions: Tensor, length: int, key: int = GUMBEL_KEY) -> Tensor:
    """Return standard Gumbel numbers -log(-log u), float64 [r, length]; u is a function of the seed, the position (both
    int64 [r, 1]) and the index in the row."""
    blocks = torch.arange((length + 3) // 4, device=seeds.device)
    words = philox((blocks, positions, seeds & _MASK32, seeds >> 32), key)
    uniform = _uniform_from_words(torch.stack(words, dim=-1).flatten(-2)[..., :length])
    return _log_uniform(uniform).neg_().log_().neg_()


def _chunk_counters(device: torch.device) -> int:
    return _CHUNK_COUNTERS.get(device.type, _CHUNK_COUNTERS["cpu"])


def _counters(first: int, end: int, device: torch.device) -> Array:
    return _array(torch.arange(first, end, device=device))


def _aligned_runs(
    key: int, starts: Tensor, length: int, transform: Callable[..., Array]
) -> Iterator[tuple[slice, Array]]:
    """Yield (slice of runs, their elements [runs, length]) in passes of bounded memory. Starts and ``length`` must be
    divisible by four; ``transform`` maps words [..., 4] to values of that shape."""
    blocks_per_run = length // 4
    runs_per_pass = max(1, _chunk_counters(starts.device) // blocks_per_run)
    offsets = _counters(0, blocks_per_run, starts.device)
    for first in range(0, len(starts), runs_per_pass):
        runs = slice(first, first + runs_per_pass)
        blocks = _array(starts[runs, None] >> 2) + offsets
        yield runs, transform(_block_words(key, blocks)).reshape(-1, length)


def fill_runs_(out: Tensor, key: int, starts: Tensor, distribution: str = "normal") -> Tensor:
    """Fill each row of ``out`` [runs, length] in place with the stream's elements from ``starts[run]``; return ``out``.
    ``distribution``: ``"normal"`` (standard) or ``"uniform"`` on (0, 1). Extra memory is bounded. Waits for the
    device."""
    transform = {"normal": _normal_from_words, "uniform": _uniform_from_words}[distribution]
    length = out.shape[1]
    chunk = _chunk_counters(out.device)
    if len(starts) > 1 and length % 4 == 0 and bool((starts % 4 == 0).all()) and length // 4 <= chunk:
        for runs, values in _aligned_runs(key, starts, length, transform):
            out[runs] = _tensor(values)
        return out
    for row, start in zip(out, starts.tolist()):
        for offset in range(0, length, 4 * chunk):
            count = min(4 * chunk, length - offset)
            first = start + offset
            blocks = _counters(first >> 2, (first + count + 3) >> 2, out.device)
            values = _tensor(transform(_block_words(key, blocks))).flatten()
            row[offset : offset + count] = values[first & 3 :][:count]
    return out


@dataclass(frozen=True)
class DropoutStream:
    """Keep-masks as functions of (seed, sample, layer, site, token position, feature), independent of the layout. The
    counter words of an element are: feature // 8, token position, low half of the sample index, and (row << 16 | high
    half of the sample index), where ``row`` distinguishes attention heads. The key is (seed, layer, site). Each of the
    eight 16-bit lanes of a counter's four words decides one feature, so that rates are multiples of 2**-16; compute
    scales from ``exact_rate``."""

    seed: int

    @staticmethod
    def exact_rate(rate: float) -> float:
        """Return ``rate`` rounded to a multiple of 2**-16: the probability with which elements are dropped."""
        return round(rate * 65536) / 65536

    def key(self, site: tuple[str | int, ...]) -> int:
        """Return the 64-bit key of a site's masks."""
        return key(self.seed, "dropout", *site)

    def keep_mask(
        self,
        rate: float,
        site: tuple[str | int, ...],
        sample: Tensor,
        position: Tensor,
        row: Tensor | int,
        feature: range,
    ) -> Tensor:
        """Return a bool mask, True with probability 1 - ``exact_rate(rate)``; other arguments as in :meth:`lanes`."""
        return self.lanes(site, sample, position, row, feature) >= round(rate * 65536) - 32768

    def lanes(
        self, site: tuple[str | int, ...], sample: Tensor, position: Tensor, row: Tensor | int, feature: range
    ) -> Tensor:
        """Return int16 values, uniform on [-2**15, 2**15). ``sample``, ``position`` and ``row`` are int64 tensors with
        last dim 1 that broadcast to the other dims; ``feature`` is the range of global feature indices in the last
        dim."""
        blocks = _counters(feature.start >> 3, (feature.stop + 7) >> 3, sample.device)
        sample, position, row = map(_array, (sample, position, row))
        words = philox((blocks, position, sample & _MASK32, (sample >> 32) | (row << 16)), self.key(site))
        library = _library(words[0])
        lanes = library.stack((words[0] | words[1] << 32, words[2] | words[3] << 32), -1).view(library.int16)
        return _tensor(lanes).flatten(-2).narrow(-1, feature.start & 7, len(feature))
