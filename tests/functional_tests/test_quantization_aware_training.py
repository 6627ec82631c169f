"""Quantization-aware training: every layout equals one rank, which a test of the layers compares with a definition."""

import pytest

from tests.functional_tests.test_lora_layouts import CP2, EXPERTS, LATENT, LLAMA, PP2, RECOMPUTE, SP, TP2, ZERO
from tests.test_utils.layouts import FEW_STEPS, Layout

EP2 = "--expert-model-parallel-size 2"
ROWS = {
    "TP 2 + SP": (LLAMA, f"{TP2} {SP} --micro-batch-size 4", 2),
    "TP 2, shared key head": (LLAMA.replace("groups 2", "groups 1"), f"{TP2} --micro-batch-size 4", 2),
    "PP 2, zero bubble": (LLAMA, f"{PP2} --pipeline-schedule zero-bubble --micro-batch-size 1", 2),
    "CP 2": (LLAMA, f"{CP2} --micro-batch-size 8", 2),
    "DP 2, ZeRO-1": ("", f"{ZERO} --micro-batch-size 2", 2),
    "FSDP2": (LLAMA, "--use-torch-fsdp2 --micro-batch-size 4", 2),
    "recomputation": (LLAMA, RECOMPUTE, 1),
    "MLA, TP 2 + SP": (LATENT, f"{TP2} {SP} --micro-batch-size 4", 2),
    "EP 2": (f"{LLAMA} {EXPERTS}", f"{EP2} --micro-batch-size 4", 2),
    "EP 2 x ETP 2": (
        f"{LLAMA} {EXPERTS}", f"{EP2} --expert-tensor-parallel-size 2 {TP2} {SP} --micro-batch-size 2", 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_layout_equals_one_rank(matrix, name):
    model, layout, ranks = ROWS[name]
    flags = f"{model} --export-quant-cfg fp8 --hidden-dropout 0.1"
    verdict = matrix.verdict(Layout(flags, layout, ranks, steps=FEW_STEPS))
    assert verdict.equal, verdict.first
