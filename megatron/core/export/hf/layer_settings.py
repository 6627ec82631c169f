"""Rules of which layers have experts. Torch-free."""

from __future__ import annotations

from typing import Any

from megatron.core.export.hf.settings import Computed, Table, get, refuse


def _pattern(has: list[bool]) -> int | list[int]:
    return 1 if all(has) else [int(each) for each in has]


def layers_with_experts(settings: Table) -> list[bool]:
    """One for each layer."""
    pattern, count = settings["moe_layer_freq"], settings["num_layers"]
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(count)]
    return [bool(each) for each in pattern]


def _load_sparse_step(config: Table) -> dict[str, Any]:
    step, dense = get(config, ("decoder_sparse_step",), 1), get(config, ("mlp_only_layers",), [])
    count = config["num_hidden_layers"]
    return {"moe_layer_freq": _pattern([(layer + 1) % step == 0 and layer not in dense for layer in range(count)])}


def _save_sparse_step(settings: Table) -> dict[str, Any]:
    dense = [layer for layer, has in enumerate(layers_with_experts(settings)) if not has]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERT_LAYERS = Computed(
    ("decoder_sparse_step", "mlp_only_layers"), ("moe_layer_freq",), _load_sparse_step, _save_sparse_step
)
"""Qwen: every so many layers, without some."""


def _load_first_dense(config: Table) -> dict[str, Any]:
    first, count = get(config, ("first_k_dense_replace",), 3), config["num_hidden_layers"]
    return {"moe_layer_freq": _pattern([layer >= first for layer in range(count)])}


def _save_first_dense(settings: Table) -> dict[str, Any]:
    has = layers_with_experts(settings)
    first = has.index(True) if any(has) else len(has)
    if not all(has[first:]):
        raise refuse("moe_layer_freq", settings["moe_layer_freq"], "only the first layers can be dense")
    return {"first_k_dense_replace": first}


FIRST_DENSE = Computed(("first_k_dense_replace",), ("moe_layer_freq",), _load_first_dense, _save_first_dense)
"""DeepSeek: all but the first ones."""
