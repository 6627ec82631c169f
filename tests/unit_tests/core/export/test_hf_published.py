"""Published ``config.json`` files as they lie on the hub: what settings they are, and back."""

import pytest

from megatron.core.config.errors import UserError
from megatron.core.export.hf.family import complete, described
from megatron.core.export.hf.registry import family_of

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


def settings_of(config):
    return complete(family_of(config).load_settings(config))


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (GEMMA_2B, 2_506_172_416), (GEMMA_2_2B, 2_614_341_888), (GEMMA_3_1B, 999_885_952),
        (OLMO_2_7B, 7_298_617_344), (PYTHIA_160M, 162_322_944),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_published_models_have_their_parameters_and_come_back(config, num_parameters):
    settings = settings_of(config)
    shapes, _ = described(settings)
    total = 0
    for shape in shapes.values():
        size = 1
        for each in shape:
            size *= each
        total += size
    assert total == num_parameters
    family = family_of(config)
    again = family.save_settings(settings)
    assert settings_of(again) == settings
    kept = {name: value for name, value in config.items() if name in again and value is not None}
    if config is GEMMA_2B:
        kept["hidden_act"] = "gelu_pytorch_tanh"  # what its "gelu" means
    assert kept.items() <= again.items()


def test_what_the_settings_of_gemma_say():
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
        ({**GEMMA_3_1B, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "stretched"),
        ({**OLMO_2_7B, "attention_bias": True}, "attention_bias is True"),
    ],
)
def test_what_no_setting_can_say_is_refused(config, message):
    with pytest.raises(UserError, match=message):
        settings_of(config)


def test_settings_that_gemma_cannot_say_are_refused():
    family = family_of(GEMMA_3_1B)
    settings = settings_of(GEMMA_3_1B)
    with pytest.raises(UserError, match="softmax_scale is 0.3"):
        family.save_settings({**settings, "softmax_scale": 0.3})
    with pytest.raises(UserError, match="rotary_base_local is None"):
        family.save_settings({**settings, "rotary_base_local": None, "rotary_seq_len_interpolation_factor": 8})
