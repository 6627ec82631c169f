"""Rotary position embeddings: channel-pair frequencies and tables of cosines and sines.

    angle(position m, pair i) = m * base^(-2i/r)       (Su et al. 2021; r rotated channels)

Context extension lowers the frequencies: linear interpolation divides all positions (Chen et al. 2023), Llama 3 scales
only low-frequency pairs, YaRN (Peng et al. 2023) blends both by frequency and lowers the attention temperature. Two
scalings depend on the length of a row: dynamic NTK raises the base beyond the original context, LongRoPE (Ding et al.
2024) divides each pair by its short or long factor. The scalings are dataclasses; ``RotaryEmbedding`` computes the
tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.attention.token_layout import ONE_RANK, TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.config.rope_parameters import RopeParameters
from megatron.core.config.transformer_config import TransformerConfig


class RotaryTables(NamedTuple):
    """Cosines and sines [s, 1, 1, r / 2] per position and channel pair."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3 frequency scaling: divide by ``factor`` for wavelengths above original / low_freq_factor, keep those
    below original / high_freq_factor, interpolate between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def scaled(self, frequencies: Tensor, base: float, width: int, length: int) -> Tensor:
        """Return a scaled copy of ``frequencies`` [r / 2] in radians per position: divided by ``factor`` for long
        wavelengths, unchanged for short ones, linear in original / wavelength between. Only ``frequencies`` is used."""
        wavelengths = 2 * math.pi / frequencies
        low, high, original = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (share + (1.0 - share) / self.factor)

    @property
    def concentration(self) -> float:
        return 1.0


