"""Nemotron-H and Nemotron 3: layers of one branch each, Mamba-2, attention without positions, squared-ReLU networks or
experts."""

from __future__ import annotations

from megatron.core.config.errors import UserError
from megatron.core.config.hybrid import SYMBOLS
from megatron.core.config.transformer_config import TransformerConfig
from megatron.export.hf.attention_settings import groups
from megatron.export.hf.families import llama
from megatron.export.hf.families.mixtures import NORMALIZED_IF_SEVERAL, RoutedScale, expert_groups
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import BlockParts, QueryKeyValue, Weights
from megatron.export.hf.settings import Computed, Fixed, FixedKeys, Ignored, Rule, Same, Table, get, refuse, same

KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
"""Symbol of each layer type; the first name of a symbol is written."""


def _load_pattern(config: Table) -> dict[str, object]:
    kinds, pattern = get(config, ("layers_block_type", "layer_types"), None), config.get("hybrid_override_pattern")
    if kinds is not None:
        if not isinstance(kinds, list) or not {*kinds} <= {*KINDS}:
            raise refuse("layers_block_type", kinds, f"but must be a list of {', '.join(KINDS)}")
        pattern = "".join(KINDS[kind] for kind in kinds)
    if pattern is None:
        raise UserError("config.json: layers_block_type is missing")
    if not isinstance(pattern, str) or not pattern or not {*pattern} <= {*KINDS.values()}:
        raise refuse("hybrid_override_pattern", pattern, "but must consist of M * - E")
    return {"hybrid_layer_pattern": pattern, "num_layers": len(pattern)}


def _save_pattern(settings: Table) -> dict[str, object]:
    pattern = settings["hybrid_layer_pattern"]
    names = {symbol: name for name, symbol in reversed(KINDS.items())}
    if pattern is None or not {*pattern} <= {*names, "|"}:
        raise refuse("hybrid_layer_pattern", pattern, "the family has patterns of M * - E")
    return {"layers_block_type": [names[symbol] for symbol in pattern if symbol in SYMBOLS]}


def require_shared_expert(settings: Table) -> None:
    """Raise UserError if layers of experts have no shared expert."""
    name = "moe_shared_expert_intermediate_size"
    if settings[name] is None:
        raise refuse(name, None, "the family has a shared expert")


class OfExperts(Rule):
    """Rules that apply only to patterns with experts."""

    def __init__(self, *rules: Rule) -> None:
        keys, names = ([name for rule in rules for name in getattr(rule, kind)] for kind in ("hf_keys", "settings"))
        super().__init__(keys, names)
        self.rules = rules

    def load(self, config: Table) -> dict[str, object]:
        if "E" not in str(_load_pattern(config)["hybrid_layer_pattern"]):
            return {}
        return {name: value for rule in self.rules for name, value in rule.load(config).items()}

    def save(self, settings: Table) -> dict[str, object]:
        if settings["num_moe_experts"] is None:
            return {}
        require_shared_expert(settings)
        return {name: value for rule in self.rules for name, value in rule.save(settings).items()}


def _rows(config: TransformerConfig) -> tuple[int, ...]:
    """Return the rows of z, x, B, C and dt of a group of heads."""
    heads = (config.mamba_num_heads or 0) // config.mamba_num_groups
    inner, state = heads * config.mamba_head_dim, config.mamba_state_dim
    return inner, inner, state, state, heads


def mixer_names(mixer: str) -> Weights:
    """Return the layouts of a Mamba-2 mixer's tensors, whose HF names begin with ``mixer``."""
    local = "decoder.layers.*.mixer"
    return {
        f"{local}.in_proj": BlockParts([f"{mixer}.in_proj"], [range(5)], _rows),
        f"{local}.conv1d": BlockParts([f"{mixer}.conv1d"], [range(3)], lambda config: _rows(config)[1:4]),
        **{f"{local}.{name}": f"{mixer}.{name}" for name in ("dt_bias", "A_log", "D", "norm", "out_proj")},
    }


