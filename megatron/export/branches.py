"""Layers of attention and a feed-forward network as the layers of a hybrid pattern, which have one branch each."""

from __future__ import annotations

import re

from megatron.core.config.errors import UserError
from megatron.core.config.hybrid import HybridConfig, pattern_kinds
from megatron.export.interchange import Interchange

_LAYER = re.compile(r"(.+\.decoder\.layers\.)(\d+)\.(.+)")
BY_LAYER = ("window_attn_skip_freq", "no_rope_freq", "mtp_num_layers")
"""Settings that name layers."""


def split_layers(source: Interchange, pattern: str) -> None:
    """Rename the tensors of a GPT model, optimizer state too, and set its pattern: the attention of layer n becomes the
    n-th * or +, its feed-forward network the n-th - or E. Raises UserError if the pattern has other layers."""
    kinds, count = pattern_kinds(HybridConfig(hybrid_layer_pattern=pattern)), source.settings.get("num_layers")
    networks = [index for index, kind in enumerate(kinds) if kind in ("mlp", "experts")]
    attention = [index for index, kind in enumerate(kinds) if kind in ("attention", "latent_attention")]
    if not len(networks) == len(attention) == len(kinds) / 2 == count:
        reason = f"needs {count} * and {count} - or E for {count} layers of attention and feed-forward network"
        raise UserError(f"--hybrid-layer-pattern {pattern}: {reason}, and no others")
    if layered := [f"{name} {source.settings[name]}" for name in BY_LAYER if source.settings.get(name)]:
        raise UserError(f"--hybrid-layer-pattern {pattern}: is not supported for models with {', '.join(layered)}")
    tensors = {}
    for name, tensor in source.tensors.items():
        if match := _LAYER.fullmatch(name):
            places = networks if re.match(r"(pre_|post_)?mlp", match[3]) else attention
            name = f"{match[1]}{places[int(match[2])]}.{match[3]}"
        tensors[name] = tensor
    source.tensors = tensors
    source.settings |= {"hybrid_layer_pattern": pattern, "num_layers": len(kinds)}
