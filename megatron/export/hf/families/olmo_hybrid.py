"""OLMo-Hybrid: gated delta nets with norms before their mixers, softmax attention with norms after them in every fourth
layer, with rotary positions or without."""

from __future__ import annotations

from megatron.export.hf.attention_settings import RopeTable, derived_head_size, groups
from megatron.export.hf.families import llama
from megatron.export.hf.families.gated_delta import LAYER_KINDS, rows
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import BlockParts, Weights
from megatron.export.hf.settings import Choice, Fixed, FixedKeys, Ignored, Same, Table


class OptionalRope(RopeTable):
    """Rotary positions, or none if the base is null."""

    def load(self, config: Table) -> dict[str, object]:
        table = config.get("rope_parameters")
        table = table if isinstance(table, dict) and self.base_key in table else config
        if table.get(self.base_key, self.base) is None:
            return {"position_embedding_type": "none"}
        return super().load(config)

    def save(self, settings: Table) -> dict[str, object]:
        if settings["position_embedding_type"] == "none":
            return {"rope_parameters": {self.base_key: None}}
        return super().save(settings)


def mixer(convolutions: BlockParts) -> Weights:
    """Return the layouts of gated delta nets with six projections."""
    local, names = "decoder.layers.*.self_attention", "model.layers.*.linear_attn"
    same = {"dt_bias": "dt_bias", "A_log": "A_log", "norm": "o_norm", "out_proj": "o_proj"}
    projections = [f"{names}.{letter}_proj" for letter in "qkvgba"]
    return {
        f"{local}.in_proj": BlockParts(projections, [(index,) for index in range(6)], rows),
        f"{local}.conv1d": convolutions,
        **{f"{local}.{name}": f"{names}.{hf_name}" for name, hf_name in same.items()},
    }


_CONVOLUTIONS = [f"model.layers.*.linear_attn.{letter}_conv1d" for letter in "qkv"]
OLMO_HYBRID = Family(
    "olmo_hybrid", "OlmoHybridForCausalLM", models="OLMo-Hybrid-7B",
    limits=("convolutions that transformers has split into equal parts, if a value head is wider than a key head",),
    config=(
        *llama.SIZES, llama.FFN, groups(), derived_head_size(), *llama.rms_norm(), *llama.DROPOUT, llama.tied(False),
        llama.SILU_GATED, llama.NO_BIASES, LAYER_KINDS, OptionalRope(),
        Fixed({"experimental_attention_variant": "gated_delta_net", "norm_placement": "mixed", "qk_layernorm": True,
               "qk_layernorm_across_heads": True, "linear_norm_epsilon": 1e-5}),
        *(Same(f"linear_num_{kind}_heads", f"linear_num_{kind}_heads", default=lambda c: c["num_attention_heads"])
          for kind in ("key", "value")),
        Same("linear_key_head_dim", "linear_key_head_dim", default=lambda config: _key_channels(config)),
        Same("linear_value_head_dim", "linear_value_head_dim", default=lambda config: 2 * _key_channels(config)),
        Same("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
        Choice("linear_allow_neg_eigval", {value: {"linear_allow_neg_eigval": value} for value in (True, False)}, True),
        FixedKeys({"attention_bias": False}), FixedKeys({"linear_use_gate": True}, written=False),
        Ignored(("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")),
    ),
    weights={
        **llama.WEIGHTS, **mixer(BlockParts(_CONVOLUTIONS, [(0,), (1,), (2,)], lambda config: rows(config)[:3])),
        "decoder.layers.*.post_self_attention_layernorm": "model.layers.*.post_attention_layernorm",
        "decoder.layers.*.post_mlp_layernorm": "model.layers.*.post_feedforward_layernorm",
    },
    # names that transformers writes
    aliases={".attention_layer_norm.weight": ".input_layernorm.weight",
             ".feedforward_layer_norm.weight": ".post_attention_layernorm.weight"},
)  # fmt: skip


def _key_channels(config: Table) -> int:
    """Return ``linear_key_head_dim`` or its default."""
    heads = config.get("linear_num_key_heads") or config["num_attention_heads"]
    return config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / heads)
