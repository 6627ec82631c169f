"""Published ``config.json`` files as they lie on the hub: what settings they are, and back."""

import re

import pytest

from megatron.core.config.errors import UserError
from megatron.export.hf.family import complete, described
from megatron.export.hf.registry import find_family
from tests.test_utils import published_configs as published

GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256,
    "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048, "intermediate_size": 16384,
    "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
}  # fmt: skip
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size": 262144,
}  # fmt: skip
OLMO_2_7B = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip
PYTHIA_160M = {
    "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12,
    "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip

MODERNBERT_BASE = {
    "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
    "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
    "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
    "gradient_checkpointing": False, "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128,
    "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0,
    "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12,
    "num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute", "sep_token_id": 50282,
    "tie_word_embeddings": True, "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "vocab_size": 50368,
}  # fmt: skip


def settings_of(config):
    return complete(find_family(config).load_settings(config))


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (GEMMA_2B, 2_506_172_416), (GEMMA_2_2B, 2_614_341_888), (GEMMA_3_1B, 999_885_952),
        (OLMO_2_7B, 7_298_617_344), (PYTHIA_160M, 162_322_944),
        (published.STARCODER2_3B, 3_030_371_328), (published.SANTACODER, 1_124_886_528),
        (published.GLM_4_9B, 9_399_951_360), (published.GLM_4_9B_0414, 9_400_094_720),
        (published.GLM_4_5_AIR, 106_852_245_504 + 45 * 128),  # with the biases of its experts
        (published.OLMO_3_7B, 7_298_011_136), (published.STABLELM_2_1_6B, 1_644_515_328),
        (published.SMOLLM3_3B, 3_075_098_624), (published.GRANITE_3_3_2B, 2_533_539_840),
        (published.MINITRON_4B, 4_190_509_056), (published.ERNIE_4_5_03B, 360_748_032),
        (published.SEED_OSS_36B, 36_151_104_512), (published.DEEPSEEK_V2_LITE, 15_706_484_224),
        (published.KIMI_K2, 1_026_408_209_408 + 60 * 384), (published.DISTILBERT, 66_985_530),
        (published.KIMI_LINEAR_48B, 49_122_675_072 + 26 * 256),  # with the biases of its experts
        (published.OLMO_HYBRID_7B, 7_430_870_688),
        (published.MT5_SMALL, 172_119_424 + 250_112 * 512),  # with the separate output layer
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_published_models_have_their_parameters_and_come_back(config, num_parameters):
    settings = settings_of(config)
    shapes, _ = described(settings)
    total = 0
    for shape in shapes.values():
        size = 1
        for item in shape:
            size *= item
        total += size
    assert total == num_parameters
    family = find_family(config)
    repeated = family.save_settings(settings)
    assert settings_of(repeated) == settings
    messages = repeated.keys() - family.passive - {"rope_scaling"}  # which is the same in equal settings
    retained = {name: value for name, value in config.items() if name in messages and value is not None}
    if config is GEMMA_2B:
        retained["hidden_act"] = "gelu_pytorch_tanh"  # what its "gelu" means
    assert retained.items() <= repeated.items()


def test_gemma_config_gives_windows_scale_and_rotary_bases():
    two, three = settings_of(GEMMA_2_2B), settings_of(GEMMA_3_1B)
    pattern = [1, 0] * 13
    assert (two["window_size"], two["window_attn_skip_freq"], two["softmax_scale"]) == ((4095, 0), pattern, None)
    assert settings_of({**GEMMA_2_2B, "query_pre_attn_scalar": 144})["softmax_scale"] == 1 / 12
    assert settings_of({**GEMMA_2_2B, "attn_logit_softcapping": None})["attn_logit_softcapping"] is None
    assert (three["rotary_base"], three["rotary_base_local"]) == (1_000_000, 10_000)
    assert three["window_attn_skip_freq"] == ([1] * 5 + [0]) * 4 + [1, 1]
    assert settings_of({**GEMMA_3_1B, "sliding_window_pattern": 2})["window_attn_skip_freq"] == pattern


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GEMMA_2_2B, "hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({**GEMMA_2_2B, "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({**GEMMA_3_1B, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({**GEMMA_3_1B, "rope_local_base_freq": 0.5}, "rope_local_base_freq is 0.5"),
        ({**GEMMA_3_1B, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "scaled"),
        ({**OLMO_2_7B, "attention_bias": True}, "attention_bias is True"),
    ],
)
def test_config_values_without_a_setting_are_rejected(config, message):
    with pytest.raises(UserError, match=message):
        settings_of(config)


def test_settings_without_a_gemma_config_value_are_rejected():
    family = find_family(GEMMA_3_1B)
    settings = settings_of(GEMMA_3_1B)
    with pytest.raises(UserError, match="softmax_scale is 0.3"):
        family.save_settings({**settings, "softmax_scale": 0.3})
    with pytest.raises(UserError, match="rotary_base_local is None"):
        family.save_settings({**settings, "rotary_base_local": None, "rotary_seq_len_interpolation_factor": 8})


def test_settings_of_further_published_models():
    starcoder, olmo = settings_of(published.STARCODER2_3B), settings_of(published.OLMO_3_7B)
    assert starcoder["rotary_base"] == 999999.4420358813 and starcoder["window_size"] == (4095, 0)
    assert olmo["window_attn_skip_freq"] == [1, 1, 1, 0] * 8 and olmo["position_embedding_type"] == "yarn"
    assert (olmo["rotary_base"], olmo["rotary_base_local"], olmo["rotary_scaling_factor"]) == (500_000, 500_000, 8.0)
    glm, kimi = settings_of(published.GLM_4_5_AIR), settings_of(published.KIMI_K2)
    assert glm["add_qkv_bias"] and not glm["qk_layernorm"] and glm["rotary_percent"] == 0.5
    assert glm["moe_layer_freq"] == [0] + [1] * 45 and glm["moe_shared_expert_intermediate_size"] == 1408
    assert (kimi["yarn_beta_fast"], kimi["mscale_all_dim"], kimi["num_moe_experts"]) == (1.0, 1.0, 384)
    linear = settings_of(published.KIMI_LINEAR_48B)
    assert linear["linear_attention_freq"] == [1, 1, 1, 0] * 6 + [1, 1, 0] and linear["moe_layer_freq"][:2] == [0, 1]
    assert (linear["linear_num_value_heads"], linear["linear_value_head_dim"]) == (32, 128)
    hybrid = settings_of(published.OLMO_HYBRID_7B)
    assert (hybrid["position_embedding_type"], hybrid["linear_attention_freq"]) == ("none", 4)
    assert settings_of(published.OLMO_HYBRID_7B | {"rope_parameters": None})["rotary_base"] == 10000.0
    lite = settings_of(published.DEEPSEEK_V2_LITE)
    assert lite["q_lora_rank"] is None and lite["moe_router_pre_softmax"] and lite["moe_router_num_groups"] is None
    limited = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    large = settings_of(published.DEEPSEEK_V2_LITE | limited)
    assert (large["moe_router_num_groups"], large["moe_router_group_score_topk"]) == (8, 1)
    granite = settings_of(published.GRANITE_3_3_2B)
    names = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "softmax_scale")
    assert [granite[name] for name in names] == [12.0, 0.22, 8.0, 0.015625]
    smollm = settings_of(published.SMOLLM3_3B)
    assert settings_of(published.SMOLLM3_3B | {"no_rope_layers": [0, 1, 1] * 12})["no_rope_freq"] == [1, 0, 0] * 12
    assert smollm["no_rope_freq"] == 4 and not smollm["untie_embeddings_and_output_weights"]
    null = settings_of({**published.STARCODER2_3B, "num_key_value_heads": None})
    assert null["num_query_groups"] == 24, "null means as many heads of keys and values as of queries"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (published.STARCODER2_3B | {"use_bias": False}, "use_bias is False"),
        (published.STARCODER2_3B | {"mlp_type": "gated"}, "mlp_type is 'gated'"),
        (published.SANTACODER | {"multi_query": False}, "multi_query is False"),
        (published.GLM_4_9B_0414 | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (published.GLM_4_9B_0414 | {"rope_scaling": {"type": "proportional"}}, "rope_type is 'proportional'"),
        (published.GLM_4_5_AIR | {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (published.GLM_4_5_AIR | {"num_experts_per_tok": 1}, "norm_topk_prob is True, but must be False"),
        (published.OLMO_3_7B | {"rope_theta": 10000.0}, "rope_theta is 10000.0, which versions of transformers"),
        (published.OLMO_3_7B | {"rope_parameters": {"rope_type": "default"}}, "must be a table each"),
        (published.OLMO_3_7B | {"attention_bias": True}, "attention_bias is True"),
        (published.OLMO_3_7B | {"rope_scaling": {"type": "yarn", "factor": 8, "attention_factor": 1.0}}, "only 1.207"),
        (published.STABLELM_2_1_6B | {"qk_layernorm": True}, "qk_layernorm is True"),
        (published.STABLELM_2_1_6B | {"use_parallel_residual": True}, "use_parallel_residual is True"),
        (published.GRANITE_3_3_2B | {"residual_multiplier": 0}, "residual_multiplier is 0"),
        (published.SMOLLM3_3B | {"use_sliding_window": True}, "use_sliding_window is True"),
        (published.SMOLLM3_3B | {"layer_types": ["sliding_attention"] * 36}, "only full_attention can"),
        (published.SMOLLM3_3B | {"no_rope_layers": [1, 0]}, "must be 1 (rotary positions) or 0 for each of 36 layers"),
        (published.MINITRON_4B | {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        (published.MINITRON_4B | {"mlp_bias": True}, "another key makes add_bias_linear"),
        (
            published.ERNIE_4_5_03B | {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "short_factor must be a list",
        ),
        (published.SEED_OSS_36B | {"attention_out_bias": True}, "attention_out_bias is True"),
        (published.DEEPSEEK_V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (published.DEEPSEEK_V2_LITE | {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        (published.DEEPSEEK_V2_LITE | {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (published.KIMI_K2 | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (published.KIMI_LINEAR_48B | {"hidden_act": "situ"}, "hidden_act is 'situ'"),
        (published.KIMI_LINEAR_48B | {"mla_use_nope": False}, "mla_use_nope is False"),
        (
            published.KIMI_LINEAR_48B | {"linear_attn_config": {"head_dim": 128, "gate_lower_bound": -5.0}},
            "gate_lower_bound",
        ),
        (
            published.KIMI_LINEAR_48B | {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
            "must name the kind of each of 27 layers",
        ),
        (published.DISTILBERT | {"activation": "relu"}, "activation is 'relu'"),
        (published.DISTILBERT | {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds is True"),
        (published.MT5_SMALL | {"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'"),
    ],
)
def test_values_of_further_published_models_that_cannot_be_converted(config, message):
    with pytest.raises(UserError, match=re.escape(message)):
        settings_of(config)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (published.GLM_4_5_AIR, {"moe_shared_expert_intermediate_size": 100}, "multiples of 1408 only"),
        (published.DEEPSEEK_V2_LITE, {"moe_router_num_groups": 8, "moe_router_group_topk": 3}, "adds up the 1 best"),
        (published.SANTACODER, {"num_query_groups": 2}, "num_query_groups is 2"),
        (published.STABLELM_2_1_6B, {"kv_channels": 32}, "kv_channels is 32"),
        (published.OLMO_3_7B, {"rotary_base_local": None}, "rotary_base_local is None"),
        (published.STARCODER2_3B, {"add_bias_linear": False}, "add_bias_linear is False"),
        (published.MT5_SMALL, {"scale_decoder_outputs": True}, "scale_decoder_outputs is True"),
    ],
)
def test_settings_that_a_further_family_lacks_are_rejected(config, change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        find_family(config).save_settings({**settings_of(config), **change})


def test_modernbert_names_absolute_positions_although_it_rotates():
    settings = settings_of(MODERNBERT_BASE)
    assert (settings["position_embedding_type"], settings["rotary_base"]) == ("rope", 160_000)
    assert "position_embedding_type" not in find_family(MODERNBERT_BASE).save_settings(settings)
    with pytest.raises(UserError, match="position_embedding_type is 'relative_key', which cannot be represented"):
        settings_of({**MODERNBERT_BASE, "position_embedding_type": "relative_key"})
