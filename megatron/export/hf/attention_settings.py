"""Rules that combine several keys of ``config.json``: heads, rotary positions, sliding windows. Torch-free."""

from __future__ import annotations

import json
import math
from typing import Any

from megatron.core.attention.window import layer_window
from megatron.core.config.rope_parameters import RopeParameters, parse_rope_parameters
from megatron.export.hf.settings import REQUIRED, Computed, Rule, Table, get, limit, refuse

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Fixed Llama 3 parameters of --use-rope-scaling, next to its factor."""

UNUSUAL_YARN = {
    "beta_fast": ("yarn_beta_fast", 32.0),
    "beta_slow": ("yarn_beta_slow", 1.0),
    "truncate": ("yarn_correction_range_round_to_int", True),
}
"""YaRN parameters that config.json contains only if they differ from these defaults: HF key -> (setting, default)."""


def groups(default: int | None = None, heads: object = REQUIRED) -> Computed:
    """Rule for the number of K/V heads. ``default`` is the number if the key is absent; None, or a null value, means
    the number of query heads, whose default is ``heads``. Import also sets ``group_query_attention``."""

    def load(config: Table) -> dict[str, object]:
        number = get(config, ("num_attention_heads",), heads)
        absent = "num_key_value_heads" not in config
        count = get(config, ("num_key_value_heads",), default if absent and default else number)
        return {"num_query_groups": count, "group_query_attention": count != number}

    settings = ("num_query_groups", "group_query_attention")
    return Computed(
        ("num_key_value_heads",), settings, load, lambda settings: {"num_key_value_heads": settings["num_query_groups"]}
    )


def derived_head_size(heads: str = "num_attention_heads", width: str = "hidden_size") -> Computed:
    """Rule for the head dim of families without a key for it: hidden size (HF key ``width``) // number of query heads
    (HF key ``heads``), rounded down. Export writes nothing and raises UserError for another ``kv_channels``."""

    def load(config: Table) -> dict[str, object]:
        return {"kv_channels": get(config, (width,)) // get(config, (heads,))}

    def save(settings: Table) -> dict[str, object]:
        _require_value(settings, "kv_channels", settings["hidden_size"] // settings["num_attention_heads"])
        return {}

    return Computed((), ("kv_channels",), load, save)


def equal_heads(heads: str, width: str | None = None) -> Computed:
    """Rule for multi-head attention: the number of K/V heads equals that of query heads; with ``width`` also
    :func:`derived_head_size`. ``heads`` and ``width`` are HF keys that are only read: export writes nothing and raises
    UserError for other numbers."""
    size = derived_head_size(heads, width) if width else None

    def load(config: Table) -> dict[str, object]:
        channels = size.load(config) if size else {}
        return {"num_query_groups": get(config, (heads,)), "group_query_attention": False, **channels}

    def save(settings: Table) -> dict[str, object]:
        _require_value(settings, "num_query_groups", settings["num_attention_heads"])
        return size.save(settings) if size else {}

    return Computed((), ("num_query_groups", "group_query_attention", *(size.settings if size else ())), load, save)


def one_group(key: str, heads: str) -> Computed:
    """Rule for multi-query attention (one K/V head): ``key`` is written as true and must be true or absent, else
    UserError. ``heads``: HF key of the query heads. Export raises UserError for another number of K/V heads."""

    def load(config: Table) -> dict[str, object]:
        if not get(config, (key,), True):
            raise refuse(key, False, "which cannot be converted: only 1 key/value head can")
        return {"num_query_groups": 1, "group_query_attention": get(config, (heads,)) > 1}

    def save(settings: Table) -> dict[str, object]:
        _require_value(settings, "num_query_groups", 1)
        return {key: True}

    limits = (limit(key, [True]),)
    return Computed((key,), ("num_query_groups", "group_query_attention"), load, save, limits)


def _require_value(settings: Table, name: str, required: int) -> None:
    if settings[name] != required:
        raise refuse(name, settings[name], f"the family has {required} for {settings['num_attention_heads']} heads")


ROTARY = (
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
    "rope_type",
    "rope_parameters",
)
ORIGINAL = "original_max_position_embeddings"
KINDS = ("default", "linear", "llama3", "yarn")


def rope_table(config: Table) -> Table:
    """Return rope_scaling, else rope_parameters: the order of ``transformers`` if a file has both."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


