"""Mixtures of experts: Mixtral, Qwen, DeepSeek, GPT-OSS."""

from __future__ import annotations

from megatron.core.config.errors import UserError
from megatron.export.hf.attention_settings import Rope, Window, groups
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import Halves, Interleaved, Weights
from megatron.export.hf.settings import (
    REQUIRED,
    Choice,
    Computed,
    Fixed,
    FixedKeys,
    Ignored,
    Rule,
    Same,
    Table,
    get,
    refuse,
    same,
)


def _pattern(has: list[bool]) -> int | list[int]:
    return 1 if all(has) else [int(has_experts) for has_experts in has]


def _layers_with_experts(settings: Table) -> list[bool]:
    pattern, count = settings["moe_layer_freq"], settings["num_layers"]
    return [layer % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer]) for layer in range(count)]


def _load_sparse_step(config: Table) -> dict[str, object]:
    step, dense = get(config, ("decoder_sparse_step",), 1), get(config, ("mlp_only_layers",), [])
    count = config["num_hidden_layers"]
    return {"moe_layer_freq": _pattern([(layer + 1) % step == 0 and layer not in dense for layer in range(count)])}


def _save_sparse_step(settings: Table) -> dict[str, object]:
    dense = [layer for layer, has in enumerate(_layers_with_experts(settings)) if not has]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERT_LAYERS = Computed(
    ("decoder_sparse_step", "mlp_only_layers"), ("moe_layer_freq",), _load_sparse_step, _save_sparse_step
)
"""Qwen: every n-th layer has experts, except listed layers."""


def first_dense(default: int) -> Computed:
    """DeepSeek: all layers but the first ones have experts; ``default``: dense layers if config.json has no number."""

    def load(config: Table) -> dict[str, object]:
        first, count = get(config, ("first_k_dense_replace",), default), config["num_hidden_layers"]
        return {"moe_layer_freq": _pattern([layer >= first for layer in range(count)])}

    return Computed(("first_k_dense_replace",), ("moe_layer_freq",), load, _save_first_dense)


def _save_first_dense(settings: Table) -> dict[str, object]:
    has = _layers_with_experts(settings)
    first = has.index(True) if any(has) else len(has)
    if not all(has[first:]):
        raise refuse("moe_layer_freq", settings["moe_layer_freq"], "only the first layers can be dense")
    return {"first_k_dense_replace": first}


def shared_expert(hf_name: str) -> Weights:
    """Return the layouts of the shared expert, which processes every token."""
    local = "decoder.layers.*.mlp.shared_experts.linear_fc"
    return {f"{local}1": Halves(f"{hf_name}.gate_proj", f"{hf_name}.up_proj"), f"{local}2": f"{hf_name}.down_proj"}


MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", models="Mixtral 8x7B, 8x22B",
    config=(
        *llama.common(1e-5), llama.HEAD_SIZE, groups(8), llama.NO_BIASES, Rope(1e6), Window(),
        Same("num_moe_experts", "num_local_experts", "num_experts", default=8),
        Same("moe_router_topk", "num_experts_per_tok", default=2),
        Same("moe_ffn_hidden_size", "intermediate_size"), Same("ffn_hidden_size", "intermediate_size", written=False),
        Fixed({"moe_layer_freq": 1}),
        Ignored(("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION,
        "decoder.layers.*.mlp.router": "model.layers.*.block_sparse_moe.gate",
        "decoder.layers.*.mlp.experts.linear_fc1": Halves(
            "model.layers.*.block_sparse_moe.experts.*.w1", "model.layers.*.block_sparse_moe.experts.*.w3"
        ),
        "decoder.layers.*.mlp.experts.linear_fc2": "model.layers.*.block_sparse_moe.experts.*.w2",
    },
)  # fmt: skip
"""Mistral whose feed-forward networks are mixtures of experts."""

MIXTURE = (
    EXPERT_LAYERS,
    Choice("norm_topk_prob", {value: {"moe_router_pre_softmax": not value} for value in (False, True)}, default=False),
    Same("moe_ffn_hidden_size", "moe_intermediate_size"),
    Ignored(("router_aux_loss_coef", "output_router_logits")),
)
"""Settings that all of Qwen's mixtures share."""

QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", models="Qwen3-30B-A3B, 235B-A22B",
    config=(
        *llama.common(), llama.FFN, llama.HEAD_SIZE, groups(4), Rope(), llama.NO_BIASES, *MIXTURE,
        Window(4096, switch=True), Fixed({"qk_layernorm": True}), FixedKeys({"attention_bias": False}),
        Ignored(("max_window_layers",)),
        Same("num_moe_experts", "num_experts", "num_local_experts", default=128),
        Same("moe_router_topk", "num_experts_per_tok", default=8),
    ),
    weights={**llama.WEIGHTS, **llama.EXPERTS},
)  # fmt: skip
"""Qwen3 with mixtures of experts in all layers, or in some."""


