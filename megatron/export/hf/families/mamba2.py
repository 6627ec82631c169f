"""Mamba-2, and Bamba: layers of Mamba-2 or attention, each followed by a gated feed-forward network."""

from __future__ import annotations

import math
import re

from megatron.export.hf.attention_settings import RopeTable, groups
from megatron.export.hf.families import llama
from megatron.export.hf.families.nemotron_h import mixer_names
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import Halves
from megatron.export.hf.settings import Begin, Computed, Fixed, FixedKeys, Ignored, Rule, Same, Table, get, refuse, same


def _pattern(network: str) -> Computed:
    """Pattern of M and, in layers of ``attn_layer_indices``, *, with ``network`` after each."""

    def load(config: Table) -> dict[str, object]:
        attention, count = get(config, ("attn_layer_indices",), []), get(config, ("num_hidden_layers",))
        if type(count) is not int or not 0 < count <= 1024:
            raise refuse("num_hidden_layers", count, "must be an integer from 1 to 1024")
        kinds = ("*" if layer in attention else "M" for layer in range(count))
        pattern = "".join(kind + network for kind in kinds)
        return {"hybrid_layer_pattern": pattern, "num_layers": len(pattern)}

    def save(settings: Table) -> dict[str, object]:
        pattern = (settings["hybrid_layer_pattern"] or "").replace("|", "")
        if not re.fullmatch(rf"([M*]{network})+" if network else "M+", pattern):
            raise refuse("hybrid_layer_pattern", pattern, f"the family repeats M{network}, in Bamba also *-")
        kinds = pattern[:: 1 + len(network)]
        attention = [layer for layer, kind in enumerate(kinds) if kind == "*"]
        return {"num_hidden_layers": len(kinds), **({"attn_layer_indices": attention} if network else {})}

    keys = ("num_hidden_layers", *["attn_layer_indices"] * bool(network))
    return Computed(keys, ("hybrid_layer_pattern", "num_layers"), load, save)


def mamba_heads(heads: str, channels: str, expand: str) -> tuple[Rule, ...]:
    """Heads and their channels, which make up ``expand`` times the hidden size."""

    def save(settings: Table) -> dict[str, object]:
        ratio, rest = divmod(settings["mamba_num_heads"] * settings["mamba_head_dim"], settings["hidden_size"])
        if rest:
            raise refuse("mamba_num_heads", settings["mamba_num_heads"], "heads must make up a multiple of hidden_size")
        return {expand: ratio}

    sizes = Same("mamba_num_heads", heads, default=128), Same("mamba_head_dim", channels, default=64)
    return *sizes, Computed((expand,), ("mamba_num_heads", "mamba_head_dim"), lambda config: {}, save)


def _load_limit(config: Table) -> dict[str, object]:
    limit = get(config, ("time_step_limit",), [0.0, math.inf])
    ends = [end["__float__"] if isinstance(end, dict) else end for end in limit]  # infinity as transformers writes it
    if [*map(float, ends)] != [0.0, math.inf]:
        raise refuse("time_step_limit", limit, "but time steps have no limits, as in Megatron-LM")
    return {}


COMMON: tuple[Rule, ...] = (
    *same(hidden_size="hidden_size", vocab_size="vocab_size"), llama.tied(False), llama.NO_BIASES,
    Computed(("time_step_limit",), (), _load_limit, lambda settings: {}, ("`time_step_limit`: none",)),
    Fixed({"normalization": "RMSNorm"}),
)  # fmt: skip

MAMBA2 = Family(
    "mamba2", "Mamba2ForCausalLM", models="Mamba-2, Codestral Mamba",
    config=(
        *COMMON, _pattern(""), *mamba_heads("num_heads", "head_dim", "expand"),
        Fixed({"position_embedding_type": "none"}),
        Same("mamba_num_groups", "n_groups", default=8), Same("mamba_state_dim", "state_size", default=128),
        Same("norm_epsilon", "layer_norm_epsilon", default=1e-5),
        Same("num_attention_heads", "num_attention_heads", default=1), Begin({"hidden_dropout": 0.0}),
        Same("max_position_embeddings", "max_position_embeddings", default=2048),
        FixedKeys({"hidden_act": "silu", "conv_kernel": 4, "use_conv_bias": True, "use_bias": False}),
        Ignored(("residual_in_fp32", "rescale_prenorm_residual", "time_step_rank", "time_step_min", "time_step_max",
                 "time_step_floor", "chunk_size")),
    ),
    weights={
        **mixer_names("backbone.layers.*.mixer"), "decoder.layers.*.norm": "backbone.layers.*.norm",
        "embedding.word_embeddings": "backbone.embeddings", "decoder.final_layernorm": "backbone.norm_f",
        "output_layer": "lm_head",
    },
    base="backbone.",
)  # fmt: skip

BAMBA = Family(
    "bamba", "BambaForCausalLM", models="Bamba",
    config=(
        *COMMON, _pattern("-"), *mamba_heads("mamba_n_heads", "mamba_d_head", "mamba_expand"), llama.FFN, groups(8),
        *same(num_attention_heads="num_attention_heads", max_position_embeddings="max_position_embeddings"),
        Same("mamba_num_groups", "mamba_n_groups", default=1), Same("mamba_state_dim", "mamba_d_state", default=256),
        Same("norm_epsilon", "rms_norm_eps", default=1e-5), llama.HEAD_SIZE, *llama.DROPOUT, llama.SILU_GATED,
        RopeTable(share=0.5),  # transformers reads the share in the table only
        FixedKeys({"mamba_d_conv": 4, "mamba_conv_bias": True, "mamba_proj_bias": False, "attention_bias": False,
                   "mlp_bias": False}),
        Ignored(("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION, **mixer_names("model.layers.*.mamba"),
        "decoder.layers.*.norm": "model.layers.*.input_layernorm",
        "decoder.layers.*.pre_mlp_layernorm": "model.layers.*.pre_ff_layernorm",
        "decoder.layers.*.mlp.linear_fc1": Halves(
            "model.layers.*.feed_forward.gate_proj", "model.layers.*.feed_forward.up_proj"
        ),
        "decoder.layers.*.mlp.linear_fc2": "model.layers.*.feed_forward.down_proj",
        "decoder.final_layernorm": "model.final_layernorm",
    },
    layers_per_block=2,
)  # fmt: skip
