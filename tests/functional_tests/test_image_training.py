"""Models that read images: layouts equal one rank, planted errors are found."""

import dataclasses

import pytest

from tests.test_utils.gpt_runs import train
from tests.test_utils.layout_table import CP2, CP4, FSDP, GATHER, LLAMA, PP2, SP, TP2
from tests.test_utils.layouts import FEW_STEPS, MODEL, VOCAB_SIZE, Layout, configure

TOWER = (
    "--vision-model-type qwen --image-token-id 7 --vision-num-layers 2 --vision-hidden-size 16 --patch-dim 4"
    " --vision-num-attention-heads 2 --vision-ffn-hidden-size 24 --vision-num-positions 25 --mrope-section 2 1 1"
)
IMAGES = f"{LLAMA} {TOWER} --mock-data"
PACKED = f"{IMAGES} --reset-position-ids --reset-attention-mask"
EXPERTS = (
    f"{PACKED} --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    " --moe-router-load-balancing-type none"
)
DEEP = f"{PACKED} --vision-deepstack-layers 0 1"
SIZES = (
    "--image-token-id 7 --vision-num-layers 2 --vision-hidden-size 16 --patch-dim 4 --img-h 8 --img-w 8"
    " --vision-num-attention-heads 2 --vision-ffn-hidden-size 24 --mock-data"
)
CLIP = f"{LLAMA} {SIZES} --vision-model-type clip"
LLAVA = f"{CLIP} --vision-feature-layer -2 --disable-vision-class-token --reset-position-ids --reset-attention-mask"
SIGLIP = f"{LLAMA} {SIZES} --vision-model-type siglip --reset-position-ids --reset-attention-mask"
ZERO = "--use-distributed-optimizer"
LAYOUTS = {
    # a micro-batch of one rank has text only, while the other has images
    "dp2-zero": Layout(IMAGES, f"--micro-batch-size 1 {ZERO} --overlap-grad-reduce --ddp-bucket-size 3000", 2),
    "tp2": Layout(IMAGES, TP2, 2),
    "tp4-sp-packed": Layout(PACKED, f"{TP2} {SP} --tensor-model-parallel-size 4", 4),
    "pp2": Layout(PACKED, PP2, 2),
    "zero2-gather": Layout(PACKED, f"--micro-batch-size 2 {GATHER}", 2),
    "fsdp2": Layout(PACKED, f"--micro-batch-size 2 {FSDP}", 2),
    "cp2": Layout(IMAGES, CP2, 2),
    "cp4-packed": Layout(PACKED, CP4, 4),
    "cp2-tp2": Layout(PACKED, f"{CP2} {TP2}", 4),
    "cp2-tp2-sp": Layout(PACKED, f"{CP2} {TP2} {SP}", 4),
    "ep2-tp2-sp": Layout(EXPERTS, f"{TP2} {SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 2),
    "deep-pp2-tp2-sp": Layout(DEEP, f"{PP2} {TP2} {SP}", 4),
    "deep-cp2-recompute": Layout(
        DEEP, f"{CP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2
    ),
    "clip-tp2-sp": Layout(CLIP, f"{TP2} {SP}", 2),
    "llava-cp2": Layout(LLAVA, CP2, 2),
    "siglip-pp2": Layout(SIGLIP, PP2, 2),
    "clip-fsdp2": Layout(CLIP, f"--micro-batch-size 2 {FSDP}", 2),
    "muon-tp2-zero": Layout(f"{IMAGES} --optimizer muon", f"{TP2} {ZERO}", 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(matrix, name):
    verdict = matrix.verdict(dataclasses.replace(LAYOUTS[name], steps=FEW_STEPS, family="vlm"))
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


@pytest.mark.parametrize(
    "name, fault",
    [
        ("tp2", "tower_gradients_not_summed"),
        ("cp4-packed", "images_in_the_order_of_other_ranks"),
        ("tp2", "gradients_of_images_summed_over_copies"),
        ("cp2", "images_in_a_line"),
    ],
)
def test_planted_error_is_found(matrix, name, fault):
    assert not matrix.verdict(dataclasses.replace(LAYOUTS[name], steps=1, family="vlm"), fault).equal


# ---- adapters, resuming

VOCABULARY = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE), "--mock-data"]
LORA = "--lora-rank 2 --lora-alpha 8"
WITH_TOWER = f"{LORA} --lora-target-modules linear_qkv vision.blocks.*.linear_proj vision.merger.linear_fc1"


@pytest.fixture(scope="module")
def base(gloo_pool, tmp_path_factory):
    """Folder of a trained model."""
    folder = tmp_path_factory.mktemp("base")
    argv = [*MODEL, *CLIP.split(), *VOCABULARY, "--train-iters", "2", "--lr-warmup-iters", "0", "--save", str(folder)]
    assert gloo_pool.run(train, 1, [*argv, "--micro-batch-size", "4"], True, "vlm") == [0]
    return folder


@pytest.mark.parametrize("targets, layout", [(LORA, TP2), (WITH_TOWER, f"{TP2} {SP}"), (WITH_TOWER, CP2)])
def test_adapters_equal_one_rank(matrix, base, targets, layout):
    row = Layout(f"{CLIP} --pretrained-checkpoint {base} {targets}", layout, 2, steps=2, family="vlm")
    verdict = matrix.verdict(row)
    assert verdict.equal, verdict.first
    cfg = configure(row.argv, 2, "fp64", "vlm")
    adapters = {param.name for param in cfg.describe(VOCAB_SIZE).params() if ".adapter." in param.name}
    of_tower = {name.split(".adapter.")[0] for name in adapters if name.startswith("vision.")}
    layers = {f"vision.blocks.layers.{layer}.self_attention.linear_proj" for layer in (0, 1)}
    assert of_tower == (set() if targets == LORA else {*layers, "vision.merger.linear_fc1"})
    assert any("linear_qkv" in name for name in adapters)


def test_resuming_with_images_changes_no_byte(gloo_pool, tmp_path):
    argv = [*MODEL, *CLIP.split(), *VOCABULARY, "--train-iters", "4", "--save-interval", "2", "--hidden-dropout", "0.1"]

    def run(folder, *flags):
        assert gloo_pool.run(train, 1, [*argv, "--save", str(folder), *flags], False, "vlm") == [0]
        return (folder / "metrics.jsonl").read_bytes()

    run(tmp_path / "parts", "--exit-interval", "2")
    assert run(tmp_path / "parts", "--load", str(tmp_path / "parts")) == run(tmp_path / "complete")
