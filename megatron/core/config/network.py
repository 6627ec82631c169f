"""Shape of a transformer: sizes, normalization, activation, biases, dropout, initial values. Only fields, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import (
    AnyFloat,
    Dim,
    Layers,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Probability,
    Range,
)


@dataclass(kw_only=True)
class NetworkSizeConfig(FlagGroup):
    """Network size"""

    num_layers: Layers = flag()
    """Transformer layers. Required."""

    hidden_size: Dim = flag()
    """Width of the residual stream. Required."""

    num_attention_heads: Dim = flag()
    """Query heads per layer. Required."""

    num_query_groups: Dim = flag()
    """Key and value heads per layer, each used by num-attention-heads / num-query-groups query heads. Read only with
    --group-query-attention, where it defaults to 1 (multi-query attention)."""

    ffn_hidden_size: Dim = flag()
    """Feed-forward width; default: 4 x hidden size, with --swiglu 8/3 x hidden size rounded down to a multiple of
    64."""

    kv_channels: Dim = flag()
    """Channels per attention head; default: hidden size / attention heads."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Type of all normalization layers."""

    norm_epsilon: NonNegativeFloat = 1e-5
    """Epsilon that every normalization adds to the variance under the square root."""

    apply_layernorm_1p: bool = False
    """Store norm weights minus one, so that small deviations keep more digits in 16-bit types. Norm weights never get
    weight decay."""

    norm_bias: bool = flag("--disable-norm-bias", default=True)
    """Biases in LayerNorm (never in RMSNorm); ModernBERT disables them."""

    norm_placement: Literal["pre", "post", "sandwich", "mixed"] = "pre"
    """Norms of a residual branch. pre: before its mixer; post: after it, before the residual addition (OLMo 2);
    sandwich: both (Gemma 2); mixed: before it in layers with linear attention, after it in the others (OLMo-Hybrid)."""

    use_parallel_residual: bool = False
    """Parallel branches: attention and feed-forward network both read the layer's input, each through its norm
    (GPT-NeoX). Pipeline stages then cannot split a layer."""

    share_parallel_norm: bool = False
    """One norm for all branches of --use-parallel-residual (Phi, Falcon 7B, Cohere)."""

    learned_position_offset: NonNegativeInt = 0
    """Rows of the learned position table before the row of the first position (RoBERTa, OPT: 2)."""

    apply_embedding_scaling: bool = False
    """Multiply embeddings by the square root of the hidden size, rounded to the weights' format (Gemma)."""

    embed_layernorm: bool = False
    """Normalize the embedding; the first branch of the first layer then has no norm of its input (ModernBERT)."""

    final_logit_softcapping: PositiveFloat | None = None
    """Soft cap of the output layer's logits: cap * tanh(logits / cap) (Gemma 2)."""

    apply_residual_connection_post_layernorm: bool = False
    """Take the residual after the normalization, as the original BERT does."""

    add_bias_linear: bool = flag("--disable-bias-linear", default=True)
    """Biases in the linear layers. Without them GELU is not fused with the bias."""

    add_qkv_bias: bool = False
    """Bias in the query, key and value projection even with --disable-bias-linear (Qwen2)."""

    swiglu: bool = False
    """SwiGLU: SiLU-gated linear unit in the feed-forward network (LLaMA)."""

    squared_relu: bool = False
    """Squared ReLU in the feed-forward network."""

    relu: bool = False
    """ReLU in the feed-forward network (T5 1.0)."""

    quick_geglu: bool = False
    """Gated linear unit with x * sigmoid(1.702 x) in the feed-forward network (gpt-oss)."""

    geglu: bool = False
    """Gated linear unit with the tanh approximation of GELU in the feed-forward network (Gemma, T5 1.1)."""

    exact_gelu: bool = False
    """Exact GELU (error function) in the feed-forward network, also with --geglu (ModernBERT)."""

    activation_func_clamp_value: PositiveFloat | None = None
    """Clamp the input of a gated activation to at most this value, and its linear half to plus and minus this value."""

    glu_linear_offset: AnyFloat = 0.0
    """Offset added to the linear half of a gated activation (gpt-oss: 1)."""

    hidden_dropout: Probability = 0.1
    """Dropout probability of the embedding and each branch before the residual addition."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in float32."""

    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Implementation of the layers' modules: this library (local) or the package Transformer Engine."""

    bias_gelu_fusion: bool = True
    """Fused kernel for bias and GELU, which uses the tanh approximation; without it, or without biases, GELU is exact.
    Also the fused kernel of squared ReLU."""

    bias_swiglu_fusion: bool = True
    """Fused kernel for gated activations on GPUs, instead of plain torch operations."""

    bias_dropout_fusion: bool = True
    """Fused kernel for dropout and residual addition on GPUs, instead of plain torch operations; the masks are
    equal."""

    no_persist_layer_norm: bool = False
    """Compute norms with plain torch operations instead of kernels that also add the residual."""

    @property
    def gated_linear_unit(self) -> bool:
        """Whether the feed-forward network multiplies two halves of its first GEMM's output."""
        return self.swiglu or self.quick_geglu or self.geglu


@dataclass(kw_only=True)
class ScaledOutputConfig(OptionalGroup):
    """Scaled decoder output"""

    scale_decoder_outputs: bool = False
    """Divide the decoder's output by the square root of the hidden size before a tied output layer without bias (T5
    1.0)."""


@dataclass(kw_only=True)
class InitializationConfig(FlagGroup):
    """Seed and initial values"""

    seed: Annotated[int, Range(0, 2**32 - 1)] = 1234
    """Seed of the initial weights, dropout and the data order."""

    init_method_std: NonNegativeFloat = 0.02
    """Standard deviation of the normal initial weights. Weights whose output is added to the residual stream use it
    divided by sqrt(2 x layers)."""

    embedding_init_method_std: NonNegativeFloat = flag()
    """Standard deviation of the embedding's initial weights; default: --init-method-std."""

    init_method_xavier_uniform: bool = False
    """Xavier-uniform initial weights instead of normal ones."""

    perform_initialization: bool = flag("--no-initialization", default=True)
    """Initialize the weights. Disable only if a checkpoint provides all of them."""
