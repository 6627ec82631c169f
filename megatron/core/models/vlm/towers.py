"""Vision towers by name, as data: class, parameters, images and sizes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.description.model import Config, LayerPlace, Param
from megatron.core.description.parts import norm
from megatron.core.models.common.description import encoder_layer

if TYPE_CHECKING:
    from megatron.core.datasets.images import Images

CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class TowerKind:
    """One kind of vision tower."""

    module: str
    """Class as ``"package.module:Class"``; takes the configuration of the language model and ``VisionConfig``."""
    parameters: Callable[[Config, VisionConfig], Iterator[Param]]
    """Its parameters without the prefix ``vision.``; every rank holds them."""
    images: Callable[[VisionConfig], Images]
    """Conversion of image files to patches. Imports numpy."""
    sizes: Mapping[str, object]
    """Values of unset settings. Settings of other towers have no effect on this one."""
    norm_epsilon: float = 1e-6
    is_fixed: bool = False
    """Whether all images have --img-h x --img-w pixels."""
    is_clip: bool = False
    """CLIP: a class token, a norm before the layers, quick GELU, no bias of patches."""


def tower_kind(vision: VisionConfig) -> TowerKind:
    """Return the tower that ``vision`` names."""
    return TOWERS[str(vision.vision_model_type)]


def tower_config(language: Config, vision: VisionConfig) -> TransformerConfig:
    """Return the configuration of the tower's layers: sizes of ``vision``, formats of ``language``, one rank."""
    same = (
        "bf16", "fp16", "fp64", "init_method_std", "perform_initialization", "seed", "deterministic_mode",
        "attention_backend", "no_persist_layer_norm",
    )  # fmt: skip
    return TransformerConfig(
        num_layers=vision.vision_num_layers + 1 + vision.vision_feature_layer,  # later layers have no effect
        hidden_size=vision.vision_hidden_size,
        num_attention_heads=vision.vision_num_attention_heads,
        ffn_hidden_size=vision.vision_ffn_hidden_size,
        norm_epsilon=tower_kind(vision).norm_epsilon,
        bias_gelu_fusion=True,  # the tanh approximation
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **{name: getattr(language, name) for name in same},
    )


def patch_values(vision: VisionConfig) -> int:
    """Return the numbers in a patch: channels x frames x rows x columns."""
    return CHANNELS * vision.vision_frames * vision.vision_patch_size**2


def grid(vision: VisionConfig) -> tuple[int, int]:
    """Return the rows and columns of patches of images of --img-h x --img-w pixels."""
    return vision.img_h // vision.vision_patch_size, vision.img_w // vision.vision_patch_size


def class_tokens(vision: VisionConfig) -> int:
    """Return the image tokens of an image before the tokens of its patches: 1 for CLIP's class token."""
    return int(tower_kind(vision).is_clip and not vision.disable_vision_class_token)


def image_tokens(vision: VisionConfig) -> int:
    """Return the image tokens of an image of --img-h x --img-w pixels."""
    rows, columns = grid(vision)
    return rows * columns // vision.vision_merge_size**2 + class_tokens(vision)


def num_positions(vision: VisionConfig) -> int:
    """Return the learned positions of a tower with images of a fixed size, with the class token's."""
    rows, columns = grid(vision)
    return rows * columns + int(tower_kind(vision).is_clip)


def tower_parameters(language: Config, vision: VisionConfig) -> list[Param]:
    """Return the parameters of the tower, which every rank holds."""
    params = tower_kind(vision).parameters(language, vision)
    return [replace(param, name=f"vision.{param.name}") for param in params]


def _linear(name: str, rows: int, columns: int, bias: bool = True) -> Iterator[Param]:
    yield Param(f"{name}.weight", (rows, columns))
    if bias:
        yield Param(f"{name}.bias", (rows,), ndim=1)


def _layers(config: TransformerConfig) -> Iterator[Param]:
    for index in range(config.num_layers):
        for branch in encoder_layer(config, LayerPlace(index + 1, 1, causal=False)):
            yield from (replace(param, mesh={}) for param in branch.under(f"blocks.layers.{index}.").params)


