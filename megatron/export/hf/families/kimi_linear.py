"""Kimi Linear: Kimi delta attention, latent attention without positions in every fourth layer, experts next to shared
ones. Keys and tensors have the names of the published files; ``transformers`` writes other keys for the layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.core.config.transformer_config import TransformerConfig
from megatron.export.hf.attention_settings import FULL
from megatron.export.hf.families import llama, mixtures
from megatron.export.hf.families.gated_delta import LAYER_KINDS, LINEAR
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import BlockParts, Halves, TensorLayout, Weights
from megatron.export.hf.settings import Computed, Fixed, FixedKeys, Ignored, Rule, Same, Table, get, refuse, same

SIZES = {"head_dim": ("linear_head_dim", 128), "num_heads": ("linear_num_heads", 32),
         "short_conv_kernel_size": ("linear_conv_kernel_dim", 4)}  # fmt: skip
"""Key of ``linear_attn_config`` -> key and default of ``transformers``."""
KEYS = {
    "num_experts_per_tok": ("num_experts_per_token", 8), "n_routed_experts": ("num_experts", 256),
    "n_group": ("num_expert_group", 1), "topk_group": ("topk_group", 1), "norm_topk_prob": ("moe_renormalize", True),
    "n_shared_experts": ("num_shared_experts", 1), "scoring_func": ("moe_router_activation_func", "sigmoid"),
    "routed_scaling_factor": ("routed_scaling_factor", 2.446),
}  # fmt: skip
"""Key of DeepSeek-V3 -> key and default here."""


class Renamed(Rule):
    """``rules`` of DeepSeek-V3 with the keys of :data:`KEYS`."""

    def __init__(self, *rules: Rule) -> None:
        keys = [KEYS.get(key, (key,))[0] for rule in rules for key in rule.hf_keys]
        super().__init__(keys, [name for rule in rules for name in rule.settings])
        self.rules = rules

    def load(self, config: Table) -> dict[str, object]:
        table = {**config, **{key: get(config, (name,), default) for key, (name, default) in KEYS.items()}}
        return {name: value for rule in self.rules for name, value in rule.load(table).items()}

    def save(self, settings: Table) -> dict[str, object]:
        config = {key: value for rule in self.rules for key, value in rule.save(settings).items()}
        return {KEYS.get(key, (key,))[0]: value for key, value in config.items()}


def _load_linear(config: Table) -> dict[str, object]:
    table, count = get(config, ("linear_attn_config",), {}), config["num_hidden_layers"]
    if not isinstance(table, dict) or table.keys() - {*SIZES, "kda_layers", "full_attn_layers"}:
        raise refuse("linear_attn_config", table, f"but must be a table of {', '.join(SIZES)} and lists of layers")
    kinds = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)]
    if "kda_layers" in table:
        full = table.get("full_attn_layers", ())
        kinds = [FULL if layer in full else LINEAR for layer in range(1, count + 1)]
        if sorted([*full, *table["kda_layers"]]) != [*range(1, count + 1)]:
            raise refuse("linear_attn_config", table, f"but must name the kind of each of {count} layers")
    head, number, taps = (get(table, (key,), get(config, (other,), size)) for key, (other, size) in SIZES.items())
    return {
        **LAYER_KINDS.load({"num_hidden_layers": count, "layer_types": get(config, ("layer_types",), kinds)}),
        "linear_key_head_dim": head, "linear_value_head_dim": head, "linear_conv_kernel_dim": taps,
        "linear_num_key_heads": number, "linear_num_value_heads": number,
    }  # fmt: skip


def _save_linear(settings: Table) -> dict[str, object]:
    head = settings["linear_key_head_dim"]
    if settings["linear_value_head_dim"] != head:
        raise refuse("linear_value_head_dim", settings["linear_value_head_dim"], f"the family has that of keys, {head}")
    kinds = LAYER_KINDS.save(settings)["layer_types"]
    assert isinstance(kinds, list)
    return {"linear_attn_config": {
        "full_attn_layers": [number for number, kind in enumerate(kinds, 1) if kind == FULL],
        "kda_layers": [number for number, kind in enumerate(kinds, 1) if kind == LINEAR], "head_dim": head,
        "num_heads": settings["linear_num_key_heads"], "short_conv_kernel_size": settings["linear_conv_kernel_dim"],
    }}  # fmt: skip


LINEAR_ATTENTION = Computed(
    ("linear_attn_config", "layer_types", *(key for key, _ in SIZES.values())),
    ("linear_attention_freq", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
     "linear_num_value_heads", "linear_conv_kernel_dim"),
    _load_linear, _save_linear,
)  # fmt: skip
_FIRST_DENSE = mixtures.first_dense(1)


def _load_experts(config: Table) -> dict[str, object]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return _FIRST_DENSE.load(config)
    if not isinstance(kinds, list) or not {*kinds} <= {"dense", "sparse"}:
        raise refuse("mlp_layer_types", kinds, "but must be a list of dense and sparse")
    return {"moe_layer_freq": 1 if "dense" not in kinds else [int(kind == "sparse") for kind in kinds]}


class PerHead(TensorLayout):
    """A number per head, [1, 1, heads, 1] in files."""

    def shape(self, views: Sequence[Tensor], ndim: int) -> tuple[int, ...]:
        return 1, 1, views[0].numel(), 1


def rows(config: TransformerConfig) -> tuple[int, ...]:
    """Return the rows of query, key, value and b of a head."""
    return config.linear_key_head_dim, config.linear_key_head_dim, config.linear_value_head_dim, 1


def delta_weights(names: str, gate: str) -> Weights:
    """Return the layouts but convolutions; HF names begin with ``names``, for decays with ``gate``."""
    local = "decoder.layers.*.self_attention"
    projections = [f"{names}.{letter}_proj" for letter in "qkvb"]
    same_names = ("f_a_proj", "f_b_proj", "dt_bias"), ("g_a_proj", "g_b_proj")
    return {
        f"{local}.in_proj": BlockParts(projections, [(0,), (1,), (2,), (3,)], rows),
        f"{local}.A_log": PerHead(f"{gate}.A_log"),
        **{f"{local}.{name}": f"{prefix}.{name}" for prefix, group in zip((gate, names), same_names) for name in group},
        f"{local}.norm": f"{names}.o_norm", f"{local}.out_proj": f"{names}.o_proj",
    }  # fmt: skip


_LAYER = "model.layers.*"
_MIXER, _EXPERTS = f"{_LAYER}.self_attn", f"{_LAYER}.block_sparse_moe"
KIMI_LINEAR = Family(
    "kimi_linear", "KimiLinearForCausalLM", models="Kimi-Linear-48B-A3B",
    config=(
        *llama.SIZES[:-1], Same("max_position_embeddings", "model_max_length"), llama.FFN, *llama.rms_norm(1e-5),
        *llama.DROPOUT, *llama.UNTIED, llama.SILU_GATED, llama.NO_BIASES, LINEAR_ATTENTION,
        *same(kv_lora_rank="kv_lora_rank", qk_head_dim="qk_nope_head_dim", qk_pos_emb_head_dim="qk_rope_head_dim",
              v_head_dim="v_head_dim", moe_ffn_hidden_size="moe_intermediate_size"),
        Same("q_lora_rank", "q_lora_rank", default=None),
        Same("num_attention_heads", "num_key_value_heads", default=lambda config: config["num_attention_heads"]),
        Fixed({"experimental_attention_variant": "kda", "multi_latent_attention": True, "qk_layernorm": True,
               "latent_norm_epsilon": 1e-6, "position_embedding_type": "none", "rope_type": "none",
               "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
               "moe_router_pre_softmax": False}),
        Renamed(
            *same(num_moe_experts="n_routed_experts", moe_router_topk="num_experts_per_tok"), mixtures.RoutedScale(),
            mixtures.expert_groups(2), mixtures.NORMALIZED_IF_SEVERAL, mixtures.SHARED_EXPERTS,
            FixedKeys({"scoring_func": "sigmoid"}),
        ),
        Computed(("mlp_layer_types", "first_k_dense_replace"), ("moe_layer_freq",), _load_experts, _FIRST_DENSE.save),
        FixedKeys({"mla_use_nope": True, "moe_layer_freq": 1, "use_grouped_topk": True, "attention_bias": False}),
        FixedKeys({"topk_method": "noaux_tc"}, written=False),
        Ignored(("rope_theta", "rope_scaling", "rope_parameters", "head_dim", "qk_head_dim", "output_router_logits",
                 "num_nextn_predict_layers")),
    ),
    weights={
        **llama.WEIGHTS, **mixtures.LATENT_WEIGHTS, **mixtures.shared_expert(f"{_EXPERTS}.shared_experts"),
        **delta_weights(_MIXER, _MIXER),
        "decoder.layers.*.self_attention.conv1d": BlockParts(
            [f"{_MIXER}.{letter}_conv1d" for letter in "qkv"], [(0,), (1,), (2,)], lambda config: rows(config)[:3]),
        "decoder.layers.*.mlp.router": f"{_EXPERTS}.gate",
        "decoder.layers.*.mlp.router.expert_bias": f"{_EXPERTS}.gate.e_score_correction_bias",
        "decoder.layers.*.mlp.experts.linear_fc1": Halves(f"{_EXPERTS}.experts.*.w1", f"{_EXPERTS}.experts.*.w3"),
        "decoder.layers.*.mlp.experts.linear_fc2": f"{_EXPERTS}.experts.*.w2",
    },
    modules={".self_attn.f_": ".self_attn.forget_gate.f_", ".block_sparse_moe.": ".mlp."},
    # transformers writes dense layers under the name of experts
    aliases={f".block_sparse_moe.{name}_proj.weight": f".mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
)  # fmt: skip
