"""Falcon (``falcon``): one matrix of queries, keys and values per group; parallel branches with one norm (7B) or two
(40B, 180B), or sequential ones. Files of 2023 as ``RefinedWeb`` need the keys of ``falcon``."""

from __future__ import annotations

from megatron.export.hf.attention_settings import Rope, derived_head_size
from megatron.export.hf.families import gpt, llama
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import Weights
from megatron.export.hf.settings import Computed, Fixed, FixedKeys, Same, Table, get, refuse, same

LAYER = "transformer.h.*"


def _load_architecture(config: Table) -> dict[str, object]:
    """``transformers`` cannot run two norms in the old architecture, or sequential branches in the new one."""
    is_new, parallel = get(config, ("new_decoder_architecture",), False), get(config, ("parallel_attn",), True)
    heads, norms = config["num_attention_heads"], get(config, ("num_ln_in_parallel_attn",), 2 if is_new else 1)
    if norms not in ((1, 2) if is_new else (1,)):
        raise refuse("num_ln_in_parallel_attn", norms, f"but new_decoder_architecture is {is_new}")
    if is_new and not parallel:
        raise refuse("parallel_attn", parallel, "but new_decoder_architecture is True")
    count = heads
    if is_new:
        count = get(config, ("num_kv_heads",), heads)
    elif get(config, ("multi_query",), True):
        count = 1
    return {
        "num_query_groups": count,
        "group_query_attention": count != heads,
        "use_parallel_residual": parallel,
        "share_parallel_norm": parallel and norms == 1,
    }


def _save_architecture(settings: Table) -> dict[str, object]:
    count, heads = settings["num_query_groups"], settings["num_attention_heads"]
    parallel, shared = settings["use_parallel_residual"], settings["share_parallel_norm"]
    is_new = parallel and not shared or count not in (1, heads)
    if is_new and not parallel:
        raise refuse("num_query_groups", count, f"sequential branches have 1 or {heads} there")
    old, new = {"multi_query": count == 1}, {"num_ln_in_parallel_attn": 1 if shared else 2, "num_kv_heads": count}
    return {"new_decoder_architecture": is_new, "parallel_attn": parallel, **(new if is_new else old)}


ARCHITECTURE = Computed(
    ("new_decoder_architecture", "parallel_attn", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn"),
    ("num_query_groups", "group_query_attention", "use_parallel_residual", "share_parallel_norm"),
    _load_architecture,
    _save_architecture,
)


TWO_NORMS: Weights = {
    "decoder.layers.*.input_layernorm": f"{LAYER}.ln_attn",
    "decoder.layers.*.pre_mlp_layernorm": f"{LAYER}.ln_mlp",
}
"""Names of the norms of parallel branches with one each."""


def _norm_names(settings: Table) -> Weights:
    return TWO_NORMS if settings["use_parallel_residual"] and not settings["share_parallel_norm"] else {}


FALCON = Family(
    "falcon", "FalconForCausalLM", models="Falcon 7B, 40B, 180B, 11B",
    limits=("ALiBi (Falcon RW)",),
    config=(
        *same(num_layers="num_hidden_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
              vocab_size="vocab_size"),
        Same("max_position_embeddings", "max_position_embeddings", default=2048),
        Same("ffn_hidden_size", "ffn_hidden_size", default=lambda config: 4 * config["hidden_size"]),
        derived_head_size(), ARCHITECTURE, Rope(), llama.tied(True), gpt.activation("activation", "gelu"),
        Same("add_bias_linear", "bias", default=False), Same("norm_epsilon", "layer_norm_epsilon", default=1e-5),
        Same("hidden_dropout", "hidden_dropout", default=0.0),
        Same("attention_dropout", "attention_dropout", default=0.0),
        Fixed({"normalization": "LayerNorm"}), FixedKeys({"alibi": False}),
    ),
    weights={
        "embedding.word_embeddings": "transformer.word_embeddings",
        "decoder.layers.*.input_layernorm": f"{LAYER}.input_layernorm",
        "decoder.layers.*.self_attention.linear_qkv": f"{LAYER}.self_attention.query_key_value",
        "decoder.layers.*.self_attention.linear_proj": f"{LAYER}.self_attention.dense",
        "decoder.layers.*.pre_mlp_layernorm": f"{LAYER}.post_attention_layernorm",
        "decoder.layers.*.mlp.linear_fc1": f"{LAYER}.mlp.dense_h_to_4h",
        "decoder.layers.*.mlp.linear_fc2": f"{LAYER}.mlp.dense_4h_to_h",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
    },
    names=_norm_names,
    unused=(r".*\.rotary_emb\.inv_freq",),
    base="transformer.",
)  # fmt: skip
