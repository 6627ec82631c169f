"""DeepSeek-V3 and R1 (``DeepseekV3ForCausalLM``): latent attention, experts in groups beside a shared one.

Layers of multi-token prediction are numbered on behind the last one, and hold the embedding and the output layer again.
Files that ``transformers`` wrote lack them, whatever their config.json says.
"""

from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.export.hf.attention_settings import Rope
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layer_settings import FIRST_DENSE
from megatron.core.export.hf.layouts import Halves
from megatron.core.export.hf.settings import Computed, Ignored, Ours, Same, Table, Theirs, get, same

SHARED = "model.layers.*.mlp.shared_experts"
LATENTS = {
    "linear_q_proj": "q_proj", "linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj", "linear_kv_down_proj": "kv_a_proj_with_mqa", "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
}  # fmt: skip


def _shared_width(config: Table) -> dict[str, Any]:
    width = get(config, ("n_shared_experts",)) * get(config, ("moe_intermediate_size",))
    return {"moe_shared_expert_intermediate_size": width or None}


def _query_rank(config: Table) -> dict[str, Any]:
    if "q_lora_rank" not in config:  # null says that there is no latent
        raise UserError("config.json: q_lora_rank is missing")
    return {"q_lora_rank": config["q_lora_rank"]}


FAMILY = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM",
    config=(
        *llama.SIZES, llama.FFN, *llama.DROPOUT, llama.tied(False), llama.SILU_GATED, llama.NO_BIASES,
        FIRST_DENSE, Rope(latent=True),
        # the norms of its latents have this epsilon whatever the key says
        Ours({"normalization": "RMSNorm", "norm_epsilon": 1e-6, "multi_latent_attention": True, "qk_layernorm": True,
              "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
              "moe_router_pre_softmax": False}),
        *same(kv_lora_rank="kv_lora_rank", qk_head_dim="qk_nope_head_dim", qk_pos_emb_head_dim="qk_rope_head_dim",
              v_head_dim="v_head_dim", num_moe_experts="n_routed_experts", moe_router_topk="num_experts_per_tok",
              moe_ffn_hidden_size="moe_intermediate_size", moe_router_topk_scaling_factor="routed_scaling_factor",
              moe_router_num_groups="n_group", moe_router_group_topk="topk_group"),
        Computed(("q_lora_rank",), ("q_lora_rank",), _query_rank, lambda ours: {"q_lora_rank": ours["q_lora_rank"]}),
        Same("num_attention_heads", "num_key_value_heads"),
        Computed(
            ("n_shared_experts",), ("moe_shared_expert_intermediate_size",), _shared_width,
            lambda ours: {"n_shared_experts":
                          (ours["moe_shared_expert_intermediate_size"] or 0) // ours["moe_ffn_hidden_size"]},
        ),
        Theirs({"rms_norm_eps": 1e-6, "attention_bias": False, "norm_topk_prob": True, "rope_interleave": True,
                "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
        Computed(
            ("num_nextn_predict_layers",), ("mtp_num_layers",),
            lambda config: {"mtp_num_layers": config.get("num_nextn_predict_layers") or None},
            lambda ours: {"num_nextn_predict_layers": ours["mtp_num_layers"] or 0},
        ),
        Ignored(("head_dim", "qk_head_dim", "output_router_logits", "ep_size", "aux_loss_alpha", "seq_aux")),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION, **llama.FEED_FORWARD, **llama.EXPERTS,
        **{f"decoder.layers.*.self_attention.{ours}": f"model.layers.*.self_attn.{theirs}"
           for ours, theirs in LATENTS.items()},
        "decoder.layers.*.mlp.router.expert_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
        "decoder.layers.*.mlp.shared_experts.linear_fc1": Halves(f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
        "decoder.layers.*.mlp.shared_experts.linear_fc2": f"{SHARED}.down_proj",
        **{f"mtp.layers.*.{each}": f"model.layers.*.{each}" for each in ("enorm", "hnorm", "eh_proj")},
        "mtp.layers.*.final_layernorm": "model.layers.*.shared_head.norm",
    },
    repeated={"model.layers.*.embed_tokens.weight": "model.embed_tokens.weight",
              "model.layers.*.shared_head.head.weight": "lm_head.weight"},
    counts_if_held={"num_nextn_predict_layers": "model.layers.{num_hidden_layers}.eh_proj.weight"},
    unused=(r"model\.layers\.{num_layers}\..*", r".*\.rotary_emb\.inv_freq"),
)  # fmt: skip