def names(layer: str) -> Weights:
    """Return the layouts of a layer's tensors, whose HF names begin with ``layer``."""
    local, mixer = "decoder.layers.*", f"{layer}.mixer"
    folders = {"": "", "experts.": "experts.*.", "shared_experts.": "shared_experts."}
    return {
        **{f"{local}.{norm}": f"{layer}.norm" for norm in ("norm", "input_layernorm", "pre_mlp_layernorm")},
        **mixer_names(mixer),
        f"{local}.self_attention.linear_qkv": QueryKeyValue(*(f"{mixer}.{letter}_proj" for letter in "qkv")),
        f"{local}.self_attention.linear_proj": f"{mixer}.o_proj",
        **{
            f"{local}.mlp.{folder}linear_fc{number}": f"{mixer}.{hf_folder}{name}_proj"
            for folder, hf_folder in folders.items()
            for number, name in ((1, "up"), (2, "down"))
        },
        f"{local}.mlp.router": f"{mixer}.gate",
        f"{local}.mlp.router.expert_bias": f"{mixer}.gate.e_score_correction_bias",
    }


NEMOTRON_H = Family(
    "nemotron_h", "NemotronHForCausalLM", models="Nemotron-H, Nemotron 3 Nano",
    limits=("latent experts", "multi-token prediction is left out",
            "time steps are not limited to time_step_min, as in Megatron-LM"),
    config=(
        *same(hidden_size="hidden_size", num_attention_heads="num_attention_heads", vocab_size="vocab_size",
              max_position_embeddings="max_position_embeddings", ffn_hidden_size="intermediate_size",
              mamba_num_heads="mamba_num_heads"),
        Computed(("layers_block_type", "hybrid_override_pattern", "layer_types"),
                 ("hybrid_layer_pattern", "num_layers"), _load_pattern, _save_pattern),
        Same("norm_epsilon", "layer_norm_epsilon", "norm_eps", default=1e-5), groups(8), *llama.DROPOUT,
        *llama.UNTIED, llama.NO_BIASES, Same("kv_channels", "head_dim", "attention_head_dim", default=128),
        Same("mamba_head_dim", "mamba_head_dim", default=64), Same("mamba_num_groups", "n_groups", default=8),
        Same("mamba_state_dim", "ssm_state_size", default=128),
        Fixed({"normalization": "RMSNorm", "squared_relu": True, "position_embedding_type": "none"}),
        FixedKeys({"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "conv_kernel": 4, "use_conv_bias": True,
                   "use_bias": False, "mlp_bias": False, "attention_bias": False, "mamba_proj_bias": False,
                   "residual_in_fp32": False, "n_shared_experts": 1}),
        OfExperts(
            *same(num_moe_experts="n_routed_experts", moe_router_topk="num_experts_per_tok",
                  moe_ffn_hidden_size="moe_intermediate_size",
                  moe_shared_expert_intermediate_size="moe_shared_expert_intermediate_size"),
            RoutedScale(1.0), expert_groups(2), NORMALIZED_IF_SEVERAL,
            Fixed({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        ),
        # transformers limits time steps from below by it; these models are trained without a limit
        Computed(("time_step_min",), (), lambda config: {}, lambda settings: {"time_step_min": 1e-9}),
        Ignored(("num_hidden_layers", "hidden_dropout", "expand", "chunk_size", "mamba_ssm_cache_dtype",
                 "num_logits_to_keep", "use_mamba_kernels", "rescale_prenorm_residual", "time_step_floor",
                 "time_step_limit", "time_step_max", "moe_shared_expert_overlap",
                 "mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_nextn_predict_layers",
                 "output_router_logits", "sliding_window")),
    ),
    weights={
        **names("backbone.layers.*"), "embedding.word_embeddings": "backbone.embeddings",
        "decoder.final_layernorm": "backbone.norm_f", "output_layer": "lm_head",
    },
    base="backbone.",
    modules={"backbone.": "model."},
    unused=(r"mtp\..*",),
)  # fmt: skip
