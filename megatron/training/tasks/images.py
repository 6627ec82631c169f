"""Next-token prediction of texts with images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.config.sft import FineTuningConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.datasets.image_positions import axes
from megatron.core.datasets.images import Images as ImageSizes
from megatron.core.datasets.megatron_dataset import Ragged
from megatron.core.models.vlm.model import Images, VisionLanguageModel
from megatron.core.models.vlm.towers import class_tokens, grid, image_tokens, patch_values, tower_kind
from megatron.training.data.batch import Batch
from megatron.training.data.batches import Batches
from megatron.training.data.packed_rows import PackedRows
from megatron.training.tasks.base import NumSamples
from megatron.training.tasks.gpt import GPTTask
from megatron.training.tasks.language_model import mock_data


class ImageRows(PackedRows):
    """Rows with the ``patches`` [n, p] and ``sizes`` int64 [i, 2] of their images."""

    def local(self, batch: Batch) -> Batch:
        """Return the local part of the rows, with the images and the rotary positions as ``inputs`` of the model.
        Patches stay on the host: a rank copies the part that it computes. Raises UserError if the tokens have another
        number of image tokens than the images."""
        vision = self.cfg.group(VisionConfig)
        is_image = batch["tokens"] == vision.image_token_id
        expected = len(batch["patches"]) // vision.vision_merge_size**2 + class_tokens(vision) * len(batch["sizes"])
        actual = int(is_image.sum())
        if actual != expected:
            raise UserError(f"tokens: {actual} have --image-token-id, but the images of the batch take {expected}")
        numbers = is_image.flatten().cumsum(0).view_as(is_image) - 1
        rows = {name: value for name, value in batch.items() if name not in ("patches", "sizes")}
        local = super().local({**rows, "image_numbers": numbers.where(is_image, -1)})
        images = Images(batch["patches"], batch["sizes"], local.pop("image_numbers"))
        return {**local, "inputs": {"images": images, "axes": local.pop("axes", None)}}


class ImageTask(GPTTask):
    """GPT with a vision tower, on conversations with images (--sft), on text, or on mock data."""

    @property
    def model_class(self) -> Callable[..., nn.Module]:
        return partial(VisionLanguageModel, vision=self.cfg.group(VisionConfig))

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[object, object, object]:
        """Return conversations or text, by the data flags; random rows of words and images with --mock-data."""
        if self.cfg.data.mock_data:
            train, valid, test = mock_data(self, num_samples)
            return train, valid, test
        return super().train_valid_test_datasets_provider(num_samples)

    def make_batches(self) -> Batches:
        """Rows with images, or rows of text."""
        if self.cfg.data.mock_data or self.cfg.group(FineTuningConfig).sft:
            return ImageRows(self.cfg, self.sequence_keys, self.whole_keys)
        return super().make_batches()

    def random_sample(self, generator: np.random.Generator) -> dict[str, object]:
        """Return the random sample of GPT with images: image tokens, which have no loss, ``patches`` and ``sizes``;
        with --mrope-section also ``axes``, the rotary positions. A row has --images-per-row images (at most: none
        crosses the end of a document), else documents have up to two of random sizes."""
        vision, sample = self.cfg.group(VisionConfig), super().random_sample(generator)
        image, images = vision.image_token_id, tower_kind(vision).images(vision)
        equal = None if vision.images_per_row is None else [*_equal_images(vision, self.cfg.data.seq_length)]
        tokens = np.append(np.asarray(sample["tokens"]), np.asarray(sample["labels"])[-1:])
        tokens[tokens == image] = int(image == 0)
        bounds = np.asarray(sample.get("cu_seqlens", [0, len(tokens) - 1])).tolist()
        sizes: list[tuple[int, int]] = []
        positions = []
        for first, last in zip(bounds, bounds[1:]):
            chosen = [*_random_images(images, generator)] if equal is None else equal
            document = _place_images(tokens[first:last], image, images, chosen)
            positions.append(axes(tokens[first:last] == image, map(images.tokens, document)))
            sizes += document
        number = sum(rows * columns for rows, columns in sizes)
        patches = generator.standard_normal((number, patch_values(vision)), dtype=np.float32)
        mask = np.asarray(sample["loss_mask"]) * (tokens[1:] != image)
        sample |= {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask.astype(np.float32)}
        if vision.mrope_section is not None:
            sample["axes"] = np.concatenate(positions)
        return {**sample, "patches": Ragged(patches), "sizes": Ragged(np.array(sizes, dtype=np.int64).reshape(-1, 2))}


def _place_images(
    tokens: np.ndarray, image: int | None, images: ImageSizes, chosen: list[tuple[int, tuple[int, int]]]
) -> list[tuple[int, int]]:
    """Write ``chosen`` images (words before it, size) into ``tokens`` [s] of a document, as long as they fit, and
    remove these; return their sizes in patches."""
    sizes, place = [], 0
    while chosen:
        words, size = chosen[0]
        count = math.prod(images.tokens(size))
        place += words
        if place + count > len(tokens):
            break
        del chosen[0]
        tokens[place : place + count] = image
        place += count
        sizes.append(size)
    return sizes


def _random_images(images: ImageSizes, generator: np.random.Generator) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (words before an image, its size in patches) of up to two images."""
    for _ in range(int(generator.integers(0, 3))):
        rows, columns = (generator.integers(1, 4, 2) * images.merge).tolist()
        yield int(generator.integers(1, 4)), (rows, columns)


def _equal_images(vision: VisionConfig, length: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (words before an image, its size in patches) of --images-per-row images, at equal distances."""
    number = vision.images_per_row or 0
    words = (length - number * image_tokens(vision)) // max(number, 1)
    for image in range(number):
        yield words if image else 0, grid(vision)