class Rope(Rule):
    """Rule for rotary positions: base, rotated fraction of the head dim, and scaling type.

    Args:
        base: default base.
        share: default rotated fraction; None: the family always rotates the full head dim.
        kinds: scaling types that the family supports.
        latent: multi-latent attention, whose scaling is the separate setting ``rope_type``.
        original: default of the key ``original_max_position_embeddings`` next to ``rope_scaling`` (Phi-3); None: the
            family has no such key."""

    def __init__(
        self,
        base: float = 10000.0,
        *,
        share: float | None = None,
        base_key: str = "rope_theta",
        share_key: str = "partial_rotary_factor",
        latent: bool = False,
        kinds: tuple[str, ...] | None = None,
        original: int | None = None,
    ) -> None:
        kinds = kinds or (KINDS if latent else (*KINDS, "dynamic", "longrope"))
        keys = ("rope_parameters", "rope_scaling", base_key, share_key, *([] if original is None else [ORIGINAL]))
        super().__init__(keys, ROTARY)
        self.base, self.share, self.base_key, self.share_key = base, share, base_key, share_key
        self.latent, self.kinds, self.original = latent, kinds, original
        self.limits = (f"rotary scaling: {', '.join(f'`{kind}`' for kind in kinds)}",)

    def load(self, config: Table) -> dict[str, object]:
        table = rope_table(config)
        if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
            raise refuse("rope_parameters", table, "which cannot be represented: layers must rotate equally")
        scaling = {name: value for name, value in table.items() if value is not None}
        base = scaling.pop("rope_theta", get(config, (self.base_key,), self.base))
        share = scaling.pop("partial_rotary_factor", get(config, (self.share_key,), self.share or 1.0))
        kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
        kind = "longrope" if kind == "su" else kind  # the first name of longrope in files of Phi-3
        scaling.pop("type", None)
        if self.original is not None and kind == "longrope":
            scaling[ORIGINAL] = get(config, (ORIGINAL,), self.original)
        if share != 1.0 and self.share is None:
            raise refuse(self.share_key, share, "but the family applies rotary positions to all channels")
        if kind not in self.kinds:
            raise refuse("rope_type", kind, f"which cannot be represented; known: {', '.join(self.kinds)}")
        settings: dict[str, object] = {
            "position_embedding_type": "rope",
            "rotary_base": rotary_base(self.base_key, base),
        }
        settings["rotary_percent"] = float(share)
        if self.latent:
            settings["rope_type"] = "yarn" if kind == "yarn" else "rope"
        settings |= LOAD.get(kind, _plain)(scaling, config)
        if kind == "yarn" and not self.latent:
            settings["position_embedding_type"] = "yarn"
        if scaling:
            raise refuse("rope_scaling", scaling, f"which type {kind!r} cannot have here")
        return settings

    def save(self, settings: Table) -> dict[str, Any]:
        """Return rotary base, share of channels (if the family has a key for it) and ``rope_scaling`` (None without
        scaling). Raises UserError for what the family lacks, and linear together with llama3 scaling."""
        positions, share = settings["position_embedding_type"], settings["rotary_percent"]
        if positions not in ("rope", "yarn"):
            raise refuse("position_embedding_type", positions, "the family rotates")
        config: dict[str, object] = {self.base_key: float(settings["rotary_base"])}
        if self.share is not None:
            config[self.share_key] = share
        elif share != 1.0:
            raise refuse("rotary_percent", share, "the family applies rotary positions to all channels")
        scaling: dict[str, object] | None = None
        if factor := settings["rotary_seq_len_interpolation_factor"]:
            scaling = {"rope_type": "linear", "factor": float(factor)}
        if settings["use_rope_scaling"]:
            if scaling:
                raise refuse("rotary_seq_len_interpolation_factor", factor, "beside use_rope_scaling")
            scaling = {"rope_type": "llama3", "factor": settings["rope_scaling_factor"], **LLAMA3}
        if settings["rope_type"] == "yarn" or settings["rope_type"] is None and self.latent or positions == "yarn":
            scaling = _save_yarn(settings)
        if settings["rope_parameters"] is not None:
            parameters = parse_rope_parameters(settings["rope_parameters"])
            scaling = _save_by_length(parameters, settings["max_position_embeddings"])
            if self.original is not None:
                config[ORIGINAL] = parameters.original_max_position_embeddings
        kind = scaling["rope_type"] if scaling else "default"
        if kind not in self.kinds:
            raise refuse("rope_type", kind, f"the family supports {', '.join(self.kinds)}")
        return {**config, "rope_scaling": scaling}