def _qwen_parameters(language: Config, vision: VisionConfig) -> Iterator[Param]:
    config = tower_config(language, vision)
    width, joined = config.hidden_size, config.hidden_size * vision.vision_merge_size**2
    yield Param("position_embeddings.weight", (vision.vision_num_positions, width))
    yield from _linear("patch_embed", width, patch_values(vision))
    deep = [f"deep_mergers.{number}" for number in range(len(vision.vision_deepstack_layers or ()))]
    for name in ("merger", *deep):
        yield from norm(f"{name}.norm", width if name == "merger" else joined, config)
        yield from _linear(f"{name}.linear_fc1", joined, joined)
        yield from _linear(f"{name}.linear_fc2", language.hidden_size, joined)
    yield from _layers(config)


def _fixed_parameters(language: Config, vision: VisionConfig) -> Iterator[Param]:
    config, is_clip = tower_config(language, vision), tower_kind(vision).is_clip
    yield Param("position_embeddings.weight", (num_positions(vision), config.hidden_size))
    yield from _linear("patch_embed", config.hidden_size, patch_values(vision), bias=not is_clip)
    if is_clip:
        yield Param("class_embedding.weight", (1, config.hidden_size))
        yield from norm("first_norm", config.hidden_size, config)
    yield from _linear("merger.linear_fc1", language.hidden_size, config.hidden_size)
    yield from _linear("merger.linear_fc2", language.hidden_size, language.hidden_size)
    yield from _layers(config)


def _qwen_images(vision: VisionConfig) -> Images:
    from megatron.core.datasets.images import ImageSettings

    return ImageSettings(
        vision.vision_patch_size, vision.vision_merge_size, vision.vision_frames, vision.image_min_pixels,
        vision.image_max_pixels, mean=tuple(vision.image_mean or ()), std=tuple(vision.image_std or ()),
    )  # fmt: skip


def _fixed_images(vision: VisionConfig) -> Images:
    from megatron.core.datasets.images import FixedImages

    return FixedImages(
        vision.vision_patch_size, grid(vision), str(vision.image_fit), class_tokens(vision),
        mean=tuple(vision.image_mean or ()), std=tuple(vision.image_std or ()),
    )  # fmt: skip


_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SO400M = {
    "vision_num_layers": 27, "vision_hidden_size": 1152, "vision_num_attention_heads": 16,
    "vision_ffn_hidden_size": 4304,
}  # fmt: skip
_PLAIN = {"vision_frames": 1, "vision_merge_size": 1}
TOWERS = {
    "qwen": TowerKind(
        module="megatron.core.models.vlm.tower:QwenTower",
        parameters=_qwen_parameters,
        images=_qwen_images,
        sizes={
            **_SO400M, **_HALVES, "vision_patch_size": 16, "vision_frames": 2, "vision_merge_size": 2,
            "vision_num_positions": 2304,
        },
    ),
    "clip": TowerKind(
        module="megatron.core.models.vlm.clip:ClipTower",
        parameters=_fixed_parameters,
        images=_fixed_images,
        sizes={
            **_PLAIN, "vision_num_layers": 24, "vision_hidden_size": 1024, "vision_num_attention_heads": 16,
            "vision_ffn_hidden_size": 4096, "vision_patch_size": 14, "img_h": 336, "img_w": 336, "image_fit": "crop",
            "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
        norm_epsilon=1e-5,
        is_fixed=True,
        is_clip=True,
    ),
    "siglip": TowerKind(
        module="megatron.core.models.vlm.clip:ClipTower",
        parameters=_fixed_parameters,
        images=_fixed_images,
        sizes={
            **_PLAIN, **_SO400M, **_HALVES, "vision_patch_size": 14, "img_h": 384, "img_w": 384, "image_fit": "stretch",
        },
        is_fixed=True,
    ),
}  # fmt: skip
