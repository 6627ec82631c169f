"""Next-token prediction of texts with images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.config.sft import FineTuningConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.datasets.image_positions import axes
from megatron.core.datasets.megatron_dataset import Ragged
from megatron.core.models.vlm.description import patch_values
from megatron.core.models.vlm.model import Images, VisionLanguageModel
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
        expected, actual = len(batch["patches"]) // vision.vision_merge_size**2, int(is_image.sum())
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
        """Return the random sample of GPT with up to two images per document: image tokens, which have no loss,
        ``patches`` and ``sizes``; with --mrope-section also ``axes``, the rotary positions."""
        vision, sample = self.cfg.group(VisionConfig), super().random_sample(generator)
        image, merge = vision.image_token_id, vision.vision_merge_size
        tokens = np.append(np.asarray(sample["tokens"]), np.asarray(sample["labels"])[-1:])
        tokens[tokens == image] = int(image == 0)
        bounds = np.asarray(sample.get("cu_seqlens", [0, len(tokens) - 1])).tolist()
        squares: list[tuple[int, int]] = []
        positions = []
        for first, last in zip(bounds, bounds[1:]):
            images = _place_images(tokens[first:last], image, generator)
            positions.append(axes(tokens[first:last] == image, images))
            squares += images
        sizes = np.array(squares, dtype=np.int64).reshape(-1, 2) * merge
        patches = generator.standard_normal((int(sizes.prod(1).sum()), patch_values(vision)), dtype=np.float32)
        mask = np.asarray(sample["loss_mask"]) * (tokens[1:] != image)
        sample |= {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask.astype(np.float32)}
        if vision.mrope_section is not None:
            sample["axes"] = np.concatenate(positions)
        return {**sample, "patches": Ragged(patches), "sizes": Ragged(sizes)}


def _place_images(tokens: np.ndarray, image: int | None, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Write up to two random images into ``tokens`` [s] of a document; return their rows and columns of tokens."""
    squares, place = [], 0
    for _ in range(int(generator.integers(0, 3))):
        rows, columns = generator.integers(1, 4, 2).tolist()
        place += int(generator.integers(1, 4))
        if place + rows * columns > len(tokens):
            break
        tokens[place : place + rows * columns] = image
        place += rows * columns
        squares.append((rows, columns))
    return squares
