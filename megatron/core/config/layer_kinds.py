"""What the residual branches of a layer are, by name. Specs (``models/common/layer_specs.py``) and descriptions
(``models/gpt/description.py``) have one entry per kind. Torch-free."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core.config.hybrid import HybridConfig, depth_kinds, pattern_kinds
from megatron.core.config.linear_attention import has_linear_attention
from megatron.core.config.moe import has_experts

STANDARD = ("attention", "mlp")


class BranchNames(NamedTuple):
    """Names of one kind of branch."""

    name: str
    """Prefix of its mixer's parameters."""
    norm: str
    """Prefix of its norm's parameters."""
    site: str
    """Name that seeds its dropout masks."""
    text: str
    """Name in messages."""


_ATTENTION = BranchNames("self_attention", "input_layernorm", "attention", "attention")
_FEED_FORWARD = BranchNames("mlp", "pre_mlp_layernorm", "mlp", "feed-forward")
BRANCHES = {
    "attention": _ATTENTION,
    "latent_attention": _ATTENTION,
    "gated_delta_net": _ATTENTION,
    "kimi_delta_attention": _ATTENTION,
    "mamba": BranchNames("mixer", "norm", "mixer", "Mamba-2"),
    "mlp": _FEED_FORWARD,
    "experts": _FEED_FORWARD,
}


VARIANTS = {"gdn": "gated_delta_net", "gated_delta_net": "gated_delta_net", "kda": "kimi_delta_attention"}
"""Kind of linear attention of each --experimental-attention-variant."""


def layer_kinds(config: Any, layer_number: int) -> tuple[str, ...]:
    """Return the kinds of the branches of a layer (from 1), in order."""
    if pattern := pattern_kinds(config):
        return (pattern[layer_number - 1],)
    mixer = "latent_attention" if config.multi_latent_attention else "attention"
    if has_linear_attention(config, layer_number):
        mixer = VARIANTS[config.experimental_attention_variant]
    return mixer, "experts" if has_experts(config, layer_number) else "mlp"


def recurrent_kinds(config: HybridConfig) -> set[str]:
    """Return the kinds of recurrent mixers that layers may have."""
    return delta_kinds(config) | {*pattern_kinds(config), *depth_kinds(config)} & {"mamba"}


def norm_places(config: Any, layer_number: int) -> tuple[bool, bool]:
    """Return whether the branches of a layer (from 1) have a norm before their mixers, and one after them."""
    placement = config.norm_placement
    if placement == "mixed":  # multi-token prediction layers are like the last layer
        placement = "pre" if has_linear_attention(config, min(layer_number, config.num_layers)) else "post"
    return placement != "post", placement != "pre"


def delta_kinds(config: Any) -> set[str]:
    """Return the kinds of linear attention that layers may have."""
    variant = config.experimental_attention_variant
    kinds = pattern_kinds(config) + depth_kinds(config)
    return {VARIANTS[variant]} if variant else {*kinds} & {*VARIANTS.values()}