class RopeTable(Rope):
    """Rotary positions that are written as one table, ``rope_parameters``."""

    def save(self, settings: Table) -> dict[str, Any]:
        config = super().save(settings)
        scaling = config.pop("rope_scaling") or {"rope_type": "default"}
        return {"rope_parameters": {**scaling, **config}}


def _plain(scaling: dict[str, object], config: Table) -> dict[str, object]:
    if scaling.get("factor") == 1.0:
        del scaling["factor"]
    return {}


def _factor(scaling: dict[str, Any]) -> float:
    if "factor" not in scaling:
        raise refuse("rope_scaling", scaling, "without a factor")
    return float(scaling.pop("factor"))


def _linear(scaling: dict[str, object], config: Table) -> dict[str, object]:
    factor = _factor(scaling)
    if factor != int(factor):
        raise refuse("rope_scaling factor", factor, "which cannot be represented: it must be a whole number")
    return {"rotary_seq_len_interpolation_factor": int(factor)}


def _llama3(scaling: dict[str, object], config: Table) -> dict[str, object]:
    for name, supported in LLAMA3.items():
        if (value := scaling.pop(name, supported)) != supported:
            raise refuse(f"rope_scaling {name}", value, f"which cannot be represented: only {supported} can")
    return {"use_rope_scaling": True, "rope_scaling_factor": _factor(scaling)}


