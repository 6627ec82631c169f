"""Slots of layers, for programs that ask for them instead of a layer's spec."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)


def get_submodules(spec: object) -> object:
    """Return the slots of a ``ModuleSpec``, or of a ``functools.partial``, which must have them (KeyError). Raises
    ValueError for objects without slots."""
    if isinstance(spec, partial):
        return spec.keywords["submodules"]
    if not hasattr(spec, "submodules"):
        raise ValueError(f"{spec!r}: has no submodules")
    return spec.submodules


def _slots_of(make_spec: Callable[..., object]) -> Callable[..., object]:
    return lambda *arguments, **named: get_submodules(make_spec(*arguments, **named))


get_gpt_layer_local_submodules = _slots_of(get_gpt_layer_local_spec)
get_gpt_layer_with_transformer_engine_submodules = _slots_of(get_gpt_layer_with_transformer_engine_spec)
