"""Decoders that read images, as a model family: GPT with a vision tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.config.optional import PackedSamplesConfig
from megatron.core.config.problems import Settings, collect_rules
from megatron.core.config.sft import FineTuningConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.models.family import DataSet, Options, Program
from megatron.core.models.gpt import family as gpt
from megatron.core.models.vlm import description, rules
from megatron.core.models.vlm.towers import TOWERS, image_tokens, tower_kind
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size


def data_set(cfg: Settings, options: Options) -> DataSet:
    """Return (class, configuration) of the data set: ImageDataset with --sft, else GPT's data set. Reads no data."""
    tuning, vision = cfg.group(FineTuningConfig), cfg.group(VisionConfig)
    if not tuning.sft or cfg.data.mock_data:
        return gpt.data_set(cfg, options)
    from megatron.core.datasets import image_dataset  # imports numpy

    return image_dataset.ImageDataset, image_dataset.ImageDatasetConfig(
        **options,
        packing=tuning.sft_packing,
        images=tower_kind(vision).images(vision),
        image_token=vision.image_token_id,
        skip_images=vision.image_errors == "skip",
    )


def derive(flat: Any) -> Options:
    """Return the values of unset flags of the tower, and the length of rows with --dataloader-seq-length. Without
    --vision-model-type these are Megatron-LM's: sizes of the language model, and image tokens in addition to
    --seq-length."""
    values = gpt.FAMILY.derive(flat)
    kind = flat.vision_model_type or "clip"
    sizes: dict[str, object] = {}
    if flat.vision_model_type is None:
        same = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
        sizes = {f"vision_{name}": getattr(flat, name) for name in same}
        sizes |= {"vision_patch_size": 16, "img_h": 224, "img_w": 224, "dataloader_seq_length": flat.seq_length}
    if flat.mock_data:
        sizes["image_token_id"] = 0
        if TOWERS[kind].is_fixed:
            sizes["images_per_row"] = 1
    sizes = {**TOWERS[kind].sizes, **sizes}
    values |= {name: value for name, value in sizes.items() if getattr(flat, name) is None}
    vision = flat.with_settings(**values, vision_model_type=kind)
    if (words := vision.dataloader_seq_length) is not None and TOWERS[kind].is_fixed:
        multiple = 2 * flat.context_parallel_size if flat.context_parallel_size > 1 else 1
        multiple *= flat.tensor_model_parallel_size if flat.sequence_parallel else 1
        length = -(-(words + image_tokens(vision)) // multiple) * multiple
        values |= {"seq_length": length, "encoder_seq_length": length}
        values["max_position_embeddings"] = max(flat.max_position_embeddings or 0, length)
    return {**values, "vision_model_type": kind}


def shrink(cfg: Settings, small: Options) -> Options:
    """Return a narrow tower, whose deep layers fit into the first stage of the ``small`` decoder, and small random
    images."""
    vision, stages = cfg.group(VisionConfig), cfg.model.pipeline_model_parallel_size * virtual_pipeline_size(cfg.model)
    kind, patch = tower_kind(vision), 4
    deep = min(len(vision.vision_deepstack_layers or ()), max(1, small["num_layers"] // stages))
    values: dict[str, object] = {
        "vision_model_type": vision.vision_model_type,
        "vision_num_layers": max(2, deep, -vision.vision_feature_layer),
        "vision_hidden_size": 16,
        "vision_num_attention_heads": 2,
        "vision_ffn_hidden_size": 24,
        "vision_patch_size": patch,
        "vision_deepstack_layers": [*range(deep)] or None,
        "image_token_id": 7,
        "mock_data": not cfg.group(FineTuningConfig).sft,
        "images_per_row": vision.images_per_row and min(vision.images_per_row, 2),
        "dataloader_seq_length": vision.dataloader_seq_length and small["seq_length"],
    }
    if kind.is_fixed or vision.images_per_row:
        values |= dict.fromkeys(("img_h", "img_w"), 2 * patch)
    if not kind.is_fixed:
        values["vision_num_positions"] = 25
    if vision.mrope_section is not None:
        values |= {"mrope_section": [small["kv_channels"] // 2 - 2, 1, 1], "rotary_percent": 1.0}
    return values


FAMILY = replace(
    gpt.FAMILY,
    name="vlm",
    is_default=False,
    programs=(Program("vlm", "GPT that reads images"),),
    task="megatron.training.tasks.images:ImageTask",
    data_set=data_set,
    describe=description.describe_settings,
    derive=derive,
    shrink=shrink,
    groups=(*gpt.FAMILY.groups, VisionConfig, PackedSamplesConfig),
    rules=(*gpt.FAMILY.rules, *collect_rules(rules)),
    weight_settings=(*gpt.FAMILY.weight_settings, *description.SETTINGS),
    sequence_tensors=gpt.FAMILY.sequence_tensors | {"axes", "image_numbers"},
    auto_model="AutoModelForImageTextToText",
)
