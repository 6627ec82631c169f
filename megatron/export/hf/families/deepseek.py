"""DeepSeek-V2 (``deepseek_v2``) and Kimi K2 (``kimi_k2``): latent attention and experts next to shared ones."""

from __future__ import annotations

from dataclasses import replace

from megatron.export.hf.families import llama, mixtures
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Computed, Fixed, FixedKeys, Ignored, Table, get, limit, refuse, same

GREEDY, LIMITED = "greedy", "group_limited_greedy"
GROUPS = mixtures.expert_groups(1)


def _load_choice(config: Table) -> dict[str, object]:
    method = get(config, ("topk_method",), GREEDY)
    if method not in (GREEDY, LIMITED):
        raise refuse("topk_method", method, f"which cannot be represented; known: {[GREEDY, LIMITED]}")
    return GROUPS.load(config) if method == LIMITED else dict.fromkeys(GROUPS.settings)


def _save_choice(settings: Table) -> dict[str, object]:
    limited = settings["moe_router_num_groups"] is not None
    return {**GROUPS.save(settings), "topk_method": LIMITED if limited else GREEDY}


CHOICE = Computed(
    ("topk_method", *GROUPS.hf_keys),
    GROUPS.settings,
    _load_choice,
    _save_choice,
    (limit("topk_method", [GREEDY, LIMITED]),),
)
"""Choice among all experts, or within the groups whose best experts have the highest scores."""
DEEPSEEK_V2 = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", models="DeepSeek-V2, Coder-V2, V2-Lite, V2.5",
    config=(
        *llama.SIZES, llama.DIVISIBLE, llama.FFN, *llama.DROPOUT, llama.tied(False), llama.SILU_GATED, llama.NO_BIASES,
        mixtures.first_dense(0), *mixtures.LATENT_ATTENTION, mixtures.SHARED_EXPERTS, CHOICE,
        *same(num_moe_experts="n_routed_experts", moe_router_topk="num_experts_per_tok",
              moe_ffn_hidden_size="moe_intermediate_size"), mixtures.RoutedScale(),
        Fixed({"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}),
        FixedKeys({"norm_topk_prob": False, "scoring_func": "softmax", "mlp_bias": False, "moe_layer_freq": 1}),
        Ignored(("output_router_logits", "ep_size", "aux_loss_alpha", "seq_aux")),
    ),
    weights={
        **llama.WEIGHTS, **llama.EXPERTS, **mixtures.shared_expert("model.layers.*.mlp.shared_experts"),
        **mixtures.LATENT_WEIGHTS,
    },
    unused=(r".*\.rotary_emb\.inv_freq",),
)  # fmt: skip
"""Scores by softmax before the choice, without a bias and without normalization."""

KIMI_K2 = replace(mixtures.DEEPSEEK_V3, model_type="kimi_k2", models="Kimi K2")
"""DeepSeek-V3 under another name, which ``transformers`` knows only through the code files of a published folder."""
