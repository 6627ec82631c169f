"""Quantization-aware training: every layout equals one rank, which a test of the layers compares with a definition."""

import pytest

from megatron.core.config.cli import ConfigError
from tests.functional_tests.test_lora_layouts import CP2, EXPERTS, LATENT, LLAMA, PP2, RECOMPUTE, SP, TP2, ZERO
from tests.test_utils.layouts import FEW_STEPS, MODEL, Layout, configure

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


@pytest.mark.parametrize("flags, message", [
    ("fp8 --fp8-format e4m3", "--export-quant-cfg fp8: is not supported with --fp8-format; remove one of them"),
    ("fp8 --batch-invariant-mode", "--export-quant-cfg fp8: is not supported with --batch-invariant-mode"),
    ("fp8_blockwise", "not available here; --fp8-format e4m3 --fp8-recipe blockwise for training"),
    ("nvfp4", r"--export-quant-cfg fp8 \(integer and 4-bit formats are not trained\)"),
    ("fp8 --export-real-quant-cfg fp8_real_quant", "write them as a Hugging Face folder with megatron quantize"),
    ("fp8 --export-kv-cache-quant fp8", "the cache of keys and values is not quantized"),
])  # fmt: skip
def test_unsupported_settings_are_answered(flags, message):
    with pytest.raises(ConfigError, match=message):
        configure([*MODEL, "--micro-batch-size", "1", *LLAMA.split(), "--export-quant-cfg", *flags.split()], 1, "fp32")
