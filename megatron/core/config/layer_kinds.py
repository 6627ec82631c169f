"""What the residual branches of a layer are, by name. Specs (``models/common/layer_specs.py``) and descriptions
(``models/common/description.py``) have one entry per name. Torch-free."""

from __future__ import annotations

from typing import Any

from megatron.core.config.linear_attention import has_linear_attention
from megatron.core.config.moe import has_experts

STANDARD = ("attention", "mlp")


def layer_kinds(config: Any, layer_number: int) -> tuple[str, ...]:
    """Return the kinds of the branches of a layer (from 1), in order."""
    mixer = "latent_attention" if config.multi_latent_attention else "attention"
    if has_linear_attention(config, layer_number):
        mixer = "gated_delta_net"
    return mixer, "experts" if has_experts(config, layer_number) else "mlp"
