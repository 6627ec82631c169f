"""Rules of what several keys of ``config.json`` say together: heads, rotary positions, sliding windows. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.attention.window import layer_window
from megatron.core.export.hf.settings import Computed, Table, get, refuse_key, refuse_setting

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What --use-rope-scaling has, beside its factor."""

UNUSUAL_YARN = {
    "beta_fast": ("yarn_beta_fast", 32.0), "beta_slow": ("yarn_beta_slow", 1.0),
    "truncate": ("yarn_correction_range_round_to_int", True),
}  # fmt: skip
"""Parameters of YaRN that are said only where they differ from these."""


def _load_groups(config: Table) -> dict[str, Any]:
    heads = get(config, ("num_attention_heads",), 0)
    groups = get(config, ("num_key_value_heads",), heads)
    return {"num_query_groups": groups, "group_query_attention": groups != heads}


GROUPS = Computed(
    ("num_key_value_heads",), ("num_query_groups", "group_query_attention"), _load_groups,
    lambda settings: {"num_key_value_heads": settings["num_query_groups"]},
)  # fmt: skip
"""Heads of keys and values."""


def equal_heads(width: str, heads: str) -> Computed:
    """Heads that share out the width of the residual stream, as no key says otherwise."""

    def save(settings: Table) -> dict[str, Any]:
        hidden, count = settings["hidden_size"], settings["num_attention_heads"]
        if settings["kv_channels"] * count != hidden:
            raise refuse_setting("kv_channels", settings["kv_channels"], f"only {hidden} / {count} can be said")
        return {}

    return Computed((), ("kv_channels",), lambda config: {"kv_channels": config[width] // config[heads]}, save)


@dataclass(frozen=True)
class Rope:
    """Rotary positions: base, share of the channels, and how they are stretched."""

    base: float = 10000.0
    """Where config.json says nothing."""
    base_key: str = "rope_theta"
    share: float | None = None
    """Share of the channels that is rotated, where config.json says nothing; None: always all of them."""
    share_key: str = "partial_rotary_factor"
    kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    latent: bool = False
    """Of multi-latent attention, whose stretching is a setting of its own."""

    @property
    def theirs(self) -> tuple[str, ...]:
        return ("rope_parameters", "rope_scaling", self.base_key, self.share_key)

    @property
    def ours(self) -> tuple[str, ...]:
        return (
            "position_embedding_type", "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor",
            "rotary_seq_len_interpolation_factor", "rotary_scaling_factor", "yarn_original_max_position_embeddings",
            "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim",
            "rope_type",
        )  # fmt: skip

    def load(self, config: Table) -> dict[str, Any]:
        given = get(config, ("rope_parameters", "rope_scaling"), {})
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise refuse_key("rope_parameters", given, "which cannot be represented: all layers rotate in one way")
        stretch = {name: value for name, value in given.items() if value is not None}
        base = stretch.pop("rope_theta", get(config, (self.base_key,), self.base))
        share = stretch.pop("partial_rotary_factor", get(config, (self.share_key,), self.share or 1.0))
        kind = stretch.pop("rope_type", None) or stretch.get("type") or "default"
        stretch.pop("type", None)
        if base != int(base):
            raise refuse_key(self.base_key, base, "which cannot be represented: --rotary-base is a whole number")
        if share != 1.0 and self.share is None:
            raise refuse_key(self.share_key, share, "but the family rotates all channels")
        if kind not in self.kinds:
            raise refuse_key("rope_type", kind, f"which cannot be represented; known: {', '.join(self.kinds)}")
        settings: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": int(base)}
        settings["rotary_percent"] = float(share)
        if self.latent:
            settings["rope_type"] = "yarn" if kind == "yarn" else "rope"
        settings |= {"linear": _linear, "llama3": _llama3, "yarn": _yarn}.get(kind, _plain)(stretch, config)
        if kind == "yarn" and not self.latent:
            settings["position_embedding_type"] = "yarn"
        if stretch:
            raise refuse_key("rope_scaling", stretch, f"which type {kind!r} cannot have here")
        return settings

    def save(self, settings: Table) -> dict[str, Any]:
        positions, share = settings["position_embedding_type"], settings["rotary_percent"]
        if positions not in ("rope", "yarn"):
            raise refuse_setting("position_embedding_type", positions, "the family rotates")
        config: dict[str, Any] = {self.base_key: float(settings["rotary_base"])}
        if self.share is not None:
            config[self.share_key] = share
        elif share != 1.0:
            raise refuse_setting("rotary_percent", share, "the family rotates all channels")
        stretch: dict[str, Any] | None = None
        if factor := settings["rotary_seq_len_interpolation_factor"]:
            stretch = {"rope_type": "linear", "factor": float(factor)}
        if settings["use_rope_scaling"]:
            if stretch:
                raise refuse_setting("rotary_seq_len_interpolation_factor", factor, "beside use_rope_scaling")
            stretch = {"rope_type": "llama3", "factor": settings["rope_scaling_factor"], **LLAMA3}
        if settings["rope_type"] == "yarn" or settings["rope_type"] is None and self.latent or positions == "yarn":
            stretch = _save_yarn(settings)
        kind = stretch["rope_type"] if stretch else "default"
        if kind not in self.kinds:
            raise refuse_setting("rope_type", kind, f"the family knows {', '.join(self.kinds)}")
        return {**config, "rope_scaling": stretch}


def _plain(stretch: dict[str, Any], config: Table) -> dict[str, Any]:
    stretch.pop("factor", None) if stretch.get("factor") == 1.0 else None
    return {}


def _linear(stretch: dict[str, Any], config: Table) -> dict[str, Any]:
    factor = stretch.pop("factor", 1.0)
    if factor != int(factor):
        raise refuse_key("rope_scaling factor", factor, "which cannot be represented: it must be a whole number")
    return {"rotary_seq_len_interpolation_factor": int(factor)}


def _llama3(stretch: dict[str, Any], config: Table) -> dict[str, Any]:
    for name, wanted in LLAMA3.items():
        if (value := stretch.pop(name, wanted)) != wanted:
            raise refuse_key(f"rope_scaling {name}", value, f"which cannot be represented: only {wanted} can")
    return {"use_rope_scaling": True, "rope_scaling_factor": float(stretch.pop("factor", 8.0))}


def _yarn(stretch: dict[str, Any], config: Table) -> dict[str, Any]:
    weights = [stretch.pop(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if bool(weights[0]) != bool(weights[1]):
        raise refuse_key("rope_scaling mscale, mscale_all_dim", weights, "which only count together")
    return {
        "rotary_scaling_factor": float(stretch.pop("factor", 1.0)),
        "yarn_original_max_position_embeddings":
            stretch.pop("original_max_position_embeddings", None) or config["max_position_embeddings"],
        **{ours: stretch.pop(theirs, usual) for theirs, (ours, usual) in UNUSUAL_YARN.items()},
        "mscale": weights[0] or 1.0, "mscale_all_dim": weights[1],
    }  # fmt: skip


def _save_yarn(settings: Table) -> dict[str, Any] | None:
    if settings["rotary_scaling_factor"] == 1.0:  # leaves positions as they are
        return None
    original = settings["yarn_original_max_position_embeddings"]
    stretch = {
        "rope_type": "yarn", "factor": settings["rotary_scaling_factor"],
        "original_max_position_embeddings": 4096 if original is None else original,
    }  # fmt: skip
    for theirs, (ours, usual) in UNUSUAL_YARN.items():
        if settings[ours] != usual:
            stretch[theirs] = settings[ours]
    if settings["mscale_all_dim"]:
        stretch |= {name: settings[name] for name in ("mscale", "mscale_all_dim")}
    elif settings["mscale"] != 1.0:
        raise refuse_setting("mscale", settings["mscale"], "which counts only with mscale_all_dim there")
    return stretch


SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Window:
    """Sliding windows; theirs count the token itself, ours what lies to its left."""

    default: int | None = None
    """Window where config.json says nothing."""
    switch: bool = False
    """``use_sliding_window`` turns it on."""
    first: str | None = None
    """Key of the first layer with a window (Qwen2's ``max_window_layers``) beside ``layer_types``."""
    every: int = 1
    """Where nothing names layers: of so many, all but the last have a window; 1: all."""

    @property
    def by_layer(self) -> bool:
        return self.first is not None or self.every > 1

    @property
    def theirs(self) -> tuple[str, ...]:
        named = ((self.first,) if self.first else ()) + (("layer_types",) if self.by_layer else ())
        return ("sliding_window", *(("use_sliding_window",) if self.switch else ()), *named)

    @property
    def ours(self) -> tuple[str, ...]:
        return ("window_size", "window_attn_skip_freq")

    def load(self, config: Table) -> dict[str, Any]:
        count, width = config["num_hidden_layers"], config.get("sliding_window", self.default)
        if width is None or (self.switch and not config.get("use_sliding_window")):
            return {"window_size": None, "window_attn_skip_freq": None}
        kinds = config.get("layer_types") if self.by_layer else None
        if kinds is None:
            first = get(config, (self.first,), 28) if self.first else 0
            has = [layer >= first and (self.every == 1 or (layer + 1) % self.every != 0) for layer in range(count)]
        elif isinstance(kinds, list) and len(kinds) == count and set(kinds) <= {SLIDING, FULL}:
            has = [kind == SLIDING for kind in kinds]
        else:
            raise refuse_key("layer_types", kinds, f"but must name {SLIDING} or {FULL} for each of {count} layers")
        if not any(has):
            return {"window_size": None, "window_attn_skip_freq": None}
        pattern = None if all(has) else [int(each) for each in has]
        return {"window_size": (width - 1, 0), "window_attn_skip_freq": pattern}

    def save(self, settings: Table) -> dict[str, Any]:
        size, skip = settings["window_size"], settings["window_attn_skip_freq"]
        has = [layer_window(size and tuple(size), skip, number + 1) for number in range(settings["num_layers"])]
        on = any(has)
        if on and (size[0] < 0 or size[1] > 0):
            raise refuse_setting("window_size", size, "only a left side can be said")
        if on and not all(has) and not self.by_layer:
            raise refuse_setting("window_attn_skip_freq", skip, "the family has a window in every layer or none")
        config: dict[str, Any] = {"sliding_window": size[0] + 1 if on else None}
        if self.switch:
            config["use_sliding_window"] = on
        if self.by_layer:
            config["layer_types"] = [SLIDING if each else FULL for each in has]
        if self.first:
            config[self.first] = next((layer for layer, each in enumerate(has) if each), len(has))
        return config
