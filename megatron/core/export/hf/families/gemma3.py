"""Gemma 3, text (``Gemma3ForCausalLM``): Gemma 2 with normed queries and keys, without a cap of attention, and with a
rotary base of its own in layers with a window, five of six."""

from __future__ import annotations

from typing import Any

from megatron.core.export.hf.attention_settings import FULL, SLIDING, Rope, Window
from megatron.core.export.hf.families.gemma2 import COMMON, WEIGHTS, cap
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.settings import Ours, Table, Theirs, get, refuse

WINDOW = Window(4096, every=6, every_keys=("sliding_window_pattern", "_sliding_window_pattern"))


class TwoRopes(Rope):
    """Rotations of layers with and without a window: a table each, or (older files) keys of either."""

    def __init__(self) -> None:
        super().__init__(1e6, kinds=("default", "linear"))
        self.theirs, self.ours = (*self.theirs, "rope_local_base_freq"), (*self.ours, "rotary_base_local")

    def load(self, config: Table) -> dict[str, Any]:
        given = get(config, ("rope_parameters",), {})
        local = get(config, ("rope_local_base_freq",), 10000.0)
        if isinstance(given, dict) and {FULL, SLIDING} & given.keys():
            if strange := given.keys() - {FULL, SLIDING}:
                raise refuse("rope_parameters", sorted(strange), f"beside {FULL} and {SLIDING}")
            own = {**(given.get(SLIDING) or {})}
            local = own.pop("rope_theta", local)
            if own.pop("rope_type", "default") != "default" or own:
                raise refuse(f"rope_parameters {SLIDING}", own, "which cannot be represented: it is not stretched")
            config = {**config, "rope_parameters": given.get(FULL) or {}}
        if local != int(local):
            raise refuse("rope_local_base_freq", local, "which cannot be represented: it must be a whole number")
        has_windows = WINDOW.load(config)["window_size"] is not None
        return {**super().load(config), "rotary_base_local": int(local) if has_windows else None}

    def save(self, settings: Table) -> dict[str, Any]:
        local, stretch = settings["rotary_base_local"], settings["rotary_seq_len_interpolation_factor"]
        if local is None and settings["window_size"] is not None:
            if stretch:
                raise refuse("rotary_base_local", local, "the family does not stretch it")
            local = settings["rotary_base"]
        return {**super().save(settings), "rope_local_base_freq": float(local or 10000)}


FAMILY = Family(
    "gemma3_text", "Gemma3ForCausalLM",
    config=(
        *COMMON, TwoRopes(), WINDOW, Ours({"qk_layernorm": True}), Theirs({"attn_logit_softcapping": None}),
        cap("final_logit_softcapping", None),
    ),
    weights=WEIGHTS,
)  # fmt: skip
