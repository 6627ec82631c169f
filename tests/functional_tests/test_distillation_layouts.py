"""Distillation: every layout equals one rank, with a teacher of another depth, width and kind of layers."""

import random

import pytest

from tests.functional_tests.test_preference_layouts import (
    CP2,
    EXPERTS,
    PP2,
    SP,
    TP2,
    VOCABULARY,
    VPP2,
    ZERO,
)  # fmt: skip
from tests.test_utils.gpt_runs import train
from tests.test_utils.layouts import FEW_STEPS, MODEL, Layout

STUDENT = "--hidden-dropout 0.1 --attention-dropout 0.1"
TEACHER = (
    "--num-layers 6 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --init-method-std 0.3 --make-vocab-size-divisible-by 1 "
    "--untie-embeddings-and-output-weights"
)
WIDE = "--hidden-size 32"  # the student's
LAYOUTS = {
    "TP 2": (f"{TP2} --micro-batch-size 4", 2),
    "TP 2 + SP": (f"{TP2} {SP} --micro-batch-size 4", 2),
    "PP 2": (f"{PP2} --micro-batch-size 2", 2),
    "PP 2 x VPP 2": (f"{PP2} {VPP2} --micro-batch-size 2", 2),
    "zero bubble": (
        f"{PP2} --pipeline-schedule zero-bubble --whole-layers-in-pipeline-split --micro-batch-size 1", 2,
    ),
    "CP 2": (f"{CP2} --micro-batch-size 8", 2),
    "CP 2, all-to-all": (f"{CP2} --cp-comm-type a2a --micro-batch-size 4", 2),
    "DP 2": ("--micro-batch-size 1", 2),
    "DP 2, ZeRO-1": (f"{ZERO} --micro-batch-size 2", 2),
    "FSDP2": ("--use-torch-fsdp2 --micro-batch-size 4", 2),
    "TP 2 + SP, PP 2": (f"{TP2} {SP} {PP2} --micro-batch-size 2", 4),
    "TP 2 + SP, CP 2": (f"{TP2} {SP} {CP2} --micro-batch-size 4", 4),
}  # fmt: skip
LAYER_LAYOUTS = {
    "TP 2": (f"{TP2} --micro-batch-size 4", 2),
    "DP 2, ZeRO-1": (f"{ZERO} --micro-batch-size 2", 2),
    "FSDP2": ("--use-torch-fsdp2 --micro-batch-size 4", 2),
    "PP 2 x VPP 2": (f"{PP2} {VPP2} --micro-batch-size 2", 2),
    "TP 2 + SP, overlap": (f"{TP2} {SP} --tp-comm-overlap --micro-batch-size 4", 2),
    "TP 2 + SP, PP 2, recomputation": (
        f"{TP2} {SP} {PP2} --micro-batch-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        4,
    ),
    "TP 2 + SP, CP 2": (f"{TP2} {SP} {CP2} --micro-batch-size 4", 4),
}  # fmt: skip
"""Layouts with losses between layers."""
EP2 = "--expert-model-parallel-size 2"
EXPERT_LAYOUTS = {
    "student": (EXPERTS, "", f"{EP2} --micro-batch-size 2", 2),
    "teacher": ("", EXPERTS, f"{TP2} {SP} {PP2} {VPP2} --micro-batch-size 1", 4),
    "both": (EXPERTS, EXPERTS, f"{EP2} {TP2} {SP} --micro-batch-size 4", 4),
}
LOSSES = (
    "--kd-temperature 2",
    "--kd-loss reverse-kl --kd-temperature 0.8",
    "--kd-loss-scale 0.7 --kd-lm-loss-weight 0.4",
    "--kd-loss reverse-kl --kd-lm-loss-weight 1",
)


@pytest.fixture(scope="module")
def teachers(gloo_pool, tmp_path_factory):
    """Function from further flags of the teacher to its folder, trained once."""
    folders = {}

    def folder(flags):
        if flags not in folders:
            folders[flags] = tmp_path_factory.mktemp("teacher")
            argv = [*MODEL, *TEACHER.split(), *flags.split(), "--mock-data", *VOCABULARY, "--train-iters", "2"]
            argv += ["--lr-warmup-iters", "0", "--micro-batch-size", "4", "--save", str(folders[flags])]
            assert gloo_pool.run(train, 1, argv, True) == [0]
        return folders[flags]

    return folder


def row(folder, layout, ranks, loss, model=STUDENT):
    flags = " ".join([model, *VOCABULARY, f"--mock-data --export-kd-teacher-load {folder}", loss])
    return Layout(flags, layout, ranks, steps=FEW_STEPS, wrap="tests.test_utils.preference_runs:with_tokenizer")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(matrix, teachers, name):
    verdict = matrix.verdict(row(teachers(""), *LAYOUTS[name], random.Random(name).choice(LOSSES)))
    assert verdict.equal, verdict.first


@pytest.mark.parametrize("name", LAYER_LAYOUTS)
def test_layout_with_losses_between_layers_equals_one_rank(matrix, teachers, name):
    pairs = "--kd-layer-pairs 1:1:mse 3:4 final:final:mse --kd-layer-loss-scale 2"
    verdict = matrix.verdict(row(teachers(WIDE), *LAYER_LAYOUTS[name], pairs))
    assert verdict.equal, verdict.first


def test_planted_error_of_losses_between_layers_is_found(matrix, teachers):
    one = row(teachers(WIDE), *LAYER_LAYOUTS["TP 2"], "--kd-layer-pairs 1:1:mse")
    assert not matrix.verdict(one, fault="layer_loss_on_one_rank").equal


def test_planted_error_is_found(matrix, teachers):
    one = row(teachers(""), *LAYOUTS["DP 2"], LOSSES[2])
    assert not matrix.verdict(one, fault="distillation_is_a_mean_of_means").equal


@pytest.mark.parametrize("layout", [CP2, PP2])
def test_samples_of_different_lengths_equal_one_rank(matrix, teachers, layout):
    model = "--hidden-dropout 0.1 --attention-dropout 0 --use-varlen-dataset --micro-batch-size 1"
    verdict = matrix.verdict(row(teachers(""), layout, 2, LOSSES[0], model))
    assert verdict.equal, verdict.first


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_layout_of_experts_equals_one_rank(matrix, teachers, name):
    """Auxiliary losses of the student have the weight of a token, the teacher's are not part of the loss."""
    student, teacher, layout, ranks = EXPERT_LAYOUTS[name]
    verdict = matrix.verdict(row(teachers(teacher), layout, ranks, LOSSES[2], f"{STUDENT} {student}"))
    assert verdict.equal, verdict.first
