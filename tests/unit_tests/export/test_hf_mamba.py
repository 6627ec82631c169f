"""Mamba-2, Bamba and Granite 4: values of config.json and patterns that their families do not have."""

import math

import pytest

from megatron.core.config.errors import UserError
from megatron.export.hf.family import complete
from megatron.export.hf.registry import known_families

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9, "max_position_embeddings": 8,
         "intermediate_size": 48}  # fmt: skip
MAMBA2 = {"hidden_size": 64, "vocab_size": 9, "num_heads": 16, "head_dim": 8, "num_hidden_layers": 2}
BAMBA = {**SIZES, "num_hidden_layers": 3, "mamba_n_heads": 16, "mamba_d_head": 8, "attn_layer_indices": [1],
         "num_key_value_heads": 2}  # fmt: skip
GRANITE = {**SIZES, "num_hidden_layers": 3, "mamba_n_heads": 16, "mamba_d_head": 8, "intermediate_size": 12,
           "layer_types": ["mamba", "attention", "mamba"], "num_key_value_heads": 2, "shared_intermediate_size": 20,
           "position_embedding_type": "nope"}  # fmt: skip


@pytest.mark.parametrize("limit", [[0.0, math.inf], [0.0, {"__float__": "Infinity"}], None])
def test_unlimited_time_steps_are_read(limit):
    settings = known_families()["bamba"].load_settings({**BAMBA, "time_step_limit": limit})
    assert settings["hybrid_layer_pattern"] == "M-*-M-" and settings["num_layers"] == 6


@pytest.mark.parametrize(("family", "config"), [("mamba2", MAMBA2), ("bamba", BAMBA)])
@pytest.mark.parametrize(("change", "message"), [
    ({"time_step_limit": [0.001, math.inf]}, "time_step_limit is .*no limits, as in Megatron-LM"),
    ({"time_step_limit": [0.0, 0.1]}, "time_step_limit is"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, must be an integer from 1 to 1024"),
])  # fmt: skip
def test_other_values_are_rejected(family, config, change, message):
    with pytest.raises(UserError, match=message):
        known_families()[family].load_settings({**config, **change})


@pytest.mark.parametrize(("experts", "pattern", "widths"), [(8, "ME*EME", (12, 12, 20)), (0, "M-*-M-", (20, None, 0))])
def test_layers_of_granite_have_experts_or_networks(experts, pattern, widths):
    """Without experts, the shared expert is the network."""
    family = known_families()["granitemoehybrid"]
    settings = complete(family.load_settings({**GRANITE, "num_local_experts": experts}))
    assert settings["hybrid_layer_pattern"] == pattern and settings["position_embedding_type"] == "none"
    names = "ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"
    assert tuple(settings[name] or width for name, width in zip(names, widths)) == widths
    written = family.save_settings(settings)
    same = {"num_local_experts": experts, "position_embedding_type": "nope", "shared_intermediate_size": 20}
    assert {key: written[key] for key in same} == same
    assert written["layer_types"] == ["linear_attention", "full_attention", "linear_attention"]


@pytest.mark.parametrize("change", [
    {"layer_types": ["mamba", "moe", "mamba"]}, {"layer_types": ["mamba"]}, {"layer_types": "mamba"},
    {"layer_types": None, "num_hidden_layers": 10**12},
])  # fmt: skip
def test_other_layers_of_granite_are_rejected(change):
    with pytest.raises(UserError, match="layer_types is .*but must be a list of linear_attention, mamba, full_attent"):
        known_families()["granitemoehybrid"].load_settings({**GRANITE, **change})


@pytest.mark.parametrize(("name", "config", "change", "message"), [
    ("granitemoehybrid", GRANITE, {"hybrid_layer_pattern": "ME*-ME"}, "the family repeats M and"),
    ("granitemoehybrid", GRANITE, {"hybrid_layer_pattern": None}, "the family repeats M and"),
    ("mamba2", MAMBA2, {"hybrid_layer_pattern": "M*"}, "the family repeats M"),
    ("bamba", BAMBA, {"hybrid_layer_pattern": "M-*-MM"}, "the family repeats M-"),
    ("bamba", BAMBA, {"mamba_num_heads": 15}, "mamba_num_heads is 15, heads must make up a multiple of hidden_size"),
])  # fmt: skip
def test_settings_of_another_model_are_not_exported(name, config, change, message):
    family = known_families()[name]
    settings = complete(family.load_settings(config))
    assert family.save_settings(settings)["num_hidden_layers"] == config["num_hidden_layers"]
    with pytest.raises(UserError, match=message):
        family.save_settings({**settings, **change})
