"""Decoders that read images, as a model family: GPT with a vision tower."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.config.problems import Settings, collect_rules
from megatron.core.config.sft import FineTuningConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.models.family import DataSet, Options, Program
from megatron.core.models.gpt import family as gpt
from megatron.core.models.vlm import description, rules


def data_set(cfg: Settings, options: Options) -> DataSet:
    """Return (class, configuration) of the data set: ImageDataset with --sft, else GPT's data set. Reads no data."""
    tuning, vision = cfg.group(FineTuningConfig), cfg.group(VisionConfig)
    if not tuning.sft or cfg.data.mock_data:
        return gpt.data_set(cfg, options)
    from megatron.core.datasets import image_dataset, images  # imports numpy

    settings = images.ImageSettings(
        patch=vision.vision_patch_size,
        merge=vision.vision_merge_size,
        frames=vision.vision_frames,
        min_pixels=vision.image_min_pixels,
        max_pixels=vision.image_max_pixels,
        mean=tuple(vision.image_mean),
        std=tuple(vision.image_std),
    )
    return image_dataset.ImageDataset, image_dataset.ImageDatasetConfig(
        **options,
        packing=tuning.sft_packing,
        images=settings,
        image_token=vision.image_token_id,
        skip_images=vision.image_errors == "skip",
    )


FAMILY = replace(
    gpt.FAMILY,
    name="vlm",
    is_default=False,
    programs=(Program("vlm", "GPT that reads images", required=("vision_model_type", "image_token_id")),),
    task="megatron.training.tasks.images:ImageTask",
    data_set=data_set,
    describe=description.describe_settings,
    groups=(*gpt.FAMILY.groups, VisionConfig),
    rules=(*gpt.FAMILY.rules, *collect_rules(rules)),
    weight_settings=(*gpt.FAMILY.weight_settings, *description.SETTINGS),
    sequence_tensors=gpt.FAMILY.sequence_tensors | {"axes", "image_numbers"},
    auto_model="AutoModelForImageTextToText",
)
