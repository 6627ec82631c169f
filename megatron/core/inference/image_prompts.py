"""Image files, or their bytes, as images of a prompt. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from megatron.core.config.errors import UserError, counted
from megatron.core.datasets.image_files import ImageError, Source, image_size
from megatron.core.datasets.images import Images
from megatron.core.inference.images import PromptImages

Size: TypeAlias = tuple[int, int]
MAX_PIXELS = 1 << 25
"""Most pixels of a file: a small file may have very many."""


class ImageLoader:
    """Reads images. ``settings``: how they become patches; ``token``: id of an image token."""

    def __init__(self, settings: Images, token: int) -> None:
        self.settings, self.token = settings, token

    def sizes(self, sources: Sequence[Source]) -> list[Size]:
        """Return height and width of each image, in patches, without decoding. Raises UserError with its number."""
        sizes = []
        for number, source in enumerate(sources, 1):
            with _named(source, number):
                height, width = image_size(source)
                if height * width > MAX_PIXELS:
                    raise ImageError(f"has {height} x {width} pixels, at most {MAX_PIXELS} are read")
                sizes.append(self.settings.size(height, width))
        return sizes

    def load(self, sources: Sequence[Source], sizes: Sequence[Size]) -> PromptImages:
        """Return the images, whose sizes are :meth:`sizes`. Raises UserError for a damaged one."""
        patches = [self.settings.blank((0, 0))]
        for number, (source, size) in enumerate(zip(sources, sizes), 1):
            with _named(source, number):
                patches.append(self.settings.patches(source, size))
        return PromptImages(np.concatenate(patches), sizes, [*map(self.settings.tokens, sizes)])

    def expanded(self, ids: Sequence[int], sizes: Sequence[Size]) -> list[int]:
        """Return ``ids`` with every image token repeated for the squares of its image. UserError for another number."""
        places = np.array(ids) == self.token
        if (count := int(places.sum())) != len(sizes):
            raise UserError(
                f"the prompt has {counted(count, 'image token')} for {counted(len(sizes), 'image')}; remove image "
                "tokens from the text, or use a chat template that writes one for each image"
            )
        repeats = np.ones(len(places), np.int64)
        repeats[places] = [rows * columns for rows, columns in map(self.settings.tokens, sizes)]
        return np.repeat(ids, repeats).tolist()


@contextmanager
def _named(source: Source, number: int) -> Iterator[None]:
    """Turn an ImageError into a UserError with the path or number of the image."""
    try:
        yield
    except ImageError as error:
        raise UserError(f"image {source if isinstance(source, str) else number}: {error}") from error