QWEN2_MOE = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM", models="Qwen1.5-MoE, Qwen2-57B-A14B",
    config=(
        *llama.common(), llama.FFN, llama.HEAD_SIZE, groups(16), Rope(), *MIXTURE,
        Window(4096, switch=True, first="max_window_layers"),
        Fixed({"add_bias_linear": False, "moe_shared_expert_gate": True}),
        Choice("qkv_bias", {value: {"add_qkv_bias": value} for value in (True, False)}, default=True),
        Same("num_moe_experts", "num_experts", default=60),
        Same("moe_router_topk", "num_experts_per_tok", default=4),
        Same("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=5632),
    ),
    weights={
        **llama.WEIGHTS, **llama.EXPERTS,
        **shared_expert("model.layers.*.mlp.shared_expert"),
        "decoder.layers.*.mlp.shared_experts.gate_weight": "model.layers.*.mlp.shared_expert_gate.weight",
    },
)  # fmt: skip
"""Also Qwen1.5-MoE: mixtures of experts plus a gated shared expert."""

LATENTS = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
}


def _load_shared_width(config: Table) -> dict[str, object]:
    width = get(config, ("n_shared_experts",)) * get(config, ("moe_intermediate_size",))
    return {"moe_shared_expert_intermediate_size": width or None}


