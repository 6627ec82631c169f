"""SmolLM3 (``smollm3``): LLaMA whose every fourth layer has no rotary positions."""

from __future__ import annotations

from megatron.core.attention.window import has_rotation
from megatron.export.hf.attention_settings import FULL, Rope, groups
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Computed, Fixed, FixedKeys, Ignored, Same, Table, get, refuse


def _load_rotated(config: Table) -> dict[str, object]:
    """None if all layers rotate, n if every n-th layer does not, else a list with 1 for layers that do not."""
    count, interval = config["num_hidden_layers"], get(config, ("no_rope_layer_interval",), 4)
    rotated = get(config, ("no_rope_layers",), [int((layer + 1) % interval != 0) for layer in range(count)])
    if not isinstance(rotated, list) or len(rotated) < count or not all(value in (0, 1) for value in rotated):
        raise refuse("no_rope_layers", rotated, f"but must be 1 (rotary positions) or 0 for each of {count} layers")
    without = [int(not value) for value in rotated[:count]]
    if not any(without):
        return {"no_rope_freq": None}
    every = without.index(1) + 1
    is_regular = without == [int(number % every == 0) for number in range(1, count + 1)]
    return {"no_rope_freq": every if is_regular else without}


def _save_rotated(settings: Table) -> dict[str, object]:
    layers = range(1, settings["num_layers"] + 1)
    return {"no_rope_layers": [int(has_rotation(settings["no_rope_freq"], number)) for number in layers]}


def _load_kinds(config: Table) -> dict[str, object]:
    kinds = get(config, ("layer_types",), [])
    if not isinstance(kinds, list) or {*kinds} - {FULL}:
        raise refuse("layer_types", kinds, f"which cannot be represented: only {FULL} can")
    return {}


SMOLLM3 = Family(
    "smollm3", "SmolLM3ForCausalLM", models="SmolLM3-3B",
    config=(
        *llama.SIZES, llama.FFN, llama.HEAD_SIZE, groups(4), *llama.rms_norm(), *llama.DROPOUT, llama.tied(True),
        llama.SILU_GATED, Rope(2000000.0), llama.NO_PADDING,
        Same("add_bias_linear", "attention_bias", default=False), Same("add_bias_linear", "mlp_bias", default=False),
        Computed(("no_rope_layers", "no_rope_layer_interval"), ("no_rope_freq",), _load_rotated, _save_rotated),
        Computed(("layer_types",), (), _load_kinds, lambda settings: {}, (f"`layer_types`: `{FULL}`",)),
        FixedKeys({"use_sliding_window": False}), Fixed({"window_size": None}),
        Ignored(("sliding_window", "max_window_layers")),
    ),
    weights=llama.WEIGHTS,
)  # fmt: skip
