"""The configuration classes: shared fields, filled-in sizes, impossible sizes, and the parsers of irregular values."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.config.attention import parse_layer_pattern, parse_window
from megatron.core.config.cli import ConfigError
from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.config.model_settings import default_ffn_hidden_size
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.training.config.flat import FlatConfig
from megatron.training.config.training import parse_signal

ROOT = Path(__file__).resolve().parents[3]
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def fields_of(cls):
    return {field.name: field for field in dataclasses.fields(cls)}


def test_importing_configurations_needs_no_torch():
    program = (
        "import sys, megatron.core.config.transformer_config, megatron.training.config.pretrain_config\n"
        "import megatron.core.config.model_parallel_config\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_library_sizes_follow_from_the_others():
    config = TransformerConfig(**SIZES)
    assert (config.num_query_groups, config.kv_channels, config.ffn_hidden_size) == (4, 16, 256)
    assert config.embedding_init_method_std == config.init_method_std
    assert str(config.params_dtype) == str(config.pipeline_dtype) == "torch.float32"
    assert str(TransformerConfig(**SIZES, fp16=True).params_dtype) == "torch.float16"


def test_the_virtual_pipeline_size_has_two_names():
    config = TransformerConfig(
        **SIZES, pipeline_model_parallel_size=2, pipeline_dtype="fp32", virtual_pipeline_model_parallel_size=2
    )
    assert config.num_virtual_stages_per_pipeline_rank == 2
    config = TransformerConfig(**SIZES, num_virtual_stages_per_pipeline_rank=2)
    assert config.num_virtual_stages_per_pipeline_rank == 2


def test_older_name_of_the_norm_epsilon_works_both_ways():
    assert TransformerConfig(**SIZES, layernorm_epsilon=1e-6).norm_epsilon == 1e-6
    assert TransformerConfig(**SIZES, norm_epsilon=1e-6).layernorm_epsilon == 1e-6


def test_llama_ffn_width_is_a_multiple_of_64():
    assert [default_ffn_hidden_size(hidden, gated=True) for hidden in (8, 64, 4096)] == [64, 128, 10880]
    assert default_ffn_hidden_size(8, gated=False) == 32


def test_impossible_sizes_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(num_layers=2, hidden_size=65, num_attention_heads=4, num_query_groups=3, fp16=True, bf16=True,
                          sequence_parallel=True)  # fmt: skip
    assert [problem.flag for problem in caught.value.problems] == [
        "hidden_size", "num_query_groups", "fp16", "sequence_parallel",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:  # before the rules, which compute with the values
        TransformerConfig(**SIZES, hidden_dropout=1.0, init_method_std=-1.0)
    assert {problem.flag for problem in caught.value.problems} == {"hidden_dropout", "init_method_std"}
    with pytest.raises(ConfigError, match="num_layers None: must be a positive integer"):
        TransformerConfig(hidden_size=64, num_attention_heads=4)


def test_model_parallel_configuration_has_dtypes():
    assert str(ModelParallelConfig(bf16=True).pipeline_dtype) == "torch.bfloat16"


def test_latent_attention_has_the_library_defaults_of_megatron():
    config = MLATransformerConfig(**SIZES, original_max_position_embeddings=2048, beta_fast=16)
    assert isinstance(config, TransformerConfig) and config.multi_latent_attention
    assert (config.q_lora_rank, config.kv_lora_rank, config.rotary_scaling_factor) == (512, 512, 40.0)
    assert (config.yarn_original_max_position_embeddings, config.yarn_beta_fast) == (2048, 16)
    assert TransformerConfig(**SIZES).kv_lora_rank == 32 and not TransformerConfig(**SIZES).multi_latent_attention


def test_impossible_latents_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        MLATransformerConfig(
            **SIZES, num_query_groups=2, rotary_interleaved=True, qk_l2_norm=True, add_qkv_bias=True,
            qk_pos_emb_head_dim=3, mla_down_proj_fusion=True, q_lora_rank=None,
        )  # fmt: skip
    assert [problem.flag for problem in caught.value.problems] == [
        "qk_pos_emb_head_dim", "qk_l2_norm", "add_qkv_bias", "rotary_interleaved", "mla_down_proj_fusion",
        "num_query_groups",
    ]  # fmt: skip


def test_shared_fields_have_the_same_default_in_library_and_program():
    program, different = fields_of(FlatConfig), set()
    for cls in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        for name, field in fields_of(cls).items():
            if name in program and field.default != program[name].default:
                different.add(name)
    # as in Megatron-LM, whose library and program differ in these; its optimizer reads no recipe
    assert different == {
        "min_lr", "attention_softmax_in_fp32", "bias_gelu_fusion", "muon_momentum", "fp8_recipe",
    }  # fmt: skip


@pytest.mark.parametrize(("text", "value"), [
    ("127,0", (127, 0)), ("(127, -1)", (127, -1)), ("127", (127, 0)), ("[3,4]", (3, 4)),
])  # fmt: skip
def test_window_is_parsed(text, value):
    assert parse_window(text) == value


@pytest.mark.parametrize(("text", "value"), [
    ("3", 3), ("[1,0]", [1, 0]), ("[0]*3+[1]*2", [0, 0, 0, 1, 1]), ("([1]+[0]*2)*2", [1, 0, 0] * 2),
    ("[1]+[0,1]", [1, 0, 1]), (" [1, 0] ", [1, 0]),
])  # fmt: skip
def test_layer_pattern_is_parsed(text, value):
    assert parse_layer_pattern(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "[2]", "[1]**2", "3*[0]", "1+[0]", "[0]+1", "[1", "__import__('os')", "[1]*x", "1.5", "[]",
        "[1]*9999999", "-1 or 2", "(" * 300,
    ],
)  # fmt: skip
def test_layer_pattern_is_never_executed(text):
    with pytest.raises(ValueError):
        parse_layer_pattern(text)


def test_signal_names_are_parsed():
    assert parse_signal("SIGUSR1") is parse_signal("usr1") is signal.SIGUSR1
    with pytest.raises(ValueError, match="name of a signal"):
        parse_signal("15")
