"""Contradictory flags of models that read images, and sizes that are not set."""

import pytest
from transformers import LlavaConfig
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig

from megatron.core.config.vision import VisionConfig
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.rules.run_all import check

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 99"
    " --transformer-impl local "
)
QWEN = "--mock-data --vision-model-type qwen "
CLIP = "--mock-data --vision-model-type clip --img-h 28 --img-w 28 "
SIGLIP = "--mock-data --vision-model-type siglip --img-h 28 --img-w 28 "


def resolved(text):
    return resolve(parse_args((TINY + text).split(), model_family="vlm"), 1)


@pytest.mark.parametrize("text, problem", [
    (QWEN + "--vision-deepstack-layers 1 0", "--vision-deepstack-layers 1 0: must ascend, below --vision-num"),
    (QWEN + "--vision-deepstack-layers 1 27", "--vision-deepstack-layers 1 27: must ascend"),
    (QWEN + "--vision-deepstack-layers 1 26", ""),
    (QWEN + "--vision-num-attention-heads 64", "--vision-hidden-size 1152: is not divisible by 4 x 64 heads"),
    (CLIP + "--vision-num-attention-heads 24", "--vision-hidden-size 1024: is not divisible by 24 heads"),
    (QWEN + "--vision-num-positions 24", "--vision-num-positions 24: is not a square number"),
    (QWEN + "--img-h 28", "--img-h 28: is not supported with --vision-model-type qwen"),
    (QWEN + "--images-per-row 3 --img-h 64 --img-w 128", ""),
    (QWEN + "--images-per-row 3", "--img-h: is required with --images-per-row"),
    (QWEN + "--images-per-row 3 --img-h 48 --img-w 64", "--img-h 48: is not divisible by --patch-dim 16 x --vision-m"),
    (QWEN + "--images-per-row 8 --img-h 64 --img-w 128", "--seq-length 64: has no room for the 8 tokens of 8 images"),
    (QWEN + "--vision-feature-layer -2", "--vision-feature-layer -2: is not supported with --vision-model-type qwen"),
    (QWEN + "--dataloader-seq-length 9", "--dataloader-seq-length 9: is not supported with --vision-model-type qwen"),
    (CLIP, ""),
    (CLIP + "--vision-feature-layer -24", ""),
    (CLIP + "--vision-feature-layer -25", "--vision-feature-layer -25: leaves no layer of --vision-num-layers 24"),
    (CLIP + "--patch-dim 5", "--img-h 28: is not divisible by --patch-dim 5"),
    (CLIP + "--vision-merge-size 2", "--vision-merge-size 2: is not supported with --vision-model-type clip"),
    (CLIP + "--vision-num-positions 9", "--vision-num-positions 9: is not supported with --vision-model-type clip"),
    (CLIP + "--vision-deepstack-layers 1", "--vision-deepstack-layers 1: is not supported with --vision-model"),
    (SIGLIP + "--disable-vision-class-token", "--disable-vision-class-token: is not supported with"),
    (CLIP + "--img-h 112 --img-w 112", "--seq-length 64: has no room for the 65 tokens of an image"),
    (CLIP + "--img-h 112 --img-w 98", ""),
    (QWEN + "--mrope-section 2 1", "--mrope-section 2 1: must be three positive numbers with the sum 4"),
    (QWEN + "--mrope-section 1 2 1", "--mrope-section 1 2 1: gives an axis more than every third of 4 pairs"),
    (QWEN + "--mrope-section 2 1 1 --position-embedding-type rope", ""),
    (QWEN + "--mtp-num-layers 1", "--mtp-num-layers 1: embeds words only"),
    ("--data-path a --vision-model-type clip --img-h 28 --img-w 28", "--image-token-id: is required without"),
])  # fmt: skip
def test_contradictions_have_one_problem(text, problem):
    problems = [str(item) for item in check(resolved(text)) if "--data-path" not in str(item)]
    if problem:
        assert any(item.startswith(problem) for item in problems), problems
    else:
        assert not problems


def test_unset_sizes_are_those_of_published_towers():
    clip, siglip, qwen = (resolved(text).group(VisionConfig) for text in (
        "--mock-data --vision-model-type clip", "--mock-data --vision-model-type siglip", QWEN
    ))  # fmt: skip
    peer = LlavaConfig().vision_config
    assert (clip.image_mean, clip.image_std) == (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    assert (clip.vision_num_layers, clip.vision_hidden_size) == (peer.num_hidden_layers, peer.hidden_size)
    assert clip.vision_num_attention_heads == peer.num_attention_heads
    assert clip.vision_ffn_hidden_size == peer.intermediate_size
    assert (clip.img_h, clip.img_w, clip.vision_patch_size) == (peer.image_size, peer.image_size, peer.patch_size)
    peer = Qwen3_5VisionConfig()
    assert (qwen.vision_num_layers, qwen.vision_hidden_size) == (peer.depth, peer.hidden_size)
    assert (qwen.vision_patch_size, qwen.vision_frames) == (peer.patch_size, peer.temporal_patch_size)
    assert (qwen.vision_merge_size, qwen.vision_num_positions) == (
        peer.spatial_merge_size,
        peer.num_position_embeddings,
    )
    assert (qwen.vision_num_attention_heads, qwen.vision_ffn_hidden_size) == (peer.num_heads, peer.intermediate_size)
    # google/siglip-so400m-patch14-384
    assert (siglip.vision_num_layers, siglip.vision_hidden_size, siglip.vision_ffn_hidden_size) == (27, 1152, 4304)
    assert (siglip.vision_num_attention_heads, siglip.vision_patch_size, siglip.img_h, siglip.img_w) == (
        16,
        14,
        384,
        384,
    )
    assert (siglip.image_mean, siglip.image_std) == ([0.5] * 3, [0.5] * 3)
    assert (clip.image_fit, siglip.image_fit, qwen.image_fit) == ("crop", "stretch", None)
