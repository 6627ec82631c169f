"""Qwen3-Next, Qwen3.5: gated delta nets, and gated softmax attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from megatron.core.config.linear_attention import has_linear_attention
from megatron.core.config.transformer_config import TransformerConfig
from megatron.export.hf.attention_settings import FULL, Rope, groups, rope_table
from megatron.export.hf.families import llama
from megatron.export.hf.families.mixtures import EXPERT_LAYERS, shared_expert
from megatron.export.hf.family import Container, Family
from megatron.export.hf.layouts import BlockParts, Stacked, Weights
from megatron.export.hf.settings import Choice, Computed, Fixed, FixedKeys, Ignored, Rule, Same, Table, get, refuse

LINEAR = "linear_attention"
_LOCAL, _HF = "decoder.layers.*.self_attention", "model.layers.*.linear_attn"


def _load_kinds(config: Table) -> dict[str, object]:
    """n if all layers but every n-th are linear, else a list with 1 for linear layers."""
    count, interval = config["num_hidden_layers"], get(config, ("full_attention_interval",), 4)
    usual = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    kinds = get(config, ("layer_types",), usual)
    if not isinstance(kinds, list) or len(kinds) != count or not {*kinds} <= {LINEAR, FULL}:
        raise refuse("layer_types", kinds, f"but must name {LINEAR} or {FULL} for each of {count} layers")
    pattern = [int(kind == LINEAR) for kind in kinds]
    every = pattern.index(0) + 1 if 0 in pattern else count + 1
    is_regular = pattern == [int(number % every != 0) for number in range(1, count + 1)]
    return {"linear_attention_freq": every if is_regular else pattern}


def _save_kinds(settings: Table) -> dict[str, object]:
    config = SimpleNamespace(**settings)
    layers = range(1, settings["num_layers"] + 1)
    return {"layer_types": [LINEAR if has_linear_attention(config, number) else FULL for number in layers]}  # type: ignore[arg-type]


LAYER_KINDS = Computed(("layer_types", "full_attention_interval"), ("linear_attention_freq",), _load_kinds, _save_kinds)


class TextRope(Rope):
    """Positions of text in a model of images: their three axes, and so their sections, are equal."""

    def load(self, config: Table) -> dict[str, object]:
        table = rope_table(config)
        if not isinstance(table, dict):
            return super().load(config)
        plain = {name: value for name, value in table.items() if name not in ("mrope_section", "mrope_interleaved")}
        return super().load({**config, "rope_parameters": plain, "rope_scaling": None})


def rows(config: TransformerConfig) -> tuple[int, ...]:
    """Return the rows of query, key, values, gates, b and a of a key head."""
    per_key = config.linear_num_value_heads // config.linear_num_key_heads
    key, values = config.linear_key_head_dim, per_key * config.linear_value_head_dim
    return key, key, values, values, per_key, per_key


def _mixer(names: Sequence[str], parts: Sequence[Sequence[int]], *, interleaved: bool = False) -> Weights:
    projections = [f"{_HF}.{name}" for name in names]
    return {
        f"{_LOCAL}.in_proj": BlockParts(projections, parts, rows, interleaved=interleaved),
        f"{_LOCAL}.conv1d": BlockParts([f"{_HF}.conv1d"], [(0, 1, 2)], lambda config: rows(config)[:3]),
        **{f"{_LOCAL}.{name}": f"{_HF}.{name}" for name in ("dt_bias", "A_log", "norm", "out_proj")},
    }


COMMON: tuple[Rule, ...] = (
    *llama.SIZES, *llama.rms_norm(), *llama.DROPOUT, llama.tied(False), llama.SILU_GATED, llama.NO_BIASES, LAYER_KINDS,
    Fixed({"experimental_attention_variant": "gated_delta_net", "attention_output_gate": True, "qk_layernorm": True,
          "apply_layernorm_1p": True}),
    *(Same(name, name, default=default) for name, default in (
        ("linear_conv_kernel_dim", 4), ("linear_key_head_dim", 128), ("linear_value_head_dim", 128),
        ("linear_num_key_heads", 16), ("linear_num_value_heads", 32))),
    Same("kv_channels", "head_dim", default=256), FixedKeys({"attention_bias": False}),
    FixedKeys({"attn_output_gate": True}, written=False), Ignored(("mamba_ssm_dtype",)),
)  # fmt: skip
"""Settings that these families share."""
MIXTURE: tuple[Rule, ...] = (
    Choice("norm_topk_prob", {value: {"moe_router_pre_softmax": not value} for value in (False, True)}, default=True),
    Same("moe_ffn_hidden_size", "moe_intermediate_size"), Fixed({"moe_shared_expert_gate": True}),
    Same("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=512),
    Ignored(("router_aux_loss_coef", "output_router_logits")),
)  # fmt: skip
EXPERTS: Weights = {
    **llama.EXPERTS,
    **shared_expert("model.layers.*.mlp.shared_expert"),
    "decoder.layers.*.mlp.shared_experts.gate_weight": "model.layers.*.mlp.shared_expert_gate.weight",
}
STACKED = {
    "decoder.layers.*.mlp.experts.linear_fc1.weight": Stacked("model.layers.*.mlp.experts.gate_up_proj"),
    "decoder.layers.*.mlp.experts.linear_fc2.weight": Stacked("model.layers.*.mlp.experts.down_proj"),
}
"""Files on the hub have all experts of a layer in one tensor."""
BASE, TOWER = "model.language_model.", "model.visual."
UNUSED = Ignored(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"))
"""Keys of tensors that are left out."""
SEPARATE = _mixer(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), [(0, 1, 2), (3,), (4,), (5,)])

QWEN3_NEXT = Family(
    "qwen3_next", "Qwen3NextForCausalLM", models="Qwen3-Next-80B-A3B",
    limits=("multi-token prediction is left out",),
    config=(
        *COMMON, llama.FFN, groups(2), Rope(share=0.25), *MIXTURE, EXPERT_LAYERS,
        Same("num_moe_experts", "num_experts", default=512),
        Same("moe_router_topk", "num_experts_per_tok", default=10),
    ),
    weights={
        **llama.WEIGHTS, **EXPERTS,
        **_mixer(("in_proj_qkvz", "in_proj_ba"), [(0, 1, 2, 3), (4, 5)], interleaved=True),
    },
    unused=(r"mtp\..*",),
)  # fmt: skip
"""Projections interleaved per key head; mixtures of experts with a gated shared expert."""

QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", models="Qwen3.5 and 3.6 with experts",
    container=Container("qwen3_5_moe", BASE, TOWER), alternatives=STACKED,
    limits=("multi-token prediction and the vision tower are left out",),
    config=(
        *COMMON, groups(2), TextRope(share=0.25), *MIXTURE[1:], UNUSED,
        Fixed({"moe_layer_freq": 1, "moe_router_pre_softmax": False}),
        Same("num_moe_experts", "num_experts", default=256),
        Same("moe_router_topk", "num_experts_per_tok", default=8),
        Same("ffn_hidden_size", "moe_intermediate_size", written=False),
    ),
    weights={**llama.WEIGHTS, **EXPERTS, **SEPARATE},
    unused=(r"mtp\..*",),
)  # fmt: skip
"""Separate projections; mixtures of experts with a gated shared expert in all layers."""

QWEN3_5 = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", models="Qwen3.5, 3.6 and 3.8",
    container=Container("qwen3_5", BASE, TOWER),
    limits=("multi-token prediction and the vision tower are left out",),
    config=(*COMMON, llama.FFN, groups(4), TextRope(share=0.25), UNUSED),
    weights={**llama.WEIGHTS, **SEPARATE},
    unused=(r"mtp\..*",),
)  # fmt: skip
"""Separate projections."""