def sharpening(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's mscale: the square root of the inverse attention temperature, for extension by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN frequency scaling: keep pairs with more than ``beta_fast`` rotations in the original context, divide by
    ``factor`` those with less than ``beta_slow``, and interpolate linearly by pair index between."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    round_to_int: bool = True

    def _pair_with_turns(self, turns: float, base: float, width: int) -> float:
        """Return the fractional index of the pair that makes ``turns`` rotations within the original context."""
        return width * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    def scaled(self, frequencies: Tensor, base: float, width: int, length: int) -> Tensor:
        """Return a scaled copy of ``frequencies`` [r / 2], which are base^(-2i / width) radians per position with r =
        ``width`` rotated channels: fast pairs unchanged, slow ones divided by ``factor``, linear in the pair index
        between. ``length`` is not used."""
        low = self._pair_with_turns(self.beta_fast, base, width)
        high = self._pair_with_turns(self.beta_slow, base, width)
        if self.round_to_int:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        span = high - low if high != low else 1e-3
        pairs = torch.arange(width // 2, dtype=frequencies.dtype, device=frequencies.device)
        slowed = ((pairs - low) / span).clamp(0.0, 1.0)
        return frequencies * (1.0 - slowed + slowed / self.factor)

    @property
    def concentration(self) -> float:
        """Factor of cosines and sines: square root of the inverse attention temperature (ratio of both mscales)."""
        return sharpening(self.factor, self.mscale) / sharpening(self.factor, self.mscale_all_dim)


@dataclass(frozen=True)
class LengthScaling:
    """Scaling by the length of a row, as in ``transformers``: dynamic NTK or LongRoPE."""

    parameters: RopeParameters

    def regime(self, length: int) -> int:
        """Return a number that is equal for lengths with equal frequencies: for dynamic NTK the length that sets the
        base, for LongRoPE whether ``length`` exceeds the original context."""
        original = self.parameters.original_max_position_embeddings
        return max(length, original) if self.parameters.rope_type == "dynamic" else int(length > original)

    def scaled(self, frequencies: Tensor, base: float, width: int, length: int) -> Tensor:
        """Return a scaled copy of ``frequencies`` [r / 2] with r = ``width`` for rows of ``length`` tokens."""
        parameters, regime = self.parameters, self.regime(length)
        if parameters.rope_type == "longrope":
            return frequencies / frequencies.new_tensor(parameters.long_factor if regime else parameters.short_factor)
        # base * stretch^(r / (r - 2)): the slowest pair is slowed by the full stretch, the fastest is unchanged
        base_factor = parameters.factor * regime / parameters.original_max_position_embeddings - (parameters.factor - 1)
        pairs = torch.arange(width // 2, dtype=frequencies.dtype, device=frequencies.device)
        return frequencies * base_factor ** (-2 * pairs / (width - 2))

    @property
    def concentration(self) -> float:
        """Factor of cosines and sines, for all lengths."""
        return self.parameters.attention_factor


Scaling = Llama3Scaling | YarnScaling | LengthScaling


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines, fp32 (fp64 if ``dtype`` is), cached for the longest length requested. Rotates the
    fraction ``rotary_percent`` (0 to 1) of ``kv_channels``; ``interpolation`` divides positions. Raises UserError
    unless the number of rotated channels is even and at least 2."""

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        *,
        rotary_base: float = 10000,
        interpolation: float | None = None,
        scaling: Scaling | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Set the settings; tables are computed at the first call. Raises UserError unless int(``kv_channels`` *
        ``rotary_percent``) is even and at least 2."""
        super().__init__()
        self.width = int(kv_channels * rotary_percent)
        if self.width < 2 or self.width % 2:
            raise UserError(
                f"rotary_percent {rotary_percent} of {kv_channels} channels per head is {self.width}; it must be an "
                "even number of at least 2"
            )
        self.base, self.interpolation, self.scaling = float(rotary_base), interpolation or 1.0, scaling
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._tables: RotaryTables | None = None
        self._share = (1, 0, ONE_RANK.order, 0)

    def frequencies(self, device: torch.device | str | None = None, length: int = 0) -> Tensor:
        """Return the scaled frequency of each pair in radians per position, float64 [r / 2], not yet divided by
        ``interpolation``. ``length``: tokens of a full row."""
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=device) / self.width
        frequencies = self.base**-exponents
        return frequencies if self.scaling is None else self.scaling.scaled(frequencies, self.base, self.width, length)

    @torch.inference_mode(False)  # cached tables are saved for backward later, which inference tensors cannot be
    def tables(self, positions: Tensor, length: int = 0) -> RotaryTables:
        """Return cosines and sines [s, 1, 1, r / 2] at arbitrary ``positions`` [s] of a row of ``length`` tokens, times
        the scaling's concentration, in the tables' dtype; not cached. Angles are computed in fp64: in fp32 their error
        reaches 1e-2 at position 100k."""
        frequencies = self.frequencies(positions.device, length)
        angles = torch.outer(positions.double() / self.interpolation, frequencies)[:, None, None]
        concentration = 1.0 if self.scaling is None else self.scaling.concentration
        return RotaryTables(
            (angles.cos() * concentration).to(self.dtype), (angles.sin() * concentration).to(self.dtype)
        )

    def forward(
        self, length: int, device: torch.device | str | None = None, layout: TokenLayout = ONE_RANK
    ) -> RotaryTables:
        """Return the tables of the positions of this rank's ``length`` tokens in ``layout``; on one rank 0 to
        ``length`` - 1. Computes and caches new tables if the device or this rank's tokens have changed, or for a
        greater length (with context parallelism: any other length). Do not write to the results."""
        device, ranks = torch.device(device or "cpu"), layout.group.size
        if layout.table_length is not None:
            tables, positions = self(layout.table_length, device), layout.positions(length, device)
            return RotaryTables(tables.cos[positions], tables.sin[positions])
        full_length = layout.full_length(length)
        regime = self.scaling.regime(full_length) if isinstance(self.scaling, LengthScaling) else 0
        share = (ranks, layout.group.rank, layout.order, regime)
        cached = self._tables
        stale = cached is None or cached.cos.device != device or self._share != share
        if cached is None or stale or len(cached.cos) < length or ranks > 1 and len(cached.cos) != length:
            cached, self._share = self.tables(layout.positions(length, device), full_length), share
            self._tables = cached
        return RotaryTables(cached.cos[:length], cached.sin[:length])


def yarn_scaling(config: TransformerConfig, max_sequence_length: int) -> YarnScaling:
    """Build the YaRN scaling of ``config``; ``max_sequence_length`` replaces an unset original context length. Raises
    UserError if the context is extended, the original length is unset, and attention is not multi-latent."""
    original = config.yarn_original_max_position_embeddings
    if original is None and config.rotary_scaling_factor > 1 and not config.multi_latent_attention:
        raise UserError(
            "position_embedding_type 'yarn' with rotary_scaling_factor > 1 needs "
            "yarn_original_max_position_embeddings, the context length before stretching"
        )
    return YarnScaling(
        factor=config.rotary_scaling_factor,
        original_max_position_embeddings=original or max_sequence_length,
        beta_fast=config.yarn_beta_fast,
        beta_slow=config.yarn_beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        round_to_int=config.yarn_correction_range_round_to_int,
    )


LATENT_CONTEXT = 4096
"""Default original context length of multi-latent attention: DeepSeek's, and Megatron-LM's default."""


def latent_rotary(config: TransformerConfig, base: float, percent: float) -> RotaryEmbedding | None:
    """Build the rotary embedding of multi-latent attention for ``qk_pos_emb_head_dim`` channels: plain with rope_type
    "rope", else with YaRN scaling, whose original context is 4096 tokens unless configured. As in Megatron-LM, YaRN
    ignores ``percent``. None with rope_type "none"."""
    if config.rope_type == "none":
        return None
    channels, dtype = config.qk_pos_emb_head_dim, config.params_dtype
    if config.rope_type == "rope":
        return RotaryEmbedding(channels, percent, rotary_base=base, dtype=dtype)
    scaling = yarn_scaling(config, LATENT_CONTEXT)
    return RotaryEmbedding(channels, rotary_base=base, dtype=dtype, scaling=scaling)


def latent_softmax_scale(config: TransformerConfig) -> float:
    """Return the softmax scale of multi-latent attention: mscale^2 / sqrt(nope dim + rope dim), for both rope types."""
    sharp = sharpening(config.rotary_scaling_factor, config.mscale_all_dim)
    return sharp**2 / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim)
