"""Granite: LLaMA with factors of embeddings, scores, branches and logits. Granite 4 (``granitemoehybrid``) has layers
of Mamba-2 or attention, each with experts and a shared expert, or with a feed-forward network."""

from __future__ import annotations

from megatron.export.hf.attention_settings import Rope, groups
from megatron.export.hf.families import llama
from megatron.export.hf.families.mamba2 import COMMON, mamba_heads
from megatron.export.hf.families.nemotron_h import KINDS, mixer_names, require_shared_expert
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import Stacked
from megatron.export.hf.settings import Computed, FixedKeys, Ignored, Rule, Same, Table, get, refuse, same


def _load_scale(config: Table) -> dict[str, object]:
    scale, channels = get(config, ("attention_multiplier",), 1.0), llama.HEAD_SIZE.load(config)["kv_channels"]
    return {"softmax_scale": None if scale == channels**-0.5 else scale}


def _save_scale(settings: Table) -> dict[str, object]:
    return {"attention_multiplier": settings["softmax_scale"] or settings["kv_channels"] ** -0.5}


FACTORS: tuple[Rule, ...] = (
    Computed(("attention_multiplier",), ("softmax_scale",), _load_scale, _save_scale),
    *(Same(name, name, default=1.0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
)
GRANITE = Family(
    "granite", "GraniteForCausalLM", models="Granite 3, dense",
    config=(
        *llama.SIZES, llama.FFN, llama.HEAD_SIZE, groups(), *llama.rms_norm(), *llama.DROPOUT, llama.tied(False),
        llama.SILU_GATED, Rope(), *FACTORS,
        Same("add_bias_linear", "attention_bias", default=False), Same("add_bias_linear", "mlp_bias", default=False),
    ),
    weights=llama.WEIGHTS,
)  # fmt: skip


def _load_layers(config: Table) -> dict[str, object]:
    """Return pattern, widths and experts. Without experts, ``intermediate_size`` has no effect."""
    count, shared = get(config, ("num_hidden_layers",)), get(config, ("shared_intermediate_size",), 1024)
    layers, experts = get(config, LAYER_TYPES, None), get(config, ("num_local_experts",), 8)
    names = [name for name, symbol in KINDS.items() if symbol in "M*"]
    layers = ["mamba"] * count if layers is None and type(count) is int and 0 < count <= 1024 else layers
    if not isinstance(layers, list) or not layers or len(layers) != count or not {*layers} <= {*names}:
        raise refuse("layer_types", layers, f"but must be a list of {', '.join(names)}, one for each layer")
    pattern = "".join(KINDS[kind] + ("E" if experts else "-") for kind in layers)
    settings: dict[str, object] = {"hybrid_layer_pattern": pattern, "num_layers": len(pattern)}
    if not experts:
        return {**settings, "ffn_hidden_size": shared}
    width = get(config, ("intermediate_size",))
    return {
        **settings, "num_moe_experts": experts, "moe_router_topk": get(config, ("num_experts_per_tok",), 2),
        "ffn_hidden_size": width, "moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": shared,
    }  # fmt: skip


def _save_layers(settings: Table) -> dict[str, object]:
    pattern = (settings["hybrid_layer_pattern"] or "").replace("|", "")
    kinds, network = pattern[::2], "E" if settings["num_moe_experts"] else "-"
    if not kinds or not {*kinds} <= {*"M*"} or pattern != "".join(kind + network for kind in kinds):
        raise refuse("hybrid_layer_pattern", pattern, "the family repeats M and *, each before E, or each before -")
    layers = {"layer_types": [{"M": "linear_attention", "*": "full_attention"}[kind] for kind in kinds]}
    if not settings["num_moe_experts"]:
        width, experts = settings["ffn_hidden_size"], {"num_local_experts": 0, "num_experts_per_tok": 0}
        sizes = {"intermediate_size": width, "shared_intermediate_size": width}
    else:
        require_shared_expert(settings)
        names = {"intermediate_size": "moe_ffn_hidden_size",
                 "shared_intermediate_size": "moe_shared_expert_intermediate_size"}  # fmt: skip
        sizes = {key: settings[name] for key, name in names.items()}
        experts = {"num_local_experts": settings["num_moe_experts"], "num_experts_per_tok": settings["moe_router_topk"]}
    return {"num_hidden_layers": len(kinds), **layers, **sizes, **experts}


LAYER_TYPES = "layer_types", "layers_block_type"
LAYERS = Computed(
    (*LAYER_TYPES, "num_hidden_layers", "intermediate_size", "shared_intermediate_size", "num_local_experts",
     "num_experts_per_tok"),
    ("hybrid_layer_pattern", "num_layers", "ffn_hidden_size", "num_moe_experts", "moe_router_topk",
     "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    _load_layers, _save_layers,
)  # fmt: skip


class Positions(Rope):
    """Rotary positions if ``position_embedding_type`` is "rope", else none."""

    def __init__(self) -> None:
        super().__init__()
        self.hf_keys = (*self.hf_keys, "position_embedding_type")

    def load(self, config: Table) -> dict[str, object]:
        rotates = get(config, ("position_embedding_type",), None) == "rope"
        return super().load(config) if rotates else {"position_embedding_type": "none"}

    def save(self, settings: Table) -> dict[str, object]:
        if settings["position_embedding_type"] == "none":
            return {"position_embedding_type": "nope"}  # as in published files
        return {**super().save(settings), "position_embedding_type": "rope"}


_LAYER = "model.layers.*"
GRANITE_4 = Family(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", models="Granite 4",
    config=(
        *COMMON, LAYERS, *mamba_heads("mamba_n_heads", "mamba_d_head", "mamba_expand"),
        *same(num_attention_heads="num_attention_heads", max_position_embeddings="max_position_embeddings"),
        groups(), llama.HEAD_SIZE,
        Same("mamba_num_groups", "mamba_n_groups", default=1), Same("mamba_state_dim", "mamba_d_state", default=256),
        Same("norm_epsilon", "rms_norm_eps", default=1e-6), *llama.DROPOUT, llama.SILU_GATED, Positions(), *FACTORS,
        FixedKeys({"mamba_d_conv": 4, "mamba_conv_bias": True, "mamba_proj_bias": False, "attention_bias": False}),
        Ignored(("mamba_chunk_size", "router_aux_loss_coef", "output_router_logits")),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION, **mixer_names(f"{_LAYER}.mamba"),
        "decoder.layers.*.norm": f"{_LAYER}.input_layernorm",
        "decoder.layers.*.mlp.router": f"{_LAYER}.block_sparse_moe.router.layer",
        **{
            f"decoder.layers.*.mlp.{folder}linear_fc{number}": f"{_LAYER}.shared_mlp.{name}_linear"
            for folder in ("", "shared_experts.") for number, name in ((1, "input"), (2, "output"))
        },
        **{
            f"decoder.layers.*.mlp.experts.linear_fc{number}.weight": Stacked(
                f"{_LAYER}.block_sparse_moe.{name}_linear.weight"
            )
            for number, name in ((1, "input"), (2, "output"))
        },
    },
    layers_per_block=2,
)  # fmt: skip
