"""Further settings of families that can be converted: tiny models of ``transformers``, for ``test_hf_families.py``.

``foreign_models.py`` holds one row per computation; the rows here vary the keys of ``config.json`` of one family.
"""

from __future__ import annotations

from tests.test_utils.foreign_models import (
    BAMBA_SIZES,
    GATED,
    GLM_SETTINGS,
    GPT2_SETTINGS,
    LATENT,
    LN,
    OLMO_DELTA,
    SLIDING,
    STRETCHED,
    Family,
    rope,
)

YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 24}
KINDS = ["sliding_attention", "full_attention"]


def variant(architecture: str, base: dict, **settings) -> Family:
    """A model that is built from its ``config.json``: it needs neither flags nor a table of weights."""
    return Family(architecture, {}, {**base, **settings}, "")


def starcoder2(**settings):
    base = {**LN, **rope(), "norm_epsilon": 1e-3, "num_key_value_heads": 2}
    return variant("Starcoder2", base, **settings)


def glm4_moe(**settings):
    base = {**GATED, **rope(partial_rotary_factor=0.5), **EXPERTS, "num_key_value_heads": 2, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5}  # fmt: skip
    return variant("Glm4Moe", base, **settings)


def olmo3(tables, **settings):
    base = {**GATED, **SLIDING, "num_key_value_heads": 2, "rope_parameters": dict(zip(KINDS, tables))}
    return variant("Olmo3", base, **settings)


def deepseek_v2(**settings):
    base = {**GATED, **rope(), **LATENT, **EXPERTS, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
    return variant("DeepseekV2", base, **settings)


def plain(base=5e5):
    return {"rope_type": "default", "rope_theta": base}


def falcon(**settings):
    return variant("Falcon", {"ffn_hidden_size": 48, "layer_norm_epsilon": 1e-3, **rope(300.0)}, **settings)


OPT_SIZES = {"ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}
PHI_SIZES = {"intermediate_size": 48, "layer_norm_eps": 1e-3, **rope(partial_rotary_factor=0.5)}
COHERE_SIZES = {"intermediate_size": 48, "layer_norm_eps": 1e-3, **rope(), "num_key_value_heads": 2}

FACTORS = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.5, 4.0, 8.0]}
"""LongRoPE divisors of 4 channel pairs."""
LONGROPE = {"kind": "longrope", "original_max_position_embeddings": 16, **FACTORS}

