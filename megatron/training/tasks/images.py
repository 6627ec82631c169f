"""Next-token prediction of texts with images."""

from __future__ import annotations

import numpy as np
from torch import nn

from megatron.core.config.sft import FineTuningConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.datasets.image_positions import axes
from megatron.core.datasets.megatron_dataset import Ragged
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
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
        Patches stay on the host, from where a rank copies those that it computes."""
        is_image = batch["tokens"] == self.cfg.group(VisionConfig).image_token_id
        numbers = is_image.flatten().cumsum(0).view_as(is_image) - 1
        rows = {name: value for name, value in batch.items() if name not in ("patches", "sizes")}
        local = super().local({**rows, "image_numbers": numbers.where(is_image, -1)})
        images = Images(batch["patches"], batch["sizes"], local.pop("image_numbers"))
        return {**local, "inputs": {"images": images, "axes": local.pop("axes", None)}}


class ImageTask(GPTTask):
    """GPT with a vision tower, on conversations with images (--sft), on text, or on mock data."""

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        """Build this pipeline stage of a :class:`VisionLanguageModel` from the flags."""
        config = self.cfg.family.transformers(self.cfg)["decoder"]
        spec = get_gpt_decoder_block_spec(config, self.cfg.model.transformer_impl == "transformer_engine")
        settings = self.model_settings(pre_process, post_process, vp_stage)
        return VisionLanguageModel(config, settings, spec, self.cfg.group(VisionConfig))

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[object, ...]:
        """Return conversations or text, by the data flags; random rows of words and images with --mock-data."""
        if self.cfg.data.mock_data:
            return mock_data(self, num_samples)
        return super().train_valid_test_datasets_provider(num_samples)

    def make_batches(self) -> Batches:
        """Rows with images, or rows of text."""
        if self.cfg.data.mock_data or self.cfg.group(FineTuningConfig).sft:
            return ImageRows(self.cfg, self.sequence_keys, self.whole_keys)
        return super().make_batches()

    def random_sample(self, generator: np.random.Generator) -> dict[str, object]:
        """Return the random sample of GPT with up to three images at random places: image tokens, which have no loss,
        ``patches`` and ``sizes``; with --mrope-section also ``axes``, the rotary positions."""
        vision, sample = self.cfg.group(VisionConfig), super().random_sample(generator)
        tokens = np.append(sample["tokens"], sample["labels"][-1:])  # type: ignore[index, arg-type]
        tokens[tokens == vision.image_token_id] = int(vision.image_token_id == 0)
        bounds = np.asarray(sample.get("cu_seqlens", [0, len(tokens) - 1]))
        sizes, places = [], []
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
            place = first
            for _ in range(int(generator.integers(0, 3))):
                rows, columns = generator.integers(1, 4, 2).tolist()
                place += int(generator.integers(1, 4))
                if place + rows * columns > last:
                    break
                tokens[place : place + rows * columns] = vision.image_token_id
                sizes.append((rows, columns))
                places.append(place)
                place += rows * columns
        squares = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        is_image, merge = tokens == vision.image_token_id, vision.vision_merge_size
        counts = (squares.prod(1) * merge**2).sum()
        patches = generator.standard_normal((int(counts), patch_values(vision)), dtype=np.float32)
        mask = np.asarray(sample["loss_mask"]) * ~is_image[1:]
        sample |= {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask.astype(np.float32)}
        if vision.mrope_section is not None:
            parts = [
                axes(is_image[first:last], [s for s, place in zip(sizes, places) if first <= place < last])
                for first, last in zip(bounds[:-1], bounds[1:])
            ]
            sample["axes"] = np.concatenate(parts)
        return {**sample, "patches": Ragged(patches), "sizes": Ragged(squares * merge)}
