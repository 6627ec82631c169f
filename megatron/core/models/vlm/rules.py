"""Rules of models that read images."""

from __future__ import annotations

import math

from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.config.vision import VisionConfig


def tower_sizes(cfg: Settings) -> Problems:
    """Heads divide the tower's width into multiples of four channels; its learned positions form a square."""
    vision = cfg.group(VisionConfig)
    if vision.vision_hidden_size % (4 * vision.vision_num_attention_heads):
        reason = f"is not divisible by 4 x {vision.vision_num_attention_heads} heads (--vision-num-attention-heads)"
        yield problem(cfg, "vision_hidden_size", reason)
    if math.isqrt(vision.vision_num_positions) ** 2 != vision.vision_num_positions:
        yield problem(cfg, "vision_num_positions", "is not a square number")


def axes_of_positions(cfg: Settings) -> Problems:
    """Three sections fill the rotary pairs, and every axis finds its pairs in the interleaved order."""
    sections = cfg.group(VisionConfig).mrope_section
    if sections is None:
        return
    pairs = int(cfg.model.kv_channels * cfg.embeddings.rotary_percent) // 2
    if len(sections) != 3 or min(sections) < 1 or sum(sections) != pairs:
        yield problem(cfg, "mrope_section", f"must be three positive numbers with the sum {pairs}, the rotary pairs")
    elif any(3 * section > pairs + 2 - axis for axis, section in enumerate(sections) if axis):
        reason = f"gives an axis more than every third of {pairs} pairs"
        yield problem(cfg, "mrope_section", reason, "give most pairs to the first axis, time")
    if cfg.embeddings.position_embedding_type != "rope":
        yield problem(cfg, "mrope_section", "requires --position-embedding-type rope")


def deep_layers(cfg: Settings) -> Problems:
    """Deep layers of the tower exist, each once."""
    vision = cfg.group(VisionConfig)
    deep = vision.vision_deepstack_layers or []
    if deep != sorted(set(deep)) or (deep and deep[-1] >= vision.vision_num_layers):
        reason = f"must ascend, below --vision-num-layers {vision.vision_num_layers}"
        yield problem(cfg, "vision_deepstack_layers", reason)


def image_predictions(cfg: Settings) -> Problems:
    """Multi-token prediction embeds words only."""
    if cfg.model.mtp_num_layers is not None:
        yield problem(cfg, "mtp_num_layers", "embeds words only, not image tokens", "remove it")
