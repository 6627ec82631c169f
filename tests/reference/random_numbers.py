"""Random numbers of a key and an index: initial values and dropout masks (docs/developers/random_numbers.md).

Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3. Box and Muller, "A
note on the generation of random normal deviates" (1958). In uint64 of numpy: products of two 32-bit words never
overflow.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def key_of(seed: int, *parts: str | int) -> int:
    """BLAKE2b-64, little-endian, of the seed and the parts, each after the letter of its type, joined by 0x1f."""
    words = [str(seed), *(("s" if isinstance(part, str) else "i") + str(part) for part in parts)]
    return int.from_bytes(hashlib.blake2b("\x1f".join(words).encode(), digest_size=8).digest(), "little")


def philox(c0, c1, c2, c3, key: int):
    """Ten rounds on arrays of 32-bit counter words that broadcast; four arrays of 32-bit words (dtype uint64)."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in (c0, c1, c2, c3)))
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (second >> SHIFT) ^ c1 ^ np.uint64(k0), second & LOW, (first >> SHIFT) ^ c3 ^ np.uint64(k1), first & LOW,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _stream(key: int, count: int):
    """The first ``count`` words of a stream: word i is word i % 4 of the counter i // 4."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    return np.stack(philox(blocks & LOW, blocks >> SHIFT, 0, 0, key), axis=-1).reshape(-1)


def uniform(key: int, count: int):
    """(word + 1/2) / 2^32, in (0, 1)."""
    return ((_stream(key, count).astype(np.float64) + 0.5) / 2.0**32)[:count]


def normal(key: int, count: int):
    """Pairs from words (2 i, 2 i + 1): radius sqrt(-2 log u) from the first, angle from the second.

    The 30 low bits of the second are an angle t in (-pi/4, pi/4); bit 30 exchanges cosine and sine, bit 31 turns by pi.
    """
    words = _stream(key, count + 1).reshape(-1, 2)
    radius = np.sqrt(-2.0 * np.log((words[:, 0].astype(np.float64) + 0.5) / 2.0**32))
    turn = words[:, 1].astype(np.int64)
    angle = ((turn & 0x3FFFFFFF) - 0x20000000 + 0.5) * (math.pi / 2**31)
    radius = np.where(turn >> 31 == 1, -radius, radius)
    swap = (turn >> 30) & 1 == 1
    first, second = np.where(swap, np.sin(angle), np.cos(angle)), np.where(swap, np.cos(angle), np.sin(angle))
    return np.stack((radius * first, radius * second), axis=-1).reshape(-1)[:count]


def keep_mask(rate: float, key: int, sample, position, row, num_features: int):
    """Return the entries that dropout keeps, bool [..., features]; the other arguments broadcast to the leading dims.

    Feature f is 16-bit lane f % 8 of the counter (f // 8, position, low half of the sample, row * 2^16 + its high
    half); it is kept where the lane with its top bit turned over is at least round(65536 rate).
    """
    sample, position, row = (np.asarray(index, dtype=np.uint64)[..., None] for index in (sample, position, row))
    blocks = np.arange(-(-num_features // 8), dtype=np.uint64)
    words = np.stack(philox(blocks, position, sample & LOW, row << np.uint64(16) | sample >> SHIFT, key), axis=-1)
    lanes = np.stack((words & np.uint64(0xFFFF), words >> np.uint64(16)), axis=-1)
    lanes = lanes.reshape(*lanes.shape[:-3], -1)[..., :num_features]
    return (lanes ^ np.uint64(0x8000)) >= round(rate * 65536)


def kept_share(rate: float) -> float:
    """1 - rate, the rate in whole parts of 65536: what survivors are divided by."""
    return 1.0 - round(rate * 65536) / 65536
