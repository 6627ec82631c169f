"""Maximal update parameterization (muP; Yang et al. 2022, arXiv 2203.03466, table 8): settings found at a base width
transfer to larger widths. Torch-free.

With the width multiplier m = hidden size / base hidden size:

  class of parameter               initial std        Adam, Lion: rate    Adam: epsilon    SGD: rate
  hidden matrices                  std / sqrt(m)      lr / m              eps / m          lr
  embeddings, output layer         embedding std      lr                  eps              lr m
  biases, norms                    0, 1               lr                  eps              lr m

Logits are divided by m, and attention scores by the head dim in place of its square root. The std of matrices that
write into the residual stream is divided by sqrt(2 layers) as well. Muon's matrices keep their own scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(kw_only=True)
class MupConfig(OptionalGroup):
    """Maximal update parameterization (muP)"""

    use_mup: bool = False
    """Scale initial values, learning rates, Adam's epsilon, attention scores and logits with the width: settings found
    at --mup-base-hidden-size transfer."""

    mup_base_hidden_size: PositiveInt | None = None
    """Hidden size of the model whose settings are used; default: --hidden-size."""

    mup_embedding_mult: PositiveFloat = 1.0
    """Factor of the embeddings under --use-mup."""

    mup_output_mult: PositiveFloat = 1.0
    """Factor of the logits under --use-mup; 1: base hidden size / hidden size."""

    mup_base_head_dim: PositiveFloat | None = None
    """Head dim at which attention scores are scaled as without muP: the scale is multiplied by its square root."""

    mup_attn_scale_power: NonNegativeFloat = 1.0
    """Power p in the scale 1 / head dim^p of attention scores under --use-mup; 0.5: as without muP."""


SETTINGS = ("use_mup", "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult")
"""Settings that the meaning of weights depends on, besides the scale of attention scores."""


class MupSettings(Protocol):
    """Settings with a width."""

    hidden_size: int
    use_mup: bool
    mup_base_hidden_size: int | None
    mup_embedding_mult: float
    mup_output_mult: float


def width_multiplier(settings: MupSettings) -> float:
    """Return hidden size / base hidden size; 1 without muP."""
    return settings.hidden_size / (settings.mup_base_hidden_size or settings.hidden_size) if settings.use_mup else 1.0


def output_factor(settings: MupSettings) -> float:
    """Return the factor of the logits; 1 without muP."""
    if not settings.use_mup or settings.mup_output_mult != 1.0:
        return settings.mup_output_mult if settings.use_mup else 1.0
    return 1.0 / width_multiplier(settings)
