"""Models that read images: the tower, the patches of images, frozen parts."""

from tests.test_utils.flag_effects.rows import Probe
from tests.test_utils.flag_effects.sft import FILE, MODEL, data_set
from tests.test_utils.flag_effects.tokenizers import WITHOUT

FLAGS = "--vision-model-type qwen --image-token-id 5"
IMAGES = f"{FLAGS} --sft {MODEL} {FILE}"


def probe(changed, ask, expect, base=FLAGS, **more):
    return Probe(changed, ask, expect, base=base, family="vlm", **more)


def shape(name):
    """Ask for the shape of a parameter of the tower."""
    return lambda cfg: {param.name: param.shape for param in cfg.describe(64).params()}[f"vision.{name}"]


def count(cfg):
    """Number of the tower's layers."""
    return len({param.name.split(".")[3] for param in cfg.describe(64).params() if ".blocks.layers." in param.name})


def deep(cfg):
    """Number of mergers of deep layers."""
    return len({param.name.split(".")[2] for param in cfg.describe(64).params() if ".deep_mergers." in param.name})


def flops_of_patches(cfg):
    """Forward FLOPs of the tower's first layer in a row."""
    return sum(op.flops for op in cfg.describe(64).embedding.ops if op.name == "vision.patch_embed")


def heads(cfg):
    from megatron.core.config.vision import VisionConfig
    from megatron.core.models.vlm.towers import tower_config

    return tower_config(cfg.model, cfg.group(VisionConfig)).num_attention_heads


def setting(name):
    """Ask for a setting of the patches of images."""
    return lambda cfg: getattr(data_set(cfg)[1].images, name)


def frozen(cfg):
    """Parts with parameters that are not trained."""
    names = [param.name for param in cfg.describe(64).params() if param.frozen]
    return {"merger" if ".merger." in name else "tower" if "vision." in name else "language" for name in names}


def has_axes(cfg):
    """Whether samples have positions with three axes."""
    import numpy as np

    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.tasks.images import ImageTask

    return "axes" in ImageTask(cfg, build_tokenizer(cfg.tokenizer)).random_sample(np.random.default_rng(1))


def token(cfg):
    return data_set(cfg)[1].image_token


def vision(name):
    """Ask for a setting."""
    from megatron.core.config.vision import VisionConfig

    return lambda cfg: getattr(cfg.group(VisionConfig), name)


CLIP = "--vision-model-type clip --image-token-id 5"
CLIP_IMAGES = f"{CLIP} --sft {MODEL} {FILE}"
PATCHES = {"base": IMAGES, "without": WITHOUT}
ROWS = [
    probe("--vision-model-type qwen", vision("vision_model_type"), "qwen", base="--image-token-id 5"),
    probe("--vision-num-layers 2", count, 2),
    probe("--vision-hidden-size 64", shape("patch_embed.weight"), (64, 1536)),
    probe("--vision-num-attention-heads 8", heads, 8),
    probe("--vision-ffn-hidden-size 96", shape("blocks.layers.0.mlp.linear_fc1.weight"), (96, 1152)),
    probe("--patch-dim 8", shape("patch_embed.weight"), (1152, 384)),
    probe("--vision-frames 1", shape("patch_embed.weight"), (1152, 768)),
    probe("--vision-merge-size 3", shape("merger.linear_fc1.weight"), (10368, 10368)),
    probe("--vision-num-positions 16", shape("position_embeddings.weight"), (16, 1152)),
    probe("--vision-deepstack-layers 1 2", deep, 2),
    probe("--vision-feature-layer -2", count, 23, base=CLIP),
    probe("--img-h 28 --img-w 42", shape("position_embeddings.weight"), (7, 1024), base=CLIP),
    probe("--img-h 28", shape("position_embeddings.weight"), (49, 1024), base=CLIP),
    probe("--img-w 28", shape("position_embeddings.weight"), (49, 1024), base=CLIP),
    probe("--disable-vision-class-token", setting("class_tokens"), 0, CLIP_IMAGES, without=WITHOUT),
    probe("--image-fit pad", setting("fit"), "pad", CLIP_IMAGES, without=WITHOUT),
    probe("--dataloader-seq-length 100", lambda cfg: cfg.data.seq_length, 677, base=CLIP),
    probe("--images-per-row 2 --img-h 64 --img-w 32", flops_of_patches, 2 * 2 * 8 * 1536 * 1152),
    probe("--image-token-id 9", token, 9, **PATCHES),
    probe("--mrope-section 2 1 1", has_axes, True, base=f"{FLAGS} --position-embedding-type rope --mock-data",
          without="--data-path --split"),
    probe("--image-min-pixels 99", setting("min_pixels"), 99, **PATCHES),
    probe("--image-max-pixels 99999", setting("max_pixels"), 99999, **PATCHES),
    probe("--image-mean 0.1 0.2 0.3", setting("mean"), (0.1, 0.2, 0.3), **PATCHES),
    probe("--image-std 0.1 0.2 0.3", setting("std"), (0.1, 0.2, 0.3), **PATCHES),
    probe("--image-errors skip", lambda cfg: data_set(cfg)[1].skip_images, True, **PATCHES),
    probe("--freeze-LM", frozen, {"language"}),
    probe("--freeze-ViT", frozen, {"tower"}),
    probe("--freeze-vision-projection", frozen, {"merger"}),
]  # fmt: skip
