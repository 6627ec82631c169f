"""Gemma: LLaMA with wide heads, scaled embeddings, GeGLU, and norms stored minus one; its second and third version."""

from __future__ import annotations

from megatron.export.hf.attention_settings import FULL, SLIDING, Rope, Window, groups, rotary_base, unstretched_base
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Choice, Computed, Fixed, FixedKeys, Ignored, Rule, Same, Table, get, refuse

COMMON: tuple[Rule, ...] = (
    *llama.SIZES, llama.FFN, *llama.rms_norm(), *llama.DROPOUT, llama.tied(True), llama.NO_BIASES,
    Same("kv_channels", "head_dim", default=256), Fixed({"apply_layernorm_1p": True, "apply_embedding_scaling": True}),
    FixedKeys({"attention_bias": False, "use_bidirectional_attention": False}),
)  # fmt: skip
GEGLU = {"gelu_pytorch_tanh": {"geglu": True}}

GEMMA = Family(
    "gemma", "GemmaForCausalLM", models="Gemma 1",
    config=(
        *COMMON, groups(16), Rope(), FixedKeys({"hidden_activation": "gelu_pytorch_tanh"}),
        Choice("hidden_act", {**GEGLU, "gelu": {"geglu": True}}, default="gelu_pytorch_tanh"),  # both mean the former
    ),
    weights=llama.WEIGHTS,
    unused=(r".*\.rotary_emb\.inv_freq",),
)  # fmt: skip


def cap(key: str, default: float | None) -> Computed:
    """A soft cap, under one name in both; null means no cap."""
    return Computed((key,), (key,), lambda config: {key: config.get(key, default)}, lambda table: {key: table[key]})


def _load_scale(config: Table) -> dict[str, object]:
    scalar, channels = get(config, ("query_pre_attn_scalar",), 256), get(config, ("head_dim",), 256)
    return {"softmax_scale": None if scalar == channels else scalar**-0.5}


def _save_scale(settings: Table) -> dict[str, object]:
    scale = settings["softmax_scale"]
    scalar = settings["kv_channels"] if scale is None else round(scale**-2, 6)
    if scalar != int(scalar):
        raise refuse("softmax_scale", scale, "only 1 / the square root of a whole number can be exported")
    return {"query_pre_attn_scalar": int(scalar)}


SCALE = Computed(("query_pre_attn_scalar",), ("softmax_scale",), _load_scale, _save_scale)
SECOND: tuple[Rule, ...] = (
    *COMMON,
    llama.DIVISIBLE,
    groups(4),
    SCALE,
    Fixed({"norm_placement": "sandwich"}),
    Ignored(("cache_implementation", "hidden_act")),
    Choice("hidden_activation", GEGLU, default="gelu_pytorch_tanh"),
)

GEMMA2 = Family(
    "gemma2", "Gemma2ForCausalLM", models="Gemma 2",
    config=(
        *SECOND, Rope(), Window(4096, every=2), cap("attn_logit_softcapping", 50.0),
        cap("final_logit_softcapping", 30.0),
    ),
    weights=llama.POST_NORMS,
)  # fmt: skip
"""Norms on both sides of every branch, soft caps, windows in every other layer."""

WINDOW = Window(4096, every=6, every_keys=("sliding_window_pattern", "_sliding_window_pattern"))


class TwoRopes(Rope):
    """Rotations of layers with and without a window: a table each, or (older files) keys of either."""

    def __init__(self) -> None:
        super().__init__(1e6, kinds=("default", "linear"))
        self.hf_keys, self.settings = (*self.hf_keys, "rope_local_base_freq"), (*self.settings, "rotary_base_local")

    def load(self, config: Table) -> dict[str, object]:
        """Add ``rotary_base_local``, the base of layers with a window (None without windows)."""
        tables = get(config, ("rope_parameters",), {})
        local = get(config, ("rope_local_base_freq",), 10000.0)
        if isinstance(tables, dict) and {FULL, SLIDING} & tables.keys():
            if unknown := tables.keys() - {FULL, SLIDING}:
                raise refuse("rope_parameters", sorted(unknown), f"beside {FULL} and {SLIDING}")
            local = unstretched_base(SLIDING, tables, "rope_local_base_freq", local)
            config = {**config, "rope_parameters": tables.get(FULL) or {}}
        local = rotary_base("rope_local_base_freq", local)
        has_windows = WINDOW.load(config)["window_size"] is not None
        return {**super().load(config), "rotary_base_local": local if has_windows else None}

    def save(self, settings: Table) -> dict[str, object]:
        """Add ``rope_local_base_freq``. Raises UserError if layers with a window would share scaled positions."""
        local, factor = settings["rotary_base_local"], settings["rotary_seq_len_interpolation_factor"]
        if local is None and settings["window_size"] is not None:
            if factor:
                raise refuse("rotary_base_local", local, "rotary scaling is not supported by the family")
            local = settings["rotary_base"]
        return {**super().save(settings), "rope_local_base_freq": float(local or 10000)}


GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", models="Gemma 3, text",
    limits=("models with an image encoder",),
    config=(
        *SECOND, TwoRopes(), WINDOW, Fixed({"qk_layernorm": True}), FixedKeys({"attn_logit_softcapping": None}),
        cap("final_logit_softcapping", None),
    ),
    weights=llama.POST_NORMS,
)  # fmt: skip
"""Gemma 3, text: Gemma 2 with normed queries and keys, without a cap of attention, and with a rotary base of
its own in layers with a window, five of six."""
