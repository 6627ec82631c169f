"""Impossible expert settings in a library configuration are rejected at once, with the library's field names."""

import dataclasses

import pytest

from megatron.core.config.cli import ConfigError
from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from tests.unit_tests.core.config.test_absent import TINY

SIZES = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"moe_router_topk": 4, "expert_model_parallel_size": 2},
         "expert_model_parallel_size 2: needs experts; num_moe_experts N"),
        ({"num_moe_experts": 4, "moe_layer_freq": [0, 1]},
         "moe_layer_freq 0 1: has 2 entries for 3 layers"),
        ({"num_moe_experts": 2, "moe_router_topk": 3}, "moe_router_topk 3: is more than num_moe_experts 2"),
        ({"num_moe_experts": 6, "expert_model_parallel_size": 4},
         "num_moe_experts 6: is not a multiple of expert_model_parallel_size 4"),
        ({"num_moe_experts": 4, "moe_token_dispatcher_type": "all"},
         "moe_token_dispatcher_type all: must be one of allgather, alltoall, flex"),
    ],
)  # fmt: skip
def test_impossible_experts_are_rejected(settings, problem):
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(**SIZES, **settings)
    assert [str(item) for item in caught.value.problems][0].startswith(problem)


def test_a_dense_model_takes_settings_of_experts_and_varying_lengths():
    """Programs pass them to every model."""
    settings = {"moe_token_dispatcher_type": "unknown", "moe_router_topk": 4, "moe_ffn_hidden_size": 8,
                "moe_router_load_balancing_type": "none", "variable_seq_lengths": True}  # fmt: skip
    dense = TransformerConfig(**SIZES, **settings)
    assert dense.num_moe_experts is None and dense.variable_seq_lengths and dense.moe_router_topk == 4


def test_head_size_may_be_given_for_any_width():
    assert TransformerConfig(num_layers=1, hidden_size=18, num_attention_heads=4, kv_channels=4).kv_channels == 4
    with pytest.raises(ConfigError, match="hidden_size 18: is not a multiple of num_attention_heads 4"):
        TransformerConfig(num_layers=1, hidden_size=18, num_attention_heads=4)


def test_configurations_may_be_derived_from_dense_ones_and_those_with_experts():
    dense = TransformerConfig(**SIZES)
    assert dense.moe_ffn_hidden_size is None and dataclasses.replace(dense, hidden_size=32).hidden_size == 32
    sparse = dataclasses.replace(dense, num_moe_experts=4, moe_layer_freq=[0, 1, 1])
    assert sparse.moe_ffn_hidden_size == dense.ffn_hidden_size
    assert TransformerConfig(**SIZES, num_moe_experts=4, moe_token_dispatcher_type="flex").num_moe_experts == 4


def test_settings_without_effect_on_a_command_line_do_not_reach_the_library():
    args = validate_args(parse_args(f"{TINY} --moe-router-topk 4 --moe-layer-freq [1]".split()), 1)
    assert core_transformer_config_from_args(args.flat).moe_router_topk == 2


def test_gated_networks_have_another_default_size_in_the_library_than_on_the_command_line():
    config = TransformerConfig(num_layers=1, hidden_size=96, num_attention_heads=4, swiglu=True, num_moe_experts=2)
    assert config.ffn_hidden_size == config.moe_ffn_hidden_size == 4 * 96
    words = f"{TINY} --num-layers 1 --hidden-size 96 --num-attention-heads 4 --swiglu"
    args = validate_args(parse_args(words.split()), 1)
    assert core_transformer_config_from_args(args.flat).ffn_hidden_size == 8 * 96 // 3 // 64 * 64
