"""Rules of models that read images."""

from __future__ import annotations

import math

from megatron.core.config.distillation import DistillationConfig
from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.config.vision import VisionConfig
from megatron.core.models.vlm.towers import TOWERS, image_tokens, tower_kind


def image_token(cfg: Settings) -> Problems:
    """Texts have an image token."""
    if cfg.group(VisionConfig).image_token_id is None:
        yield problem(cfg, "image_token_id", "is required without --mock-data", "give the id of the tokenizer")


def tower_sizes(cfg: Settings) -> Problems:
    """Heads divide the tower's width, for two rotary axes into multiples of four channels."""
    vision = cfg.group(VisionConfig)
    unit = 1 if tower_kind(vision).is_fixed else 4
    width, heads = vision.vision_hidden_size, vision.vision_num_attention_heads
    if None in (width, heads, vision.vision_num_layers):  # sizes of the language model, which are missing
        return
    if width % (unit * heads):
        reason = f"is not divisible by {'4 x ' * (unit > 1)}{heads} heads (--vision-num-attention-heads)"
        yield problem(cfg, "vision_hidden_size", reason)
    if vision.vision_num_layers + 1 + vision.vision_feature_layer < 1:
        reason = f"leaves no layer of --vision-num-layers {vision.vision_num_layers}"
        yield problem(cfg, "vision_feature_layer", reason)


def sizes_of_images(cfg: Settings) -> Problems:
    """Images of a fixed size consist of full patches and fit into rows; learned positions form a square."""
    vision = cfg.group(VisionConfig)
    if not tower_kind(vision).is_fixed:
        if math.isqrt(vision.vision_num_positions) ** 2 != vision.vision_num_positions:
            yield problem(cfg, "vision_num_positions", "is not a square number")
        if not vision.images_per_row:
            return
    unit = vision.vision_patch_size * vision.vision_merge_size
    factors = f"--patch-dim {vision.vision_patch_size}"
    factors += f" x --vision-merge-size {vision.vision_merge_size}" * (vision.vision_merge_size > 1)
    for name in ("img_h", "img_w"):
        if getattr(vision, name) is None:
            yield problem(cfg, name, "is required with --images-per-row")
            return
        if getattr(vision, name) % unit:
            yield problem(cfg, name, f"is not divisible by {factors}")
    number, tokens = vision.images_per_row or 0, image_tokens(vision)
    if cfg.data.seq_length and cfg.data.seq_length <= number * tokens:
        images = "an image" if number == 1 else f"{number} images"
        yield problem(cfg, "seq_length", f"has no room for the {tokens} tokens of {images}", "make it longer")


def settings_of_towers(cfg: Settings) -> Problems:
    """Settings belong to the tower."""
    vision = cfg.group(VisionConfig)
    kind = tower_kind(vision)
    sizes = {*kind.sizes, *(("img_h", "img_w") if vision.images_per_row else ())}
    options: dict[str, object] = {name: None for tower in TOWERS.values() for name in tower.sizes if name not in sizes}
    options |= {"vision_deepstack_layers": None} if kind.is_fixed else {"vision_feature_layer": -1}
    options |= {} if kind.is_clip else {"disable_vision_class_token": False}
    options |= {"vision_merge_size": 1, "vision_frames": 1} if kind.is_fixed else {"dataloader_seq_length": None}
    for name, value in options.items():
        if getattr(vision, name) != value:
            yield problem(
                cfg, name, f"is not supported with --vision-model-type {vision.vision_model_type}", "remove it"
            )


def axes_of_positions(cfg: Settings) -> Problems:
    """Three sections fill the rotary pairs, and every axis finds its pairs in the interleaved order."""
    sections = cfg.group(VisionConfig).mrope_section
    if sections is None or cfg.model.kv_channels is None:  # another rule reports the missing size
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


def distillation_reads_text_only(cfg: Settings) -> Problems:
    """Reject a teacher, whose images would have another size."""
    settings = cfg.group(DistillationConfig)
    for field in ("export_kd_teacher_load", "logits_load_dir", "logits_save_dir"):
        if getattr(settings, field) is not None:
            yield problem(cfg, field, "is not supported with images", "remove it")
