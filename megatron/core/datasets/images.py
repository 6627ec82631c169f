"""Images as patches for vision towers. Torch-free.

- Qwen2-VL and its successors: resized to full squares of patches, with a number of pixels in a range
- CLIP, SigLIP: all of one size"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass

import numpy as np

from megatron.core.datasets.image_files import ImageError, Source, image_size, read_image

MAX_RATIO = 200
"""Largest ratio of the longer side to the shorter one."""


class Images:
    """Conversion of image files to patches. Subclasses are frozen data classes, whose fields their name depends on."""

    patch: int
    """Height and width of a patch, in pixels."""
    merge: int
    """Height and width of a square, in patches."""
    frames: int
    """An image is repeated so often."""
    mean: tuple[float, ...]
    """Mean of each channel, 0 to 1, and its standard deviation."""
    std: tuple[float, ...]

    @property
    def name(self) -> str:
        """A hash of the settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]  # type: ignore[call-overload]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width, in patches, of an image of this many pixels: multiples of ``merge``. Raises
        ImageError for a very long image."""
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ImageError(f"is {height} x {width} pixels: one side is more than {MAX_RATIO} times the other")
        return self.fitting_size(height, width)

    def fitting_size(self, height: int, width: int) -> tuple[int, int]:
        """Return :meth:`size` of an image that is not very long."""
        raise NotImplementedError

    def read(self, source: Source, size: tuple[int, int]) -> np.ndarray:
        """Return an image file's pixels with this ``size`` in patches, uint8 [height, width, 3]. Raises ImageError."""
        raise NotImplementedError

    def tokens(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of the image tokens of an image of ``size`` in patches."""
        return size[0] // self.merge, size[1] // self.merge

    def file_size(self, path: str) -> tuple[int, int]:
        """Return :meth:`size` of an image file. Raises ImageError."""
        return self.size(*image_size(path))

    def patches(self, source: Source, size: tuple[int, int]) -> np.ndarray:
        """Return the patches of an image file, fp32 [n, channels * frames * rows * columns], square by square."""
        (rows, columns), merge, patch = size, self.merge, self.patch
        pixels = self.read(source, size).astype(np.float32) / np.float32(255)
        normed = (pixels - np.array(self.mean, dtype=np.float32)) / np.array(self.std, dtype=np.float32)
        squares = normed.reshape(rows // merge, merge, patch, columns // merge, merge, patch, -1)
        ordered = squares.transpose(0, 3, 1, 4, 6, 2, 5)  # square row, square column, row, column, channel, pixel
        repeated = np.broadcast_to(ordered[..., None, :, :], (*ordered.shape[:5], self.frames, patch, patch))
        return repeated.reshape(rows * columns, -1)

    def blank(self, size: tuple[int, int]) -> np.ndarray:
        """Return the patches of a grey image, fp32 [n, values]."""
        rows, columns = size
        return np.zeros((rows * columns, 3 * self.frames * self.patch**2), dtype=np.float32)


@dataclass(frozen=True)
class ImageSettings(Images):
    """Images of different sizes."""

    patch: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def fitting_size(self, height: int, width: int) -> tuple[int, int]:
        step = self.patch * self.merge
        rows, columns = round(height / step), round(width / step)
        shrink, grow = math.sqrt(height * width / self.max_pixels), math.sqrt(self.min_pixels / (height * width))
        if rows * columns * step**2 > self.max_pixels:
            rows, columns = (max(1, math.floor(side / shrink / step)) for side in (height, width))
        elif rows * columns * step**2 < self.min_pixels:
            rows, columns = (math.ceil(side * grow / step) for side in (height, width))
        return rows * self.merge, columns * self.merge

    def read(self, source: Source, size: tuple[int, int]) -> np.ndarray:
        return read_image(source, size[0] * self.patch, size[1] * self.patch)


@dataclass(frozen=True)
class FixedImages(Images):
    """Images of one size."""

    patch: int
    grid: tuple[int, int]
    """Rows and columns of patches."""
    fit: str
    """``crop``, ``pad`` or ``stretch``."""
    class_tokens: int
    """Image tokens of an image before the tokens of its patches."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    merge: int = 1
    frames: int = 1

    def fitting_size(self, height: int, width: int) -> tuple[int, int]:
        return self.grid

    def tokens(self, size: tuple[int, int]) -> tuple[int, int]:
        """One row if there is a class token."""
        return (1, self.class_tokens + size[0] * size[1]) if self.class_tokens else size

    def read(self, source: Source, size: tuple[int, int]) -> np.ndarray:
        color = tuple(int(channel * 255) for channel in self.mean)
        return read_image(source, size[0] * self.patch, size[1] * self.patch, fit=self.fit, color=color)
