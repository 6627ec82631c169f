"""Images in prompts: rotary positions, hashes for the cache of prefixes, and the images of a step. Torch-free.

Every step embeds the images that have tokens in it, all their patches: a step may compute a part of an image's tokens,
at any time again. No embedding is stored.

Legend: s tokens of a prompt, n rows of a step, m patches, p values of a patch."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from megatron.core.config.errors import UserError, counted
from megatron.core.datasets.image_positions import axes


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of a prompt, in the order of their tokens."""

    patches: np.ndarray
    """fp32 [m, p], square by square."""
    sizes: Sequence[tuple[int, int]]
    """Height and width of each image, in patches."""
    squares: Sequence[tuple[int, int]]
    """Rows and columns of the tokens of each image."""
    hashes: list[bytes] = field(init=False)
    """A hash of each image, 64 bytes."""

    def __post_init__(self) -> None:
        parts = np.split(self.patches, _bounds(self.sizes)[1:-1])
        hashes = [blake2b(str(size).encode() + part.tobytes()).digest() for size, part in zip(self.sizes, parts)]
        object.__setattr__(self, "hashes", hashes)


class StepImages(NamedTuple):
    """Positions of all rows of a step, and the images of its rows."""

    axes: np.ndarray
    """Rotary positions (time, row, column), int64 [n, 3]."""
    numbers: np.ndarray
    """Number of each row among the tokens of all these images, int64 [n]; -1 for text."""
    sizes: list[tuple[int, int]]
    patches: np.ndarray

    def encode(self) -> list[Any]:
        """Return JSON values."""
        data = b64encode(self.patches.tobytes()).decode()
        return [self.axes.tolist(), self.numbers.tolist(), [*self.sizes], data, self.patches.shape]

    @classmethod
    def decode(cls, values: list[Any]) -> StepImages:
        """Return the images of :meth:`encode`'s values."""
        positions, numbers, sizes, data, shape = values
        patches = np.frombuffer(bytearray(b64decode(data)), np.float32).reshape(shape)
        return cls(np.array(positions, np.int64), np.array(numbers, np.int64), [(h, w) for h, w in sizes], patches)


class PlacedImages:
    """Images at the tokens of their prompt.

    Args:
        token: id of an image token.

    Raises UserError if the prompt has too few or too many image tokens, or text within an image."""

    def __init__(self, prompt: Sequence[int], images: PromptImages, token: int) -> None:
        self.images = images
        is_image = np.array(prompt) == token
        self.bounds = _bounds(images.squares)
        """First token of each image among all image tokens, and their number."""
        places = np.flatnonzero(is_image)
        if len(places) != self.bounds[-1]:
            counts = f"{counted(len(places), 'image token')}, its images have {self.bounds[-1]}"
            raise UserError(f"prompt: has {counts}; repeat token {token} as often")
        pieces = np.split(places, self.bounds[1:-1])
        if any(len(piece) and piece[-1] - piece[0] >= len(piece) for piece in pieces):
            raise UserError("prompt: the tokens of an image are not consecutive; write all tokens of an image in a row")
        self.numbers = np.where(is_image, is_image.cumsum() - 1, -1)
        self.axes = axes(is_image, images.squares)
        self.shift = int(self.axes.max()) + 1 - len(prompt)
        """Rotary position less index of every token after the prompt."""
        names = np.array(prompt, np.int64)
        for digest, piece in zip(images.hashes, pieces):
            names[piece] = np.resize(np.frombuffer(digest, np.int64), len(piece)) | np.int64(-(2**63))
        self.key_ids: list[int] = names.tolist()
        """The prompt for keys of cached pages: a negative hash of its pixels in place of every image token."""

    def part(self, start: int, stop: int) -> tuple[StepImages, int]:
        """Return positions and images of the tokens from ``start`` to ``stop``, and the images' tokens."""
        positions = np.arange(start, stop)[:, None].repeat(3, 1) + self.shift
        numbers = np.full(stop - start, -1)
        count = max(len(self.axes) - start, 0)
        positions[:count], numbers[:count] = self.axes[start:stop], self.numbers[start:stop]
        selected = numbers[numbers >= 0]
        first = last = 0
        if len(selected):
            first, last = np.searchsorted(self.bounds, selected[[0, -1]], "right") - (1, 0)
            numbers[numbers >= 0] -= self.bounds[first]
        patches = self.images.patches[slice(*_bounds(self.images.sizes)[[first, last]])]
        num_tokens = int(self.bounds[last] - self.bounds[first])
        return StepImages(positions, numbers, [*self.images.sizes[first:last]], patches), num_tokens


def _bounds(sizes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the sums of rows x columns before each of ``sizes``, and of all."""
    return np.cumsum([0, *(rows * columns for rows, columns in sizes)])


def step_images(parts: Sequence[tuple[PlacedImages | None, int, int]]) -> StepImages | None:
    """Return positions and images of a step: the tokens from start to stop of several sequences. None if no sequence
    has images, also in earlier steps."""
    if all(images is None for images, _, _ in parts):
        return None
    positions, numbers, sizes, patches, total = [], [], list[tuple[int, int]](), [], 0
    for images, start, stop in parts:
        if images is None:
            positions.append(np.arange(start, stop)[:, None].repeat(3, 1))
            numbers.append(np.full(stop - start, -1))
            continue
        part, num_tokens = images.part(start, stop)
        positions.append(part.axes)
        numbers.append(np.where(part.numbers < 0, -1, part.numbers + total))
        sizes += part.sizes
        patches.append(part.patches)
        total += num_tokens
    return StepImages(np.concatenate(positions), np.concatenate(numbers), sizes, np.concatenate(patches))
