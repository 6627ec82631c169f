"""The tower's operations for --images-per-row: FLOPs by hand, saved bytes, frozen parts, and mock data."""

import numpy as np
import pytest
import torch

from megatron.core.config.vision import VisionConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.vlm.grids import Grids
from megatron.core.models.vlm.towers import TOWERS
from megatron.core.sharding.placement import initialize_parameters
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.report.memory import stage_activations
from megatron.training.report.pipeline import run_stages, stage_pieces
from megatron.training.report.plan.cluster import build_cluster
from megatron.training.report.plan.step_time import summed_times
from megatron.training.tasks.images import ImageTask

SIZES = (
    "--mock-data --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 99 --bf16"
    " --vision-num-layers 3 --vision-hidden-size 128 --vision-num-attention-heads 4 --vision-ffn-hidden-size 200"
    " --patch-dim 8 --img-h 64 --img-w 96 --transformer-impl local"
)
QWEN = f"{SIZES} --vision-model-type qwen --images-per-row 4 --vision-num-positions 25"
CLIP = f"{SIZES} --vision-model-type clip --vision-feature-layer -2"


def resolved(text):
    return resolve(parse_args(text.split(), model_family="vlm"), 1)


def gemms(*sizes):
    """FLOPs of products of (rows, columns, inner size)."""
    return sum(2 * rows * columns * inner for rows, columns, inner in sizes)


def layers(number, tokens):
    attention = 4 * tokens * tokens * 128
    return number * (gemms((tokens, 4 * 128, 128), (tokens, 200, 128), (tokens, 128, 200)) + attention)


def test_flops_are_counted_as_by_hand():
    """96 patches of 384 values; 24 image tokens. The tower's input has no gradient."""
    patches, merged = gemms((96, 128, 384)), gemms((24, 512, 512), (24, 64, 512))
    four = [resolved(QWEN), resolved(f"{QWEN} --vision-deepstack-layers 0 1")]
    for cfg, mergers in zip(four, (1, 3)):
        without = cfg.describe(99).flops_per_sample - 4 * (2 * patches + 3 * layers(3, 96) + mergers * 3 * merged)
        assert without == resolved(f"{QWEN} --images-per-row 0").describe(99).flops_per_sample


def test_flops_of_clip_count_the_class_token():
    """96 patches of 192 values, and the class token; two of three layers."""
    cfg = resolved(CLIP)
    assert cfg.group(VisionConfig).images_per_row == 1
    tower = 2 * gemms((96, 128, 192)) + 3 * layers(2, 97) + 3 * gemms((97, 64, 128), (97, 64, 64))
    none = resolved(f"{CLIP} --images-per-row 0").describe(99)
    assert cfg.describe(99).flops_per_sample - tower == none.flops_per_sample


@pytest.mark.parametrize("flags, share", [
    ("--freeze-ViT", lambda kind, name: 2 if "merger" in name else 0),
    ("--freeze-ViT --freeze-vision-projection", lambda kind, name: 0),
    ("--freeze-vision-projection", lambda kind, name: 1 if "merger" in name or "patch" in name else 2),
    ("--freeze-LM", lambda kind, name: 1 if "patch" in name or "vision" not in name else 2),
])  # fmt: skip
def test_frozen_parts_have_less_work_in_the_backward_pass(flags, share):
    ops = [op for piece in resolved(f"{QWEN} {flags}").describe(99).pieces for op in piece.ops if op.kind == "gemm"]
    assert {"vision.merger.linear_fc1", "vision.blocks.linear_qkv", "linear_qkv"} <= {op.name for op in ops}
    names = [op for op in ops if "vision" in op.name or flags == "--freeze-LM"]
    assert all(op.backward == share(op.kind, op.name) for op in names)


@pytest.mark.parametrize("text", [QWEN, f"{QWEN} --vision-deepstack-layers 1", CLIP])
def test_described_bytes_are_saved(text):
    """Bytes of tensors that a built tower saves for its backward pass. Without kernels, each layer has
    copies of queries, keys and outputs, and its own rotary tables."""
    cfg = resolved(text)
    vision = cfg.group(VisionConfig)
    module, _, name = TOWERS[vision.vision_model_type].module.partition(":")
    tower = getattr(__import__(module, fromlist=[name]), name)(cfg.model, vision)
    initialize_parameters(tower, seed=1, groups=SINGLE_PROCESS)
    count, parameters, saved, alive = vision.images_per_row, {x.data_ptr() for x in tower.parameters()}, {}, []

    def pack(x):
        alive.append(x)  # else another tensor may take its place
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in parameters:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    grids = Grids(torch.tensor([[8, 12]] * count), tower.merge, tower.class_tokens)
    patches = torch.randn(96 * count, tower.patch_embed.weight.shape[1])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        tower(patches, grids)
    ops = [op for op in cfg.describe(99).embedding.ops if op.name.startswith("vision.")]
    described = 256 * sum(tensor.bytes for op in ops for tensor in op.saved)
    copies = 0 if text == CLIP else 3 * 96 * count * (3 * 128 + 4 * 16) * 2
    assert described + copies == pytest.approx(sum(saved.values()), rel=0.05)


