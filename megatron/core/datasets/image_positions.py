"""Rotary positions of texts with images (Qwen2-VL, arXiv 2409.12191): time, row and column of each token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def axes(is_image: np.ndarray, squares: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return the positions int64 [s, 3] of one document. A word has the same position on all axes, one more than the
    largest before it. The tokens of an image stay at one time, and count rows and columns from it.

    Args:
        is_image: whether each token belongs to an image, bool [s].
        squares: rows and columns of the tokens of each image, in the order of the document."""
    result = np.zeros((len(is_image), 3), dtype=np.int64)
    place = position = 0
    for rows, columns in squares:
        words = int(is_image[place:].argmax())
        result[place : place + words] = position + np.arange(words)[:, None]
        place, position = place + words, position + words
        row, column = np.divmod(np.arange(rows * columns), columns)
        result[place : place + len(row)] = position + np.stack((np.zeros_like(row), row, column), axis=1)
        place, position = place + len(row), position + max(rows, columns)
    result[place:] = position + np.arange(len(is_image) - place)[:, None]
    return result
