"""Images: the vision tower, image tokens, and which parts are trained. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import Dim, Layers, NonNegativeInt, PositiveFloat, Probability


@dataclass(kw_only=True)
class VisionConfig(OptionalGroup):
    """Images (only in pretrain_vlm.py)"""

    TRANSFORM: ClassVar[str] = "megatron.core.models.vlm.freezing:freezing"

    vision_model_type: Literal["qwen"] | None = None
    """Vision tower, which turns the patches of an image into embeddings of image tokens. qwen: Qwen3-VL, Qwen3.5."""

    vision_num_layers: Layers = 27
    """Transformer layers of the vision tower."""

    vision_hidden_size: Dim = 1152
    """Width of the vision tower."""

    vision_num_attention_heads: Dim = 16
    """Attention heads of the vision tower."""

    vision_ffn_hidden_size: Dim = 4304
    """Feed-forward width of the vision tower."""

    vision_patch_size: Dim = flag("--vision-patch-size", "--patch-dim", default=16)
    """Height and width of a patch, in pixels."""

    vision_frames: Dim = 2
    """Frames of a patch: an image is repeated so often."""

    vision_merge_size: Dim = 2
    """Height and width, in patches, of the square that becomes one image token."""

    vision_num_positions: Dim = 2304
    """Learned positions of the tower, a square number; they are resampled to the patches of each image."""

    vision_deepstack_layers: list[NonNegativeInt] | None = flag("--vision-deepstack-layers", nargs="+")
    """Layers of the tower (from 0) whose outputs are merged too, and added to the image tokens after the first layers
    of the language model, one after each (Qwen3-VL)."""

    image_token_id: NonNegativeInt | None = None
    """Id of an image token in the text: an image takes as many as it has squares of patches."""

    mrope_section: list[Dim] | None = flag("--mrope-section", nargs="+")
    """Pairs of rotary channels that turn by the time, the row and the column of a token; interleaved (Qwen3-VL,
    Qwen3.5). Default: all turn by the position in the text."""

    image_min_pixels: Dim = 65536
    """Images with fewer pixels are enlarged."""

    image_max_pixels: Dim = 16777216
    """Images with more pixels are reduced."""

    image_mean: list[Probability] = flag("--image-mean", nargs=3, default_factory=lambda: [0.5, 0.5, 0.5])
    """Mean of red, green and blue (0 to 1), which is subtracted."""

    image_std: list[PositiveFloat] = flag("--image-std", nargs=3, default_factory=lambda: [0.5, 0.5, 0.5])
    """Standard deviation of red, green and blue, by which pixels are divided."""

    image_errors: Literal["fail", "skip"] = "fail"
    """What a missing or damaged image does: end the run with its line and path, or leave out its conversation."""

    freeze_LM: bool = flag("--freeze-LM", default=False)
    """Do not train the language model."""

    freeze_ViT: bool = flag("--freeze-ViT", default=False)
    """Do not train the vision tower, except for its merger."""

    freeze_vision_projection: bool = False
    """Do not train the merger, which turns squares of patches into image tokens."""
