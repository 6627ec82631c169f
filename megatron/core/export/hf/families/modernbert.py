"""ModernBERT (``ModernBertForMaskedLM``): two of three layers have a rotary base and a window of their own, the norm
behind the embedding is the first layer's too, GELU is gated, and only the output layer has a bias."""

from __future__ import annotations

from typing import Any

from megatron.core.attention.window import layer_window
from megatron.core.export.hf.attention_settings import FULL, SLIDING, equal_heads
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layouts import QueryKeyValue
from megatron.core.export.hf.settings import Choice, Computed, Ignored, Ours, Same, Table, Theirs, get, refuse

BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}


def _load_layers(config: Table) -> dict[str, Any]:
    count, every = config["num_hidden_layers"], get(config, ("global_attn_every_n_layers",), 3)
    kinds = get(config, ("layer_types",), [SLIDING if layer % every else FULL for layer in range(count)])
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {SLIDING, FULL}:
        raise refuse("layer_types", kinds, f"but must name {SLIDING} or {FULL} for each of {count} layers")
    bases = {kind: _base(config, kind) for kind in BASES}
    if SLIDING not in kinds:
        return {"rotary_base": bases[FULL], "rotary_base_local": None, "window_size": None,
                "window_attn_skip_freq": None}  # fmt: skip
    half = get(config, ("local_attention",), 128) // 2
    pattern = [int(kind == SLIDING) for kind in kinds] if FULL in kinds else None
    return {"rotary_base": bases[FULL], "rotary_base_local": bases[SLIDING], "window_size": (half, half),
            "window_attn_skip_freq": pattern}  # fmt: skip


def _base(config: Table, kind: str) -> int:
    key, default = BASES[kind]
    tables = get(config, ("rope_parameters",), {})
    if not isinstance(tables, dict) or not isinstance(tables.get(kind) or {}, dict):
        raise refuse("rope_parameters", tables, f"but must be a table each for {FULL} and {SLIDING}")
    given = {**(tables.get(kind) or {})}
    base = given.pop("rope_theta", get(config, (key,), default))
    if given.pop("rope_type", "default") != "default" or given:
        raise refuse(f"rope_parameters {kind}", given, "which cannot be represented: positions are not stretched")
    if base != int(base):
        raise refuse(key, base, "which cannot be represented: it must be a whole number")
    return int(base)


def _save_layers(settings: Table) -> dict[str, Any]:
    size, local = settings["window_size"], settings["rotary_base_local"] or settings["rotary_base"]
    if size and (size[0] != size[1] or size[0] < 0):
        raise refuse("window_size", size, "the family has windows with as many tokens on either side")
    skip, layers = settings["window_attn_skip_freq"], range(1, settings["num_layers"] + 1)
    has = [layer_window(size and tuple(size), skip, number) is not None for number in layers]
    bases = {FULL: float(settings["rotary_base"]), SLIDING: float(local)}
    return {
        **({"local_attention": 2 * size[0]} if size else {}),
        "layer_types": [SLIDING if each else FULL for each in has],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        **{key: bases[kind] for kind, (key, _) in BASES.items()},
    }  # fmt: skip


LAYERS = Computed(
    ("layer_types", "global_attn_every_n_layers", "local_attention", "rope_parameters", "global_rope_theta",
     "local_rope_theta"),
    ("rotary_base", "rotary_base_local", "window_size", "window_attn_skip_freq"), _load_layers, _save_layers,
)  # fmt: skip
OURS, LAYER = "encoder.layers.*", "model.layers.*"

FAMILY = Family(
    "modernbert", "ModernBertForMaskedLM",
    config=(
        *llama.SIZES, llama.FFN, equal_heads("hidden_size", "num_attention_heads"), llama.tied(True), LAYERS,
        Same("norm_epsilon", "norm_eps", default=1e-5), Same("norm_bias", "norm_bias", default=False),
        Choice("hidden_activation", {"gelu": {"geglu": True, "exact_gelu": True}}, default="gelu"),
        Same("hidden_dropout", "mlp_dropout", default=0.0), Same("hidden_dropout", "embedding_dropout", default=0.0),
        Same("attention_dropout", "attention_dropout", default=0.0), llama.NO_BIASES,
        Ours({"position_embedding_type": "rope", "normalization": "LayerNorm", "embed_layernorm": True,
              "bert_binary_head": False}),
        Theirs({"attention_bias": False, "mlp_bias": False, "classifier_bias": False, "decoder_bias": True,
                "classifier_activation": "gelu"}),
        Ignored(("classifier_pooling", "classifier_dropout", "deterministic_flash_attn", "sparse_prediction",
                 "sparse_pred_ignore_index", "initializer_cutoff_factor", "reference_compile",
                 "repad_logits_with_grad")),
    ),
    weights={
        "embedding.word_embeddings": "model.embeddings.tok_embeddings",
        "encoder.layers.0.input_layernorm": "model.embeddings.norm",
        f"{OURS}.input_layernorm": f"{LAYER}.attn_norm",
        f"{OURS}.self_attention.linear_qkv": QueryKeyValue(f"{LAYER}.attn.Wqkv"),
        f"{OURS}.self_attention.linear_proj": f"{LAYER}.attn.Wo",
        f"{OURS}.pre_mlp_layernorm": f"{LAYER}.mlp_norm",
        f"{OURS}.mlp.linear_fc1": f"{LAYER}.mlp.Wi",
        f"{OURS}.mlp.linear_fc2": f"{LAYER}.mlp.Wo",
        "encoder.final_layernorm": "model.final_norm",
        "lm_head.dense": "head.dense", "lm_head.layer_norm": "head.norm", "output_layer": "decoder",
    },
    model_family="bert",
)  # fmt: skip
