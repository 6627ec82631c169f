"""ModernBERT (``ModernBertForMaskedLM``): two of three layers have a separate rotary base and a window, the norm
after the embedding is also the first layer's, GELU is gated, and only the output layer has a bias."""

from __future__ import annotations

from megatron.export.hf import attention_settings as attention
from megatron.export.hf.attention_settings import FULL, SLIDING
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import QueryKeyValue
from megatron.export.hf.settings import Choice, Computed, Fixed, FixedKeys, Ignored, Same, Table, get, refuse

BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}


def _load_layers(config: Table) -> dict[str, object]:
    """The local base is None without windows. Raises UserError for scaled positions or other tables."""
    count, every = config["num_hidden_layers"], get(config, ("global_attn_every_n_layers",), 3)
    has = attention.layer_types_pattern(config, [layer % every != 0 for layer in range(count)])
    half, tables = get(config, ("local_attention",), 128) // 2, get(config, ("rope_parameters",), {})
    if not isinstance(tables, dict) or not all(isinstance(tables.get(kind) or {}, dict) for kind in BASES):
        raise refuse("rope_parameters", tables, f"but must be a table each for {FULL} and {SLIDING}")
    base, local = (
        attention.unstretched_base(kind, tables, key, get(config, (key,), default))
        for kind, (key, default) in BASES.items()
    )
    return {
        "rotary_base": base,
        "rotary_base_local": local if any(has) else None,
        **attention.window_settings((half, half), has),
    }


def _save_layers(settings: Table) -> dict[str, object]:
    """Return the keys of both older and newer transformers versions."""
    size, local = settings["window_size"], settings["rotary_base_local"] or settings["rotary_base"]
    if size and (size[0] != size[1] or size[0] < 0):
        raise refuse("window_size", size, "the family requires windows of equal size on both sides")
    has = attention.layers_with_windows(settings)
    bases = {FULL: float(settings["rotary_base"]), SLIDING: float(local)}
    return {
        **({"local_attention": 2 * size[0]} if size else {}),
        "layer_types": [SLIDING if has_window else FULL for has_window in has],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        **{key: bases[kind] for kind, (key, _) in BASES.items()},
    }


LAYERS = Computed(
    ("layer_types", "global_attn_every_n_layers", "local_attention", "rope_parameters", "global_rope_theta",
     "local_rope_theta"),
    ("rotary_base", "rotary_base_local", "window_size", "window_attn_skip_freq"), _load_layers, _save_layers,
)  # fmt: skip
LOCAL, LAYER = "encoder.layers.*", "model.layers.*"

MODERNBERT = Family(
    "modernbert", "ModernBertForMaskedLM", models="ModernBERT",
    limits=("rotary scaling",),
    config=(
        *llama.SIZES, llama.FFN, attention.equal_heads("num_attention_heads", "hidden_size"), llama.tied(True), LAYERS,
        Same("norm_epsilon", "norm_eps", default=1e-5), Same("norm_bias", "norm_bias", default=False),
        Choice("hidden_activation", {"gelu": {"geglu": True, "exact_gelu": True}}, default="gelu"),
        Same("hidden_dropout", "mlp_dropout", default=0.0), Same("hidden_dropout", "embedding_dropout", default=0.0),
        Same("attention_dropout", "attention_dropout", default=0.0), llama.NO_BIASES, llama.NO_PADDING,
        Fixed({"position_embedding_type": "rope", "normalization": "LayerNorm", "embed_layernorm": True,
              "bert_binary_head": False}),
        FixedKeys({"attention_bias": False, "mlp_bias": False, "classifier_bias": False, "decoder_bias": True,
                "classifier_activation": "gelu"}),
        FixedKeys({"position_embedding_type": "absolute"}, written=False),  # published, although positions are rotated
        Ignored(("layer_norm_eps", "classifier_pooling", "classifier_dropout", "deterministic_flash_attn",
                 "sparse_prediction", "sparse_pred_ignore_index", "initializer_cutoff_factor", "reference_compile",
                 "repad_logits_with_grad")),
    ),
    weights={
        "embedding.word_embeddings": "model.embeddings.tok_embeddings",
        "encoder.layers.0.input_layernorm": "model.embeddings.norm",
        f"{LOCAL}.input_layernorm": f"{LAYER}.attn_norm",
        f"{LOCAL}.self_attention.linear_qkv": QueryKeyValue(f"{LAYER}.attn.Wqkv"),
        f"{LOCAL}.self_attention.linear_proj": f"{LAYER}.attn.Wo",
        f"{LOCAL}.pre_mlp_layernorm": f"{LAYER}.mlp_norm",
        f"{LOCAL}.mlp.linear_fc1": f"{LAYER}.mlp.Wi",
        f"{LOCAL}.mlp.linear_fc2": f"{LAYER}.mlp.Wo",
        "encoder.final_layernorm": "model.final_norm",
        "lm_head.dense": "head.dense", "lm_head.layer_norm": "head.norm", "output_layer": "decoder",
    },
    model_family="bert", also_read=("ModernBertModel",), heads=(("head.dense", "head.norm", "decoder"),),
)  # fmt: skip
