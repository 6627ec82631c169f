"""Preference pairs (--dpo): every layout equals one rank, with a frozen reference model or the base of adapters."""

import dataclasses
import random

import pytest

from tests.test_utils.gpt_runs import train
from tests.test_utils.layouts import FEW_STEPS, MODEL, VOCAB_SIZE, Layout

VOCABULARY = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]
TP2, PP2, CP2 = (f"--{axis}-parallel-size 2" for axis in ("tensor-model", "pipeline-model", "context"))
SP, VPP2 = "--sequence-parallel", "--num-virtual-stages-per-pipeline-rank 2"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
MODEL_FLAGS = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --init-method-std 0.3 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0.1 --attention-dropout 0.1"
)
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.1"
)
LAYOUTS = {
    "TP 2": (f"{TP2} --micro-batch-size 4", 2),
    "TP 2 + SP": (f"{TP2} {SP} --micro-batch-size 4", 2),
    "PP 2": (f"{PP2} --micro-batch-size 2", 2),
    "PP 2 x VPP 2": (f"{PP2} {VPP2} --micro-batch-size 2", 2),
    "zero bubble": (f"{PP2} --pipeline-schedule zero-bubble --micro-batch-size 1", 2),
    "CP 2": (f"{CP2} --micro-batch-size 8", 2),
    "CP 2, all-to-all": (f"{CP2} --cp-comm-type a2a --micro-batch-size 4", 2),
    "DP 2": ("--micro-batch-size 1", 2),
    "DP 2, ZeRO-1": (f"{ZERO} --micro-batch-size 2", 2),
    "FSDP2": ("--use-torch-fsdp2 --micro-batch-size 4", 2),
    "TP 2, PP 2": (f"{TP2} {PP2} --micro-batch-size 2", 4),
    "TP 2 + SP, CP 2": (f"{TP2} {SP} {CP2} --micro-batch-size 4", 4),
    "PP 2, CP 2": (f"{PP2} {CP2} --micro-batch-size 2", 4),
    "CP 2, DP 2, ZeRO-1": (f"{CP2} {ZERO} --micro-batch-size 2", 4),
}
EXPERT_LAYOUTS = {
    "EP 2": ("--expert-model-parallel-size 2 --micro-batch-size 2", 2),
    "CP 2": (f"{CP2} --micro-batch-size 4", 2),
}
LOSSES = (
    "--dpo-loss sigmoid --dpo-beta 0.3",
    "--dpo-loss sigmoid --dpo-label-smoothing 0.2",
    "--dpo-loss hinge",
    "--dpo-loss ipo --dpo-beta 0.05",
)
CASES = [
    (name, reference, random.Random(f"{name} {reference}").choice(LOSSES))
    for name in LAYOUTS
    for reference in ("model", "base")
]


@pytest.fixture(scope="module")
def references(gloo_pool, tmp_path_factory):
    """Function from flags of a model to the folder of trained weights, made once."""
    folders = {}

    def folder(flags):
        if flags not in folders:
            folders[flags] = tmp_path_factory.mktemp("reference")
            argv = [*MODEL, *flags.split(), "--mock-data", *VOCABULARY, "--train-iters", "2", "--lr-warmup-iters", "0"]
            assert gloo_pool.run(train, 1, [*argv, "--micro-batch-size", "4", "--save", str(folders[flags])], True) == [
                0
            ]
        return folders[flags]

    return folder


def row(folder, reference, loss, layout, ranks, model=MODEL_FLAGS):
    flags = " ".join([model, *VOCABULARY, "--mock-data --dpo", loss])
    if reference == "base":
        flags += f" --pretrained-checkpoint {folder} --lora-rank 4 --lora-alpha 16"
    else:  # another model than the trained one, which starts from random weights
        flags += f" --dpo-reference-load {folder}"
    return Layout(flags, layout, ranks, steps=FEW_STEPS, wrap="tests.test_utils.preference_runs:with_tokenizer")


@pytest.mark.parametrize("name, reference, loss", CASES, ids=[" ".join(case) for case in CASES])
def test_layout_equals_one_rank(matrix, references, name, reference, loss):
    verdict = matrix.verdict(row(references(MODEL_FLAGS), reference, loss, *LAYOUTS[name]))
    assert verdict.equal, verdict.first


@pytest.mark.parametrize("reference", ["model", "base"])
@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_layout_of_experts_equals_one_rank(matrix, references, name, reference):
    """Auxiliary losses have the weight of a pair. Adapters of experts are off in the base."""
    model = f"{MODEL_FLAGS} {EXPERTS}"
    one = row(references(model), reference, LOSSES[0], *EXPERT_LAYOUTS[name], model)
    if reference == "base":
        targets = " --lora-target-modules linear_qkv experts.linear_fc1 experts.linear_fc2"
        one = dataclasses.replace(one, model=one.model + targets)
    verdict = matrix.verdict(one)
    assert verdict.equal, verdict.first