VARIANTS = {
    "llama-dynamic": variant("Llama", GATED, **rope(500.0, kind="dynamic", factor=4.0)),
    "llama-longrope": variant("Llama", GATED, **rope(500.0, **LONGROPE, factor=4.0)),
    "phi3-longrope": variant(
        "Phi3", GATED, original_max_position_embeddings=32,
        **rope(kind="longrope", partial_rotary_factor=0.5, factor=2.0, attention_factor=1.25,
               short_factor=[1.1, 1.3], long_factor=[2.0, 4.0]),
    ),
    "glm-longrope": variant(
        "Glm", GLM_SETTINGS | {"head_dim": 16},
        **rope(partial_rotary_factor=0.5, **LONGROPE, factor=4.0, attention_factor=0.75),
    ),
    "opt-gelu-without-biases-untied": variant(
        "OPT", OPT_SIZES, enable_bias=False, activation_function="gelu", tie_word_embeddings=False
    ),
    "opt-gelu": variant("OPT", OPT_SIZES, activation_function="gelu_new"),
    "phi-tied-groups": variant("Phi", PHI_SIZES, num_key_value_heads=2, tie_word_embeddings=True, hidden_act="gelu"),
    "phi-normed-queries": variant("Phi", PHI_SIZES, qk_layernorm=True, **rope(500.0, partial_rotary_factor=0.25)),
    "cohere-untied": variant(
        "Cohere", COHERE_SIZES, tie_word_embeddings=False, logit_scale=0.3, num_key_value_heads=4, **rope(1e4)
    ),
    "falcon-11b": falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon-sequential": falcon(parallel_attn=False, bias=True, activation="gelu_new", tie_word_embeddings=False),
    "falcon-sequential-heads": falcon(parallel_attn=False, multi_query=False),
    "falcon-parallel-heads": falcon(multi_query=False, bias=True),
    "gpt-bigcode-exact-gelu": variant(
        "GPTBigCode", GPT2_SETTINGS, activation_function="gelu", n_inner=40, tie_word_embeddings=False
    ),
    "starcoder2-tied": starcoder2(tie_word_embeddings=True, num_key_value_heads=4),
    "starcoder2-exact-gelu": starcoder2(hidden_act="gelu", **rope(100.5, kind="linear", factor=2.0)),
    "glm-without-biases": variant(
        "Glm", GLM_SETTINGS, attention_bias=False, head_dim=12, tie_word_embeddings=True,
        **rope(500.0, partial_rotary_factor=1.0),
    ),
    "glm4-yarn": variant(
        "Glm4", GLM_SETTINGS, attention_bias=False, **rope(kind="yarn", partial_rotary_factor=0.5, **YARN)
    ),
    "glm4-moe-normed-queries-groups": glm4_moe(
        use_qk_norm=True, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=0
    ),
    "glm4-moe-dense": glm4_moe(first_k_dense_replace=2, tie_word_embeddings=True),
    "olmo3": olmo3((plain(), {"rope_type": "yarn", "rope_theta": 5e5, **YARN}), layer_types=KINDS),
    "olmo3-plain-rotation": olmo3((plain(300.0), plain(300.0)), layer_types=KINDS[::-1]),
    "olmo3-two-bases": olmo3((plain(300.0), plain(1e4)), layer_types=KINDS),
    "olmo3-without-windows": olmo3(
        (plain(), plain()), layer_types=KINDS[1:] * 2, sliding_window=4096, tie_word_embeddings=True
    ),
    "olmo3-usual-layers": olmo3((plain(), plain())),
    "granite-biases": variant(
        "Granite", GATED, attention_bias=True, mlp_bias=True, num_key_value_heads=2, attention_multiplier=8**-0.5,
        residual_multiplier=0.5, tie_word_embeddings=True, **rope(kind="yarn", **YARN),
    ),
    "smollm3-biases": variant(
        "SmolLM3", GATED, attention_bias=True, mlp_bias=True, head_dim=12, no_rope_layer_interval=2,
        tie_word_embeddings=True, **rope(kind="yarn", **YARN),
    ),
    "smollm3-all-rotated": variant("SmolLM3", GATED, **rope(300.0)),
    "stablelm-groups": variant(
        "StableLm", LN, num_key_value_heads=2, tie_word_embeddings=True, layer_norm_eps=1e-3,
        **rope(partial_rotary_factor=0.5),
    ),
    "olmo-hybrid-rope": variant("OlmoHybrid", {**GATED, **OLMO_DELTA}, linear_allow_neg_eigval=False, **rope(5e5)),
    "bamba-all-rotated": variant(
        "Bamba", {**GATED, **BAMBA_SIZES}, attn_layer_indices=[1], **rope(partial_rotary_factor=1.0)
    ),
    "mamba2-wide-head": variant("Mamba2", {}, num_heads=1, head_dim=96, expand=3, n_groups=1, state_size=6),
    "nemotron-biases": variant(
        "Nemotron", LN, attention_bias=True, mlp_bias=True, head_dim=12, num_key_value_heads=2,
        norm_eps=1e-3, **rope(kind="linear", factor=2.0, partial_rotary_factor=0.5),
    ),
    "arcee-biases": variant(
        "Arcee", GATED, attention_bias=True, mlp_bias=True, num_key_value_heads=2, **rope(kind="yarn", **YARN)
    ),
    "ernie4.5-biases": variant(
        "Ernie4_5", GATED, use_bias=True, head_dim=12, num_key_value_heads=2, tie_word_embeddings=True,
        **rope(500.0),
    ),
    "seed-oss-without-biases": variant(
        "SeedOss", GATED, attention_bias=False, head_dim=12, num_key_value_heads=2, residual_dropout=0.0,
        attention_dropout=0.0, tie_word_embeddings=True, **rope(1e7),
    ),
    "deepseek-v2-lite": deepseek_v2(
        q_lora_rank=None, **rope(kind="yarn", **STRETCHED, mscale=0.707, mscale_all_dim=0.707)
    ),
    "deepseek-v2-groups": deepseek_v2(
        q_lora_rank=24, topk_method="group_limited_greedy", n_group=4, topk_group=2, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=0,
    ),
    "deepseek-v2-two-experts-per-group": deepseek_v2(
        q_lora_rank=24, topk_method="group_limited_greedy", n_group=4, topk_group=2, num_experts_per_tok=4
    ),
    "deepseek-v2-uneven-groups": deepseek_v2(
        q_lora_rank=None, topk_method="group_limited_greedy", n_group=2, topk_group=2, num_experts_per_tok=3
    ),
    "deepseek-v2-dense": deepseek_v2(first_k_dense_replace=2, q_lora_rank=24, tie_word_embeddings=True),
}  # fmt: skip
