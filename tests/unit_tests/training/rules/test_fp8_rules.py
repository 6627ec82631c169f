"""Rules of fp8: sizes, layers, recomputation, Transformer Engine, GPUs; every message names a flag and a fix."""

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.training.rules import fp8 as rules_fp8
from tests.unit_tests.training.rules.test_run_all import problems

FP8, DELAYED = "--fp8-format hybrid --fp8-recipe tensorwise", "--fp8-format hybrid"
BLOCKS = "--fp8-format e4m3 --fp8-recipe blockwise --hidden-size 128 --ffn-hidden-size 256 --kv-channels 64"
LONG = "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1"
TP2, CP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2"
MODULES = "--recompute-granularity selective --recompute-modules"
LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16"
BOTH = "--first-last-layers-bf16"
WIDE_EXPERTS = "--num-experts 4 --moe-ffn-hidden-size"


@pytest.mark.parametrize("text, ranks", [
    (DELAYED, 1),
    ("--fp8-hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-margin 2 --no-fp8-wgrad", 1),
    ("--fp8-e4m3 --fp8-interval 1", 1),
    (f"{FP8} {BOTH} --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 2", 1),
    (f"{BLOCKS} {LONG} {BOTH}", 1),
    (f"{BLOCKS} --ffn-hidden-size 512 --seq-length 256 --max-position-embeddings 256 {TP2} --sequence-parallel", 2),
    (f"{FP8} {MODULES} core_attn mlp", 1),
    (f"{FP8} --no-fp8-wgrad {MODULES} layernorm mlp_act", 1),
    (f"{FP8} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
    (f"{DELAYED} {LATENT}", 1),
    (f"{DELAYED} --no-fp8-wgrad --seq-length 31 --micro-batch-size 1", 1),
    ("--fp8-format e4m3 --bf16 --use-torch-fsdp2", 2),
    (f"{FP8} {WIDE_EXPERTS} 2047 {MODULES} moe_act", 1),
    (f"{FP8} {WIDE_EXPERTS} 6144 {TP2} --sequence-parallel", 2),
])  # fmt: skip
def test_consistent_settings_pass(text, ranks):
    assert problems(text, ranks) == []


@pytest.mark.parametrize("text, ranks, expected", [
    # sizes
    (f"{FP8} --hidden-size 72", 1, "--hidden-size 72: is 72 per rank; --fp8-recipe tensorwise requires multiples of "
     "16; nearest: 64 or 80"),
    (f"{FP8} --ffn-hidden-size 40", 1, "--ffn-hidden-size 40: is 40 per rank; --fp8-recipe tensorwise requires"),
    (f"{FP8} --ffn-hidden-size 48 {TP2}", 2, "--ffn-hidden-size 48: is 24 per rank"),
    (f"{FP8} --kv-channels 10", 1, "--kv-channels 10: heads x head size is 40 per rank"),
    (f"{FP8} --kv-channels 12 --group-query-attention --num-query-groups 1", 1,
     "--kv-channels 12: x 2 x key and value heads is 24 per rank; --fp8-format requires multiples of 16; nearest: 16"),
    (f"{DELAYED} --kv-channels 12 --num-attention-heads 8 --group-query-attention --num-query-groups 1 {TP2}", 2,
     "--kv-channels 12: x 2 x key and value heads is 24 per rank"),
    (f"{BLOCKS} {LONG} --hidden-size 64", 1, "--hidden-size 64: is 64 per rank; --fp8-recipe blockwise requires "
     "multiples of 128; nearest: 128"),
    (f"{BLOCKS} {LONG} {TP2} --ffn-hidden-size 384", 2, "--ffn-hidden-size 384: is 192 per rank"),
    (f"{BLOCKS} {LONG} --kv-channels 48", 1, "--kv-channels 48: heads x head size is 192 per rank"),
    (f"{FP8} {LATENT} --kv-lora-rank 24", 1, "--kv-lora-rank 24: is 24 per rank; --fp8-format requires multiples of"),
    (f"{FP8} {LATENT} --q-lora-rank 20", 1, "--q-lora-rank 20: is 20 per rank"),
    (f"{FP8} {LATENT} --qk-pos-emb-head-dim 8", 1, "--kv-lora-rank 32: with --qk-pos-emb-head-dim is 40 per rank"),
    (f"{FP8} {LATENT} --v-head-dim 6", 1, "--v-head-dim 6: x heads is 24 per rank"),
    (f"{FP8} {LATENT} --qk-head-dim 18", 1, "--qk-head-dim 18: with --qk-pos-emb-head-dim, x heads, is 136 per rank"),
    (f"{FP8} --num-experts 4 --moe-shared-expert-intermediate-size 24", 1,
     "--moe-shared-expert-intermediate-size 24: is 24 per rank"),
    (f"{FP8} {WIDE_EXPERTS} 6152", 1, "--moe-ffn-hidden-size 6152: is 6152 per rank; --fp8-format requires multiples "
     "of 16; nearest: 6144 or 6160"),
    (f"{FP8} {WIDE_EXPERTS} 6160 {TP2} --sequence-parallel", 2, "--moe-ffn-hidden-size 6160: is 3080 per rank"),
    # tokens
    (f"{DELAYED} --seq-length 30", 1, "--seq-length 30: gives 60 tokens per rank and micro-batch; --fp8-recipe delayed "
     "requires multiples of 16; change it or --micro-batch-size"),
    (f"{FP8} --micro-batch-size 1 --seq-length 32 --context-parallel-size 4", 4, "--seq-length 32: gives 8 tokens per"),
    (BLOCKS, 1, "--seq-length 32: gives 64 tokens per rank and micro-batch; --fp8-recipe blockwise requires multiples "
     "of 128"),
    (f"{BLOCKS} --ffn-hidden-size 512 {LONG} {TP2} --sequence-parallel", 2, "--seq-length 128: gives 64 tokens per"),
    (f"{BLOCKS} {LONG} {CP2}", 2, "--seq-length 128: gives 64 tokens per rank and micro-batch"),
    (f"{BLOCKS} {CP2} --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1", 2,
     "--seq-length 256: gives 64 tokens in each half of a rank's part of a sequence"),
    # layers
    (f"{DELAYED} {BOTH}", 1, "--first-last-layers-bf16: is not supported with --fp8-recipe delayed; --fp8-recipe "
     "tensorwise or blockwise"),
    (f"{FP8} {BOTH} --num-layers-at-start-in-bf16 2", 1, "--num-layers-at-start-in-bf16 2: with "
     "--num-layers-at-end-in-bf16 1 exceeds the 2 layers"),
    (f"{FP8} --num-layers-at-start-in-bf16 -1", 1, "--num-layers-at-start-in-bf16 -1: must be"),
    # values
    (f"{DELAYED} --fp8-margin -1", 1, "--fp8-margin -1: must be"),
    (f"{DELAYED} --fp8-margin 65", 1, "--fp8-margin 65: must be"),
    (f"{DELAYED} --fp8-amax-history-len 0", 1, "--fp8-amax-history-len 0: must be at least 1"),
    # recomputation
    (f"{FP8} {MODULES} layernorm core_attn", 1, "--recompute-modules layernorm core_attn: layernorm would save no"),
    (f"{FP8} {MODULES} mlp_act layernorm", 1, "--recompute-modules mlp_act layernorm: "),
    (f"{FP8} {WIDE_EXPERTS} 6144 {MODULES} moe_act", 1, "--recompute-modules moe_act: moe_act would save no memory"),
    (f"{FP8} --no-fp8-weight-transpose-cache --bf16 --use-torch-fsdp2", 2, "--no-fp8-weight-transpose-cache: has no "
     "effect with --use-torch-fsdp2"),
    # gathers of fp8 weights
    ("--fp8-param-gather --bf16 --use-distributed-optimizer", 2, "--fp8-param-gather: gathers weights of fp8 layers,"),
    (f"{FP8} --fp8-param-gather --bf16", 2, "--fp8-param-gather: requires sharded optimizer state; add"),
])  # fmt: skip
def test_contradictions_name_flag_value_and_fix(text, ranks, expected):
    actual = problems(text, ranks)
    assert any(item.startswith(expected) for item in actual), actual


@pytest.mark.parametrize("recipe, expected", [
    ("mxfp8", "--fp8-recipe: exists in Megatron-LM, is not available here; --fp8-recipe blockwise (mxfp8 needs"),
    ("custom", "--fp8-recipe: exists in Megatron-LM, is not available here; --fp8-recipe tensorwise or blockwise"),
    ("rowwise", "--fp8-recipe rowwise: "),
])  # fmt: skip
def test_recipes_that_do_not_exist_here_are_rejected(recipe, expected):
    actual = problems(f"--fp8-format e4m3 --fp8-recipe {recipe}")
    assert len(actual) == 1 and actual[0].startswith(expected), actual


def test_fp8_stays_off_without_its_flag():
    """Other fp8 flags have no rule then: scripts set them unconditionally."""
    assert (
        problems("--hidden-size 72 --fp8-recipe blockwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 9") == []
    )


@pytest.mark.parametrize("capability, recipe, expected", [
    ((9, 0), "blockwise", []),
    ((8, 9), "tensorwise", []),
    ((10, 0), "tensorwise", []),
    ((8, 0), "tensorwise", ["--fp8-format e4m3: requires a GPU with fp8 tensor cores (compute capability 8.9 or"]),
    ((10, 0), "blockwise", ["--fp8-recipe blockwise: requires a Hopper GPU (compute capability 9.0), not (10, 0)"]),
    ((8, 9), "blockwise", ["--fp8-recipe blockwise: requires a Hopper GPU (compute capability 9.0), not (8, 9)"]),
])  # fmt: skip
def test_gpus_without_the_format_are_rejected(monkeypatch, capability, recipe, expected):
    monkeypatch.setattr(rules_fp8, "gpu_present", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    actual = problems(f"{BLOCKS} {LONG} --fp8-recipe {recipe}")
    assert len(actual) == len(expected) and all(map(str.startswith, actual, expected)), actual
    assert problems(f"{BLOCKS} {LONG} --fp8-recipe {recipe} --dry-run") == []


ENGINE = "--transformer-impl transformer_engine"


@pytest.mark.parametrize("text, expected", [
    (DELAYED, "--fp8-recipe delayed: "), (f"{FP8} --no-fp8-wgrad", "--no-fp8-wgrad: "),
    (f"{FP8} --no-fp8-weight-transpose-cache", "--no-fp8-weight-transpose-cache: "),
])  # fmt: skip
def test_layers_of_transformer_engine_support_less(text, expected):
    """An installed package is another rule."""
    actual = problems(f"{text} {ENGINE}", 2)
    assert any(item.startswith(expected) and "transformer_engine" in item for item in actual), actual


def test_a_program_gets_the_rules_with_names_of_fields():
    with pytest.raises(
        UserError, match="hidden_size 72: is 72 per rank; fp8_recipe tensorwise requires multiples of 16"
    ):
        TransformerConfig(num_layers=2, hidden_size=72, num_attention_heads=4, fp8="hybrid", fp8_recipe="tensorwise")
    with pytest.raises(UserError, match="first_last_layers_bf16: is not supported with fp8_recipe delayed"):
        TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, fp8="e4m3", first_last_layers_bf16=True)


def test_packed_rows_of_varying_lengths_need_weight_gradients_in_higher_precision():
    packed = f"--use-packed-sequence --attention-dropout 0 {FP8}"
    (actual,) = problems(packed, model_family="bert")
    assert actual.startswith("--use-packed-sequence: packs rows of varying lengths") and "--no-fp8-wgrad" in actual
    assert problems(f"{packed} --no-fp8-wgrad", model_family="bert") == []


def test_cuda_graphs_record_fp8_without_gathered_copies(monkeypatch):
    graphs = f"{FP8} --bf16 --cuda-graph-impl local --dry-run"
    assert problems(graphs) == []
    result = problems(f"{graphs} --fp8-param-gather --use-distributed-optimizer")
    assert any("is untested with --fp8-param-gather" in item for item in result)


def test_cuda_graphs_record_experts_only_if_they_are_not_in_fp8():
    graphs = f"{FP8} --bf16 --cuda-graph-impl local --dry-run --num-experts 4 --moe-ffn-hidden-size"
    assert problems(f"{graphs} 6128") == []
    (actual,) = problems(f"{graphs} 6144")
    assert "reads the number of tokens per expert (--fp8-format with wide experts)" in actual
