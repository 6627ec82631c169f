"""Rows of packed conversations with images (--sft of models that read images), read from JSON lines files.

Tokens are prepared once; images are read when a row is, in the loader's workers. The line of a sequence is read again
for the paths of its images."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.datasets.conversations.images import ImageReader, item_paths
from megatron.core.datasets.conversations.prepare import Report, json_object, read_lines
from megatron.core.datasets.image_files import ImageError
from megatron.core.datasets.image_positions import axes
from megatron.core.datasets.images import Images
from megatron.core.datasets.megatron_dataset import Ragged, Sample
from megatron.core.datasets.sft_dataset import ConversationFile, SFTDataset, SFTDatasetConfig
from megatron.core.safe_files import open_regular
from megatron.data.index_cache import IndexCache, file_stamp

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ImageDatasetConfig(SFTDatasetConfig):
    """Settings of :class:`ImageDataset`."""

    images: Images
    image_token: int
    """Id of an image token."""
    skip_images: bool = False
    """Leave out conversations whose images cannot be read, in place of an error."""


class ImageFile(ConversationFile):
    """Tokenized conversations with images of a JSON lines file."""

    def __init__(self, path: str, config: ImageDatasetConfig) -> None:
        folder = os.path.dirname(os.path.abspath(path))
        self.path, self.images = path, ImageReader(config.images, config.image_token, folder, config.skip_images)
        super().__init__(path, config, self.images.reader)
        layout = {"offsets": ((None,), "int64")}
        identity = {"path": os.path.abspath(path), "size_and_mtime": file_stamp(path)}
        cache = IndexCache(config.path_to_cache or f"{path}.cache", "lines", identity, layout)
        self.offsets = cache.get(lambda: {"offsets": line_offsets(path)})["offsets"]

    def cut_lengths(self, numbers: np.ndarray, most: int) -> np.ndarray:
        """Return the lengths of the base class, less images that the cut would split, or that would be the end."""
        lengths = super().cut_lengths(numbers, most)
        for place in np.flatnonzero(self.lengths[numbers] > most):
            start = int(self.starts[numbers[place]])
            words = np.flatnonzero(self.tokens[start : start + most] != -1 - self.images.token)  # images have no loss
            lengths[place] = words.max(initial=0) + 1
        return lengths

    def paths(self, number: int) -> list[str]:
        """Return the paths of the images in the conversation of a sequence."""
        line = int(self.lines[number])
        with open_regular(self.path) as file:
            file.seek(int(self.offsets[line - 1]))
            content = json_object(file.readline())
        return item_paths(list(self.images.read(content, Report(), line))[int(self.items[number])])


class ImageDataset(SFTDataset):
    """See the module. ``dataset[i]`` has the tensors of :class:`SFTDataset`, ``axes`` int64 [s, 3], the rotary
    positions, and for its images ``patches`` fp32 [n, values] and ``sizes`` int64 [i, 2], rows and columns in patches,
    both as :class:`Ragged`. Sequences longer than s + 1 are cut at the end, but not within an image."""

    config: ImageDatasetConfig

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: SFTDatasetConfig) -> ImageFile:
        assert isinstance(config, ImageDatasetConfig)
        return ImageFile(dataset_path, config)

    def __getitem__(self, idx: int) -> Sample:
        sample, images = super().__getitem__(idx), self.config.images
        is_image = sample["tokens"] == self.config.image_token
        sizes: list[tuple[int, int]] = []
        patches = [images.blank((0, 0))]
        positions, bounds = [], sample["cu_seqlens"].tolist()
        numbers = self.row_sequences(idx).tolist()
        for first, last, number in zip(bounds, bounds[1:], [*numbers, None]):
            document = slice(first, last)
            squares = []
            if number is not None and is_image[document].any():
                for path, size in self._sizes(number, int(is_image[document].sum())):
                    patches.append(self._patches(sample, document, number, path, size))
                    sizes.append(size)
                    squares.append(images.tokens(size))
            positions.append(axes(is_image[document], squares))
        return {
            **sample,
            "axes": np.concatenate(positions),
            "patches": Ragged(np.concatenate(patches)),
            "sizes": Ragged(np.array(sizes, dtype=np.int64).reshape(-1, 2)),
        }

    def describe(self, row: int) -> Iterator[str]:
        """Yield the texts of the base class, the tokens of each image as one and their number."""
        token = self.config.tokenizer.detokenize([self.config.image_token])
        for text in super().describe(row):
            yield re.sub(
                f"(?:{re.escape(token)}){{2,}}", lambda image: f"{token} x {len(image[0]) // len(token)}", text
            )

    def _sizes(self, number: int, tokens: int) -> list[tuple[str, tuple[int, int]]]:
        images, chosen = self.dataset.images, []
        for path in self.dataset.paths(number):
            if not tokens:
                break
            size = images.size(path)
            chosen.append((path, size))
            rows, columns = self.config.images.tokens(size)
            tokens -= rows * columns
        if tokens:
            line = self.dataset.lines[number]
            raise UserError(
                f"{self.dataset_path}, line {line}: an image has another size than when the file was tokenized; "
                f"remove the folder {self.config.path_to_cache or f'{self.dataset_path}.cache'}"
            )
        return chosen

    def _patches(self, sample: Sample, document: slice, number: int, path: str, size: tuple[int, int]) -> np.ndarray:
        """Return the patches of an image. A damaged one is an error, or grey without a loss."""
        try:
            return self.config.images.patches(self.dataset.images.place(path), size)
        except ImageError as error:
            text = f"{self.dataset_path}, line {self.dataset.lines[number]}: image {path}: {error}"
            if not self.config.skip_images:
                raise UserError(f"{text}; repair it, or skip such conversations: --image-errors skip") from error
            logger.warning("%s; the conversation has no loss", text)
            sample["loss_mask"][document] = 0
            return self.config.images.blank(size)


def line_offsets(path: str) -> np.ndarray:
    """Return the position of the first byte of each line, int64 [lines]."""
    lengths = [len(line) for _, line in read_lines(path)]
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
