"""Decoders that read images, as a model family: GPT with a vision tower."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.config.problems import collect_rules
from megatron.core.config.vision import VisionConfig
from megatron.core.models.family import Program
from megatron.core.models.gpt import family as gpt
from megatron.core.models.vlm import description, rules

FAMILY = replace(
    gpt.FAMILY,
    name="vlm",
    is_default=False,
    programs=(Program("vlm", "GPT that reads images", required=("vision_model_type", "image_token_id")),),
    task="megatron.training.tasks.images:ImageTask",
    describe=description.describe_settings,
    groups=(*gpt.FAMILY.groups, VisionConfig),
    rules=(*gpt.FAMILY.rules, *collect_rules(rules)),
    weight_settings=(*gpt.FAMILY.weight_settings, *description.SETTINGS),
    sequence_tensors=gpt.FAMILY.sequence_tensors | {"axes", "image_numbers"},
    auto_model="AutoModelForImageTextToText",
)
