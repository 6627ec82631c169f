"""Operations of vision towers for --images-per-row images of --img-h x --img-w pixels. Torch-free.

Tensor- and context-parallel ranks share the images of a row equally.

Legend: n patches of an image, p values of a patch, v width of the tower, m merge size, h hidden size of the language
model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron.core.config.vision import VisionConfig
from megatron.core.description.model import Config, LayerPlace, Op, Piece, Saved
from megatron.core.description.parts import activation_bytes
from megatron.core.models.common.description import encoder_layer
from megatron.core.models.vlm import towers
from megatron.core.models.vlm.towers import grid, image_tokens, num_positions, tower_kind

TOWER, PROJECTION = "vision.", "vision.merger."
"""Prefixes of the names of the tower's operations and parameters."""


def tower_operations(language: Config, vision: VisionConfig, length: int) -> list[Op]:
    """Return the operations of the tower for a row of ``length`` tokens; none without --images-per-row."""
    if not vision.images_per_row:
        return []
    images = vision.images_per_row
    share = images / length / language.tensor_model_parallel_size
    ops = [replace(op, flops=images * op.flops) for op in _image_operations(language, vision)]
    return [*Piece("tower", ops=tuple(ops)).scaled_to_tokens(share).ops]


def _image_operations(language: Config, vision: VisionConfig) -> Iterator[Op]:
    """Yield the operations of one image: FLOPs and bytes of all its patches."""
    config, kind = towers.tower_config(language, vision), tower_kind(vision)
    item, patches = activation_bytes(config), math.prod(grid(vision))
    positions = num_positions(vision) if kind.is_fixed else patches
    weights = {param.name: param.shape for param in towers.tower_parameters(language, vision)}
    stream, squares = positions * config.hidden_size * item, image_tokens(vision)

    def gemm(name: str, rows: int, *saved: Saved, backward: float = 2.0) -> Op:
        output, inner = weights[f"{name}.weight"]
        return Op("gemm", name, 2.0 * rows * output * inner, backward, gemm=(output, inner), saved=saved)

    values = weights[f"{TOWER}patch_embed.weight"][1]
    yield gemm(f"{TOWER}patch_embed", patches, Saved("patches", patches * values * item), backward=1.0)
    if not kind.is_fixed:  # each patch's position is a weighted sum of four entries of the table
        yield Op("embedding", f"{TOWER}positions", traffic=24.0 * stream)
    if kind.is_clip:
        yield Op("norm", f"{TOWER}first_norm", traffic=8.0 * stream, saved=(Saved("stream", stream),))
    place = LayerPlace(1, positions, rotary=not kind.is_fixed, causal=False)
    layer = Piece("layer", ops=tuple(op for branch in encoder_layer(config, place) for op in branch.ops))
    for op in layer.scaled_to_tokens(positions).ops * config.num_layers:
        saved = tuple(replace(tensor, modules=(), offload=()) for tensor in op.saved)
        if kind.is_clip and op.kind == "activation":  # quick GELU: x and its sigmoid
            saved *= 2
        yield replace(op, name=f"{TOWER}blocks.{op.name}", saved=saved, keys=float(positions))
    mergers = ["merger", *(f"deep_mergers.{number}" for number in range(len(vision.vision_deepstack_layers or ())))]
    for name in mergers:
        if not kind.is_fixed:
            normed = (Saved("stream", stream), Saved("normed", stream))
            yield Op("norm", f"{TOWER}{name}.norm", traffic=8.0 * stream, saved=normed)
        inner = squares * weights[f"{TOWER}{name}.linear_fc1.weight"][0] * item
        kept = [Saved("features", stream)] * kind.is_fixed
        yield gemm(f"{TOWER}{name}.linear_fc1", squares, *kept, Saved("input of the activation", inner))
        yield Op("activation", f"{TOWER}{name}.activation", traffic=5.0 * inner, saved=(Saved("activation", inner),))
        yield gemm(f"{TOWER}{name}.linear_fc2", squares)
