"""Images: the vision tower, image tokens, and which parts are trained. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import Dim, Layers, NonNegativeInt, PositiveFloat, Probability, Range

PIXELS = ("image_min_pixels", "image_max_pixels", "image_mean", "image_std")
"""Settings by which images become patches."""


@dataclass(kw_only=True)
class VisionConfig(OptionalGroup):
    """Images (only in pretrain_vlm.py)"""

    TRANSFORM: ClassVar[str] = "megatron.core.models.vlm.freezing:freezing"

    vision_model_type: Literal["qwen", "clip", "siglip"] | None = None
    """Vision tower, which turns the patches of an image into embeddings of image tokens. qwen: Qwen3-VL, Qwen3.5; clip
    and siglip: with LLaVA's projector. Default, as in Megatron-LM's pretrain_vlm.py: clip with the sizes of the
    language model, images of 224 x 224 pixels, and image tokens in addition to --seq-length."""

    vision_num_layers: Layers = flag()
    """Transformer layers of the vision tower. Default of this and the next three: Qwen3.5's tower, CLIP ViT-L or
    SigLIP so400m."""

    vision_hidden_size: Dim = flag()
    """Width of the vision tower."""

    vision_num_attention_heads: Dim = flag()
    """Attention heads of the vision tower."""

    vision_ffn_hidden_size: Dim = flag()
    """Feed-forward width of the vision tower."""

    vision_feature_layer: Annotated[int, Range(-2048, -1)] = -1
    """Layer of clip or siglip with the features of an image, from the end: -1 for the last, -2 for LLaVA 1.5. Later
    layers are not built."""

    disable_vision_class_token: bool = False
    """Drop CLIP's class token after the tower; else it is the first image token of an image."""

    vision_patch_size: Dim = flag("--vision-patch-size", "--patch-dim")
    """Height and width of a patch, in pixels. Default: qwen and Megatron-LM 16, clip and siglip 14."""

    img_h: Dim = flag("--img-h")
    """Height of images for clip (default 336) and siglip (384), in pixels: a multiple of the patch size. For qwen, the
    height of the images of --images-per-row: a multiple of the patch size times --vision-merge-size."""

    img_w: Dim = flag("--img-w")
    """Width of images, as --img-h."""

    images_per_row: NonNegativeInt | None = None
    """Images of --img-h x --img-w pixels in a row: so many has a row of --mock-data, and the reported FLOPs, the dry
    run and the planner count the tower's operations for them. Default: 1 for clip and siglip with --mock-data; else
    operations are not counted, and --mock-data has a random number of small images for qwen."""

    image_fit: Literal["crop", "pad", "stretch"] | None = None
    """Resizing of images to --img-h x --img-w. crop (clip): cover it, and cut the center out; pad (LLaVA 1.5): to
    a square in the mean color, then crop; stretch (siglip)."""

    vision_frames: Dim = flag()
    """Frames of a patch of qwen: an image is repeated so often. Default: 2."""

    vision_merge_size: Dim = flag()
    """Height and width, in patches, of the square that becomes one image token of qwen. Default: 2."""

    vision_num_positions: Dim = flag()
    """Learned positions of qwen, a square number; they are resampled to the patches of each image. Default: 2304."""

    vision_deepstack_layers: list[NonNegativeInt] | None = flag("--vision-deepstack-layers", nargs="+")
    """Layers of the tower (from 0) whose outputs are merged too, and added to the image tokens after the first layers
    of the language model, one after each (Qwen3-VL)."""

    image_token_id: NonNegativeInt | None = None
    """Id of an image token in the text: an image takes as many as it has squares of patches. Default with --mock-data:
    0."""

    dataloader_seq_length: Dim = flag()
    """Words of a row, as in Megatron-LM: --seq-length becomes the sum of words and tokens of one image, rounded up for
    tensor- and context-parallel ranks. Without --vision-model-type the default is --seq-length."""

    mrope_section: list[Dim] | None = flag("--mrope-section", nargs="+")
    """Pairs of rotary channels that turn by the time, the row and the column of a token; interleaved (Qwen3-VL,
    Qwen3.5). Default: all turn by the position in the text."""

    image_min_pixels: Dim = 65536
    """Images for qwen with fewer pixels are enlarged."""

    image_max_pixels: Dim = 16777216
    """Images for qwen with more pixels are reduced."""

    image_mean: list[Probability] | None = flag("--image-mean", nargs=3)
    """Mean of red, green and blue (0 to 1), which is subtracted. Default: 0.5 each, for clip its own."""

    image_std: list[PositiveFloat] | None = flag("--image-std", nargs=3)
    """Standard deviation of red, green and blue, by which pixels are divided. Default: 0.5 each, for clip its own."""

    image_errors: Literal["fail", "skip"] = "fail"
    """What a missing or damaged image does: end the run with its line and path, or leave out its conversation."""

    freeze_LM: bool = flag("--freeze-LM", default=False)
    """Do not train the language model."""

    freeze_ViT: bool = flag("--freeze-ViT", default=False)
    """Do not train the vision tower, except for its merger."""

    freeze_vision_projection: bool = False
    """Do not train the merger, which turns squares of patches into image tokens."""
