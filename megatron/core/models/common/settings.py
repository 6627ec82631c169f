"""Settings that the constructors of all language models share, in the names and defaults of Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.attention.rotary import (
    LengthScaling,
    Llama3Scaling,
    RotaryEmbedding,
    Scaling,
    latent_rotary,
    yarn_scaling,
)
from megatron.core.config.errors import UserError
from megatron.core.config.rope_parameters import parse_rope_parameters
from megatron.core.config.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.common.description import Vocabulary

PositionEmbeddingType = Literal["learned_absolute", "rope", "yarn", "none", "relative"]


@dataclass(frozen=True, kw_only=True)
class LanguageModelSettings:
    """Vocabulary, positions, stage and seed of one pipeline stage of a language model."""

    vocab_size: int
    """Unpadded size. The stored size is padded to a multiple of ``make_vocab_size_divisible_by``; the padding takes
    part in no computation."""
    max_sequence_length: int
    pre_process: bool = True
    """Whether this stage has the embedding."""
    post_process: bool = True
    """Whether this stage has the output layer."""
    parallel_output: bool = True
    """Whether logits stay split over the tensor-parallel ranks."""
    fp16_lm_cross_entropy: bool = False
    """Ignored."""
    share_embeddings_and_output_weights: bool = False
    position_embedding_type: PositionEmbeddingType = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: float = 10000
    rope_scaling: bool = False
    """Whether rotary frequencies are scaled as in Llama 3, by ``rope_scaling_factor``."""
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    relative_attention_num_buckets: int = 32
    """Buckets of "relative" positions (T5), and the distance from which on all share the last one."""
    relative_attention_max_distance: int = 128
    make_vocab_size_divisible_by: int = 128
    seed: int | None = None
    """Seed of initial weights and dropout; None: ``config.seed``."""
    groups: ProcessGroups | None = None
    """None: the groups of ``parallel_state``."""
    branches: range | None = None
    """This stage's branches, counted from 0 over all layers; None: those that ``pipeline_parallel.stages`` assigns to
    this rank and ``vp_stage``."""
    vp_stage: int | None = None
    """Chunk of an interleaved schedule; None: the chunk of ``parallel_state``."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Sizes of the word embedding and the output layer."""
        shared = self.share_embeddings_and_output_weights
        return Vocabulary(self.vocab_size, shared, self.make_vocab_size_divisible_by)

    def rotary(self, config: TransformerConfig) -> RotaryEmbedding | None:
        """Return the rotary embedding of ``config`` at ``rotary_base`` (an MLATransformerConfig has its own); None for
        kinds of positions that do not rotate. Raises UserError for an unknown kind."""
        kind = self.position_embedding_type
        if kind not in ("learned_absolute", "rope", "yarn", "none"):
            raise UserError(f"position_embedding_type {kind!r}: choose learned_absolute, rope, yarn or none")
        if isinstance(config, MLATransformerConfig):
            return latent_rotary(config, config.rotary_base, config.rotary_percent)
        if config.multi_latent_attention:
            return latent_rotary(config, self.rotary_base, self.rotary_percent)
        if kind not in ("rope", "yarn"):
            return None
        scaling: Scaling | None = Llama3Scaling(self.rope_scaling_factor) if self.rope_scaling else None
        if config.rope_parameters is not None:
            scaling = LengthScaling(parse_rope_parameters(config.rope_parameters))
        if kind == "yarn":
            scaling = yarn_scaling(config, self.max_sequence_length)
        return RotaryEmbedding(
            config.kv_channels,
            self.rotary_percent,
            rotary_base=self.rotary_base,
            dtype=config.params_dtype,
            interpolation=self.seq_len_interpolation_factor,
            scaling=scaling,
        )

    def local_rotary(self, config: TransformerConfig) -> RotaryEmbedding | None:
        """Return the rotary embedding of sliding-window layers at base ``config.rotary_base_local``, unscaled; None if
        that is unset, for kinds other than "rope" and "yarn", and for latent attention."""
        kind, base = self.position_embedding_type, config.rotary_base_local
        if kind not in ("rope", "yarn") or base is None or config.multi_latent_attention:
            return None
        return RotaryEmbedding(config.kv_channels, self.rotary_percent, rotary_base=base, dtype=config.params_dtype)