def _yarn(scaling: dict[str, Any], config: Table) -> dict[str, object]:
    """Removes keys from ``scaling``. Raises UserError for keys that only ``transformers`` can combine."""
    weights = [scaling.pop(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if bool(weights[0]) != bool(weights[1]):
        raise refuse("rope_scaling mscale, mscale_all_dim", weights, "which must be given together")
    factor, attention_factor = _factor(scaling), scaling.pop("attention_factor", None)
    usual = 0.1 * math.log(max(factor, 1.0)) + 1.0
    if attention_factor is not None and (weights[0] or not math.isclose(attention_factor, usual, rel_tol=1e-6)):
        reason = f"which cannot be represented: only {usual:.6g} can"
        raise refuse("rope_scaling attention_factor of yarn", attention_factor, reason)
    return {
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": scaling.pop("original_max_position_embeddings", None)
        or config["max_position_embeddings"],
        **{setting: scaling.pop(key, usual) for key, (setting, usual) in UNUSUAL_YARN.items()},
        "mscale": weights[0] or 1.0,
        "mscale_all_dim": weights[1],
    }


def _dynamic(scaling: dict[str, Any], config: Table) -> dict[str, object]:
    """Scaling begins after ``max_position_embeddings`` in ``transformers``; another original length is an error."""
    longest = config["max_position_embeddings"]
    if (original := scaling.pop(ORIGINAL, longest)) != longest:
        raise refuse(f"rope_scaling {ORIGINAL} of dynamic", original, f"but must be max_position_embeddings, {longest}")
    return _by_length(RopeParameters("dynamic", longest, factor=_factor(scaling)))


def _longrope(scaling: dict[str, Any], config: Table) -> dict[str, object]:
    """As in ``transformers`` the factor defaults to the ratio of lengths, which :func:`_attention_factor` reads."""
    longest = config["max_position_embeddings"]
    original, short, long = (scaling.pop(name, None) for name in (ORIGINAL, "short_factor", "long_factor"))
    original = original or longest
    usual = _attention_factor(scaling.pop("factor", longest / original), original)
    parameters = RopeParameters(
        "longrope",
        original,
        short_factor=short,
        long_factor=long,
        attention_factor=scaling.pop("attention_factor", usual),
    )
    return _by_length(parameters)


def _by_length(parameters: RopeParameters) -> dict[str, object]:
    """Return the setting of ``parameters``; raise UserError for invalid values."""
    text = parameters.to_text()
    try:
        parse_rope_parameters(text)
    except ValueError as error:
        raise refuse("rope_scaling", text, f"which is invalid: {error}") from None
    return {"rope_parameters": text}


def _save_by_length(parameters: RopeParameters, max_length: int) -> dict[str, object]:
    """Return the ``rope_scaling`` table, with an attention factor that the factor does not define."""
    if parameters.rope_type == "dynamic":
        return {"rope_type": "dynamic", "factor": parameters.factor}
    original, table = parameters.original_max_position_embeddings, json.loads(parameters.to_text())
    table["factor"] = max(1.0, max_length / original)
    if math.isclose(_attention_factor(table["factor"], original), parameters.attention_factor, rel_tol=1e-12):
        del table["attention_factor"]
    return table


def _attention_factor(factor: float, original: int) -> float:
    """Return the default of ``transformers`` for context extension by ``factor``."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def with_exported_length(settings: Table) -> Table:
    """Return ``settings``; with dynamic scaling, ``max_position_embeddings`` is the length after which it begins."""
    text = settings["rope_parameters"]
    if text is None or (parameters := parse_rope_parameters(text)).rope_type != "dynamic":
        return settings
    return {**settings, "max_position_embeddings": parameters.original_max_position_embeddings}


LOAD = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "dynamic": _dynamic, "longrope": _longrope}
"""Conversion of a scaling type: removes the keys that it reads from the table, returns settings."""


def _save_yarn(settings: Table) -> dict[str, object] | None:
    """Return the ``rope_scaling`` table with the parameters that differ from their defaults; None for a factor of 1."""
    if settings["rotary_scaling_factor"] == 1.0:  # factor 1 does not scale positions
        return None
    original = settings["yarn_original_max_position_embeddings"]
    scaling = {
        "rope_type": "yarn",
        "factor": settings["rotary_scaling_factor"],
        "original_max_position_embeddings": 4096 if original is None else original,
    }
    for key, (setting, usual) in UNUSUAL_YARN.items():
        if settings[setting] != usual:
            scaling[key] = settings[setting]
    if settings["mscale_all_dim"]:
        scaling |= {name: settings[name] for name in ("mscale", "mscale_all_dim")}
    elif settings["mscale"] != 1.0:
        raise refuse("mscale", settings["mscale"], "which requires mscale_all_dim there")
    return scaling


SLIDING, FULL = "sliding_attention", "full_attention"


def rotary_base(key: str, base: float) -> float:
    """Return the rotary base, as an int if it is integral; raise UserError unless it is finite and at least 1."""
    if not math.isfinite(base) or base < 1:
        raise refuse(key, base, "but must be a finite number of at least 1")
    return int(base) if base == int(base) else base


def unstretched_base(kind: str, tables: Table, key: str, base: float) -> float:
    """Return the rotary base of layers of type ``kind``; raise UserError if their entry scales positions."""
    entry = {**(tables.get(kind) or {})}
    base = entry.pop("rope_theta", base)
    if entry.pop("rope_type", "default") != "default" or entry:
        raise refuse(f"rope_parameters {kind}", entry, "which cannot be represented: its positions are not scaled")
    return rotary_base(key, base)


def layer_types_pattern(config: Table, usual: list[bool]) -> list[bool]:
    """Return whether each layer has a window, from ``layer_types``; ``usual`` itself if the key is missing or null.
    Raises UserError unless it names sliding or full attention for every layer."""
    count, kinds = config["num_hidden_layers"], get(config, ("layer_types",), None)
    if kinds is None:
        return usual
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {SLIDING, FULL}:
        raise refuse("layer_types", kinds, f"but must name {SLIDING} or {FULL} for each of {count} layers")
    return [kind == SLIDING for kind in kinds]


def window_settings(window: tuple[int, int], has: list[bool]) -> dict[str, object]:
    """Return the settings for ``window`` (left, right) in the layers where ``has`` is true."""
    pattern = None if all(has) else [int(has_window) for has_window in has]
    return {"window_size": window if any(has) else None, "window_attn_skip_freq": pattern if any(has) else None}


def layers_with_windows(settings: Table) -> list[bool]:
    """Return whether each layer has a window, according to ``settings``."""
    size, skip = settings["window_size"], settings["window_attn_skip_freq"]
    layers = range(1, settings["num_layers"] + 1)
    return [layer_window(size and tuple(size), skip, number) is not None for number in layers]


class Window(Rule):
    """Rule for sliding windows. HF's width includes the token itself; the local width counts tokens to its left.

    Args:
        default: default width.
        switch: whether ``use_sliding_window`` enables the window.
        first: key of the first layer with a window (Qwen2's ``max_window_layers``), used without ``layer_types``.
        every: without keys that list layers, each ``every``-th layer has full attention; 1: all have windows.
        every_keys: keys that override ``every``."""

    def __init__(
        self,
        default: int | None = None,
        *,
        switch: bool = False,
        first: str | None = None,
        every: int = 1,
        every_keys: tuple[str, ...] = (),
    ) -> None:
        self.default, self.switch, self.first, self.every = default, switch, first, every
        self.every_keys = every_keys
        self.by_layer = first is not None or every > 1
        keys = {"use_sliding_window": switch, first or "": first is not None, "layer_types": self.by_layer}
        layer_keys = [key for key, is_read in keys.items() if is_read]
        super().__init__(("sliding_window", *layer_keys, *every_keys), ("window_size", "window_attn_skip_freq"))

    def load(self, config: Table) -> dict[str, object]:
        """Return ``window_size`` and the pattern of layers with a window: from ``layer_types`` if the family has them,
        else from the first layer and the interval. Both None if the width is null (absent: the default) or the switch
        is not on. A width of n tokens becomes (n - 1, 0)."""
        width = config.get("sliding_window", self.default)
        if width is None or (self.switch and not config.get("use_sliding_window")):
            return {"window_size": None, "window_attn_skip_freq": None}
        first = get(config, (self.first,), 28) if self.first else 0
        every = get(config, self.every_keys, self.every) if self.every_keys else self.every
        layers = range(get(config, ("num_hidden_layers",)))
        has = [layer >= first and (every == 1 or (layer + 1) % every != 0) for layer in layers]
        return window_settings((width - 1, 0), layer_types_pattern(config, has) if self.by_layer else has)

    def save(self, settings: Table) -> dict[str, object]:
        """Return width, switch, layer types and first layer, as the family has them; without windows a null width (with
        ``every``: the default). Raises UserError for windows that the family cannot express."""
        size, skip, has = settings["window_size"], settings["window_attn_skip_freq"], layers_with_windows(settings)
        on = any(has)
        if on and (size[0] < 0 or size[1] > 0):
            raise refuse("window_size", size, "only left windows can be exported")
        if on and not all(has) and not self.by_layer:
            raise refuse("window_attn_skip_freq", skip, "the family has a window in every layer or none")
        # transformers builds the masks of both layer types and needs a width even if no layer has a window
        unused = self.default if self.every > 1 else None
        config: dict[str, object] = {"sliding_window": size[0] + 1 if on else unused}
        if self.switch:
            config["use_sliding_window"] = on
        if self.by_layer:
            config["layer_types"] = [SLIDING if has_window else FULL for has_window in has]
        if self.first and on:
            config[self.first] = has.index(True)
        return config