def _save_shared_width(settings: Table) -> dict[str, object]:
    width, of_one = settings["moe_shared_expert_intermediate_size"] or 0, settings["moe_ffn_hidden_size"]
    if width % of_one:
        raise refuse("moe_shared_expert_intermediate_size", width, f"the family supports multiples of {of_one} only")
    return {"n_shared_experts": width // of_one}


def _load_query_rank(config: Table) -> dict[str, object]:
    if "q_lora_rank" not in config:  # null says that there is no latent
        raise UserError("config.json: q_lora_rank is missing")
    return {"q_lora_rank": config["q_lora_rank"]}


def expert_groups(scored: int) -> Computed:
    """Rule of a choice limited to some groups of experts; a group's score is the sum of its ``scored`` best scores.

    ``moe_router_group_score_topk`` is None where its default has the same meaning, so that a model of Megatron-LM's
    has the same settings. A single group does not limit the choice, for any score."""
    groups, chosen, score = names = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk")

    def load(config: Table) -> dict[str, object]:
        count, limit = get(config, ("n_group",)), get(config, ("topk_group",))
        by_default = count == 1 or get(config, ("num_experts_per_tok",)) == scored * limit
        return {groups: count, chosen: limit, score: None if by_default else scored}

    def save(settings: Table) -> dict[str, object]:
        if settings[groups] is None:
            return {"n_group": 1, "topk_group": 1}
        num_scores = settings[score] or settings["moe_router_topk"] // settings[chosen]
        if settings[groups] > 1 and num_scores != scored:
            raise refuse(score, num_scores, f"the family adds up the {scored} best scores of a group")
        return {"n_group": settings[groups], "topk_group": settings[chosen]}

    return Computed(("n_group", "topk_group"), names, load, save)


def _load_normalized(config: Table) -> dict[str, object]:
    count, normalized = get(config, ("num_experts_per_tok",)), get(config, ("norm_topk_prob",), True)
    if normalized != (count != 1):
        raise refuse("norm_topk_prob", normalized, f"but must be {count != 1} for num_experts_per_tok {count}")
    return {}


NORMALIZED_IF_SEVERAL = Computed(
    ("norm_topk_prob",), (), _load_normalized, lambda settings: {"norm_topk_prob": settings["moe_router_topk"] != 1}
)
"""Sigmoid scores are divided by the sum of the chosen ones, here only if several are chosen."""


class RoutedScale(Same):
    """Factor of the router's weights. Without one, 1 is written: ``transformers`` reads no null."""

    def __init__(self, default: object = REQUIRED) -> None:
        super().__init__("moe_router_topk_scaling_factor", "routed_scaling_factor", default=default)

    def save(self, settings: Table) -> dict[str, object]:
        return {self.hf_keys[0]: settings[self.settings[0]] or 1.0}


SHARED_EXPERTS = Computed(
    ("n_shared_experts",), ("moe_shared_expert_intermediate_size",), _load_shared_width, _save_shared_width
)
SIGMOID_ROUTER: tuple[Rule, ...] = (
    *same(num_moe_experts="n_routed_experts", moe_router_topk="num_experts_per_tok",
          moe_ffn_hidden_size="moe_intermediate_size"),
    RoutedScale(), expert_groups(2), NORMALIZED_IF_SEVERAL,
    Fixed({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
          "moe_router_pre_softmax": False}),
    FixedKeys({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
)  # fmt: skip
"""DeepSeek-V3: normalized sigmoid scores, a bias per expert for the choice, groups of experts."""
PREDICTION = Computed(
    ("num_nextn_predict_layers",),
    ("mtp_num_layers",),
    lambda config: {"mtp_num_layers": config.get("num_nextn_predict_layers") or None},
    lambda settings: {"num_nextn_predict_layers": settings["mtp_num_layers"] or 0},
)
"""DeepSeek-V3: layers of multi-token prediction."""
PREDICTION_WEIGHTS: Weights = {
    **{f"mtp.layers.*.{value}": f"model.layers.*.{value}" for value in ("enorm", "hnorm", "eh_proj")},
    "mtp.layers.*.final_layernorm": "model.layers.*.shared_head.norm",
}
PREDICTION_COPIES = {
    "model.layers.*.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.*.shared_head.head.weight": "lm_head.weight",
}
PREDICTION_IF_HELD = {"num_nextn_predict_layers": "model.layers.{num_hidden_layers}.eh_proj.weight"}
PREDICTION_UNUSED = r"model\.layers\.{num_layers}\..*"
EXPERT_BIAS: Weights = {"decoder.layers.*.mlp.router.expert_bias": "model.layers.*.mlp.gate.e_score_correction_bias"}
LATENT_ATTENTION: tuple[Rule, ...] = (
    *same(kv_lora_rank="kv_lora_rank", qk_head_dim="qk_nope_head_dim", qk_pos_emb_head_dim="qk_rope_head_dim",
          v_head_dim="v_head_dim"),
    Computed(("q_lora_rank",), ("q_lora_rank",), _load_query_rank, lambda table: {"q_lora_rank": table["q_lora_rank"]}),
    Same("num_attention_heads", "num_key_value_heads"), Rope(latent=True),
    # the norms of its latents always have this epsilon; the key is ignored
    Fixed({"normalization": "RMSNorm", "norm_epsilon": 1e-6, "multi_latent_attention": True, "qk_layernorm": True}),
    FixedKeys({"rms_norm_eps": 1e-6, "attention_bias": False}),
    Ignored(("head_dim", "qk_head_dim")),
)  # fmt: skip
"""DeepSeek-V2 and V3: queries, keys and values of low rank."""
LATENT_WEIGHTS: Weights = {
    f"decoder.layers.*.self_attention.{local}": f"model.layers.*.self_attn.{hf_name}"
    for local, hf_name in LATENTS.items()
}

DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", models="DeepSeek-V3, R1",
    config=(
        *llama.SIZES, llama.FFN, *llama.DROPOUT, llama.tied(False), llama.SILU_GATED, llama.NO_BIASES,
        first_dense(3), *LATENT_ATTENTION, *SIGMOID_ROUTER, SHARED_EXPERTS, PREDICTION,
        FixedKeys({"rope_interleave": True}), Ignored(("output_router_logits", "ep_size", "aux_loss_alpha", "seq_aux")),
    ),
    weights={
        **llama.WEIGHTS, **llama.EXPERTS, **shared_expert("model.layers.*.mlp.shared_experts"), **LATENT_WEIGHTS,
        **EXPERT_BIAS, **PREDICTION_WEIGHTS,
    },
    repeated=PREDICTION_COPIES,
    counts_if_held=PREDICTION_IF_HELD,
    unused=(PREDICTION_UNUSED, r".*\.rotary_emb\.inv_freq"),
)  # fmt: skip
"""Also R1: latent attention, experts in groups plus a shared one.

Layers of multi-token prediction continue the layer numbers, and hold the embedding and the output layer again.
Files written by ``transformers`` lack them even if their config.json names them."""

GPT_OSS = Family(
    "gpt_oss", "GptOssForCausalLM", models="GPT-OSS",
    config=(
        *llama.SIZES, groups(8), *llama.rms_norm(1e-5), *llama.DROPOUT, llama.tied(False),
        Rope(150000.0, kinds=("linear", "llama3", "yarn")),  # without a type it is YaRN there
        Window(128, every=2), Same("kv_channels", "head_dim", default=64),
        Fixed({"add_bias_linear": True, "quick_geglu": True, "glu_linear_offset": 1.0, "softmax_type": "learnable",
              "moe_layer_freq": 1, "moe_router_pre_softmax": False}),
        Same("activation_func_clamp_value", "swiglu_limit", default=7.0),
        Same("num_moe_experts", "num_local_experts", "num_experts"),
        Same("moe_router_topk", "num_experts_per_tok", "experts_per_token"),
        Same("moe_ffn_hidden_size", "intermediate_size"), Same("ffn_hidden_size", "intermediate_size", written=False),
        FixedKeys({"attention_bias": True, "hidden_act": "silu", "swiglu_alpha": 1.702}),
        Ignored(("router_aux_loss_coef", "output_router_logits", "initial_context_length")),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION,
        "decoder.layers.*.self_attention.core_attention.softmax_offset": "model.layers.*.self_attn.sinks",
        "decoder.layers.*.mlp.router": "model.layers.*.mlp.router",
        **{f"decoder.layers.*.mlp.experts.{local}": Interleaved(f"model.layers.*.mlp.experts.{hf_name}")
           for local, hf_name in (("linear_fc1.weight", "gate_up_proj"), ("linear_fc1.bias", "gate_up_proj_bias"),
                                ("linear_fc2.weight", "down_proj"), ("linear_fc2.bias", "down_proj_bias"))},
    },
)  # fmt: skip
"""Sinks, windows in every other layer, clamped experts with biases."""