def test_merger_saves_the_inputs_of_its_activations():
    """Four images of 24 image tokens, 512 channels, bf16."""
    ops = [op for op in resolved(QWEN).describe(99).embedding.ops if op.name.startswith("vision.merger.linear_fc1")]
    sizes = {tensor.name: 256 * tensor.bytes for op in ops for tensor in op.saved}
    assert sizes["input of the activation"] == pytest.approx(4 * 24 * 512 * 2)


@pytest.mark.parametrize("text", [QWEN, CLIP])
def test_mock_data_has_the_images(text):
    cfg = resolved(text)
    sample = ImageTask(cfg, build_tokenizer(cfg.tokenizer)).random_sample(np.random.default_rng(3))
    sizes, count = sample["sizes"].values, cfg.group(VisionConfig).images_per_row
    assert sizes.tolist() == [[8, 12]] * count
    assert (sample["tokens"] == 0).sum() == (24 * 4 if text != CLIP else 97)


LARGE = (
    "--mock-data --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --bf16"
    " --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3"
    " --tokenizer-type NullTokenizer --vocab-size 992 --vision-model-type qwen --img-h 512 --img-w 512"
)


def planned(images, flags=""):
    """Return (seconds of the tower in a micro-batch of rank 0, its saved bytes) as the planner predicts them."""
    seconds, saved = [], []
    for number in (images, 0):
        text = f"{LARGE} --images-per-row {number} {flags}"
        cfg = resolve(parse_args(text.split(), model_family="vlm"), 2 if "size 2" in text else 1, gpus=True)
        model, cluster = cfg.describe(992), build_cluster("H200", 1, 8)
        (stage,) = run_stages(cfg, 992, model)
        seconds.append(sum(summed_times(cfg, model, stage_pieces(model, stage), cluster).values()))
        saved.append(stage_activations(cfg, model, stage))
    return seconds[0] - seconds[1], saved[0] - saved[1]


def test_planner_counts_the_tower():
    """Ten images of 1024 patches take between one and two times the time of their FLOPs at the rates of the planner."""
    gpu = build_cluster("H200", 1, 8).gpu
    seconds, saved = planned(10)
    layer = gemms((1024, 4 * 1152, 1152), (1024, 2 * 4304, 1152))
    products = 10 * (27 * layer + gemms((1024, 1152, 1536), (256, 4608, 4608), (256, 1024, 4608)))
    attention = 10 * 27 * 4 * 1024**2 * 1152
    least = products * (2 / gpu.gemm + 1 / gpu.wgrad) / 1e12
    least += attention * (1 / gpu.attention_forward + 2.5 / gpu.attention_backward) / 1e12
    assert least < seconds < 2 * least
    # per patch and layer: inputs of two norms and four products; queries, keys, values; input of the activation
    assert saved == pytest.approx(10 * 1024 * 27 * 2 * (8 * 1152 + 2 * 4304), rel=0.1)


@pytest.mark.parametrize("flags, time, space", [
    ("--tensor-model-parallel-size 2", 0.5, 0.5),
    ("--context-parallel-size 2", 0.5, 0.5),
    ("--freeze-ViT", 0.31, 0.0095),
    ("--lora-rank 4", 0.31, 0.0),
    ("--fp8-format hybrid --fp8-recipe tensorwise", 1.0, 1.0),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1.0, 1.0),
])  # fmt: skip
def test_planner_divides_the_towers_time_and_memory_by_flags(flags, time, space):
    """Ranks share images; frozen towers have no backward pass; fp8 and recomputation leave the tower as it is."""
    seconds, saved = planned(10)
    with_flags = planned(10, flags)
    assert with_flags[0] == pytest.approx(time * seconds, rel=0.1)
    assert with_flags[1] == pytest.approx(space * saved, rel=0.05, abs=1e6)
