"""Hybrid models: a pattern with one symbol per layer, each layer one residual branch. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import Dim

SYMBOLS = {
    "M": "mamba",
    "G": "gated_delta_net",
    "K": "kimi_delta_attention",
    "*": "attention",
    "+": "latent_attention",
    "-": "mlp",
    "E": "experts",
}
"""Kind of branch (``layer_kinds.py``) of each symbol of a pattern."""
STAGE, DEPTH = "|", "/"
"""Separators of pipeline stages, and of prediction depths after the layers of the decoder."""


def check_hybrid_pattern(pattern: str) -> None:
    """Raise ValueError for unknown symbols, a pattern without layers, and prediction depths that differ."""
    if unknown := sorted({*pattern} - {*SYMBOLS, STAGE, DEPTH}):
        symbols = f"{' '.join(SYMBOLS)}, | between stages and / before prediction depths"
        raise ValueError(f"has {', '.join(map(repr, unknown))}; symbols are {symbols}")
    layers, *depths = pattern.split(DEPTH)
    if not layers.replace(STAGE, ""):
        raise ValueError("has no layers")
    if len({*depths}) > 1 or "" in depths or STAGE in "".join(depths):
        raise ValueError("has prediction depths that differ, are empty or have |; repeat one, as in M-M*-/M*/M*")


@dataclass(kw_only=True)
class HybridConfig(OptionalGroup):
    """Hybrid models"""

    hybrid_layer_pattern: str | None = flag(
        "--hybrid-layer-pattern", "--hybrid-override-pattern", check=check_hybrid_pattern, metavar="PATTERN"
    )
    """Kind of each layer, a branch with its own norm: M Mamba-2, G gated delta net, K Kimi delta attention,
    * attention, + latent attention, - feed-forward network, E experts; | ends a pipeline stage, / begins a prediction
    depth. Sets --num-layers: M-M*-E has 6; and --mtp-num-layers: M*-/M*/M* has 2 depths of the layers M*."""

    mamba_state_dim: Dim = 128
    """Channels of the state per channel of a Mamba-2 head."""

    mamba_head_dim: Dim = 64
    """Channels of a Mamba-2 head."""

    mamba_num_groups: Dim = 8
    """Groups of Mamba-2 heads; the heads of a group read and write their states in the same way."""

    mamba_num_heads: Dim | None = None
    """Mamba-2 heads; default: twice the hidden size / --mamba-head-dim."""


def pattern_kinds(config: HybridConfig) -> list[str]:
    """Return the kind of each decoder layer's branch; empty without a pattern."""
    return [SYMBOLS[symbol] for symbol in (config.hybrid_layer_pattern or "").split(DEPTH)[0].replace(STAGE, "")]


def depth_kinds(config: HybridConfig) -> list[str]:
    """Return the kind of each layer's branch in a prediction depth; empty if the pattern has none."""
    depths = (config.hybrid_layer_pattern or "").split(DEPTH)[1:]
    return [SYMBOLS[symbol] for symbol in depths[0]] if depths else []
