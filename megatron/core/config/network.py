"""Shape of a transformer: sizes, normalization, activation, biases, dropout, initial values. Only fields, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.ranges import AnyFloat, Dim, Layers, NonNegativeFloat, PositiveFloat, Probability, Range


@dataclass(kw_only=True)
class NetworkSizeConfig:
    """Network size"""

    num_layers: Layers = flag()
    """Transformer layers. Required."""

    hidden_size: Dim = flag()
    """Width of the residual stream. Required."""

    num_attention_heads: Dim = flag()
    """Query heads per layer. Required."""

    num_query_groups: Dim = flag()
    """Key and value heads per layer, each shared by num-attention-heads / num-query-groups query heads. Read together
    with --group-query-attention, where it defaults to 1 (multi-query attention)."""

    ffn_hidden_size: Dim = flag()
    """Width inside the feed-forward network; default: 4 x hidden size, with --swiglu 8/3 x hidden size rounded down
    to a multiple of 64."""

    kv_channels: Dim = flag()
    """Channels per attention head; default: hidden size / attention heads."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalization layers of the network."""

    norm_epsilon: NonNegativeFloat = 1e-5
    """Added to the variance under the square root of every normalization."""

    apply_layernorm_1p: bool = False
    """Store norm weights minus one: small weights keep more digits in 16-bit types. Norms are never decayed."""

    norm_bias: bool = flag("--disable-norm-bias", default=True)
    """No biases in LayerNorm (ModernBERT). RMSNorm has none."""

    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms of a residual branch. pre: before its mixer; post: behind it, before the residual addition (OLMo 2);
    sandwich: both (Gemma 2)."""

    use_parallel_residual: bool = False
    """Attention and feed-forward network of a layer both read the layer's input, each through its own norm (GPT-NeoX).
    A layer then stays on one pipeline stage."""

    apply_embedding_scaling: bool = False
    """Multiply embeddings by the square root of the hidden size, rounded to the weights' format (Gemma)."""

    embed_layernorm: bool = False
    """Normalise the embedding. The first branch of the first layer has no other norm than that (ModernBERT)."""

    scale_decoder_outputs: bool = False
    """The decoder's output divided by the square root of the hidden size, before a shared output layer without bias
    (T5 1.0)."""

    final_logit_softcapping: PositiveFloat | None = None
    """Cap the output layer's logits softly: cap * tanh(logits / cap) (Gemma 2)."""

    apply_residual_connection_post_layernorm: bool = False
    """Take the residual from behind the normalization, as the original BERT does."""

    add_bias_linear: bool = flag("--disable-bias-linear", default=True)
    """No biases in the linear layers (and no fused bias-GELU then)."""

    add_qkv_bias: bool = False
    """A bias in the query, key and value projection even with --disable-bias-linear (Qwen2)."""

    swiglu: bool = False
    """Gated linear unit with SiLU in the feed-forward network (LLaMA)."""

    squared_relu: bool = False
    """Squared ReLU in the feed-forward network."""

    relu: bool = False
    """ReLU in the feed-forward network (T5 1.0)."""

    quick_geglu: bool = False
    """Gated linear unit with x * sigmoid(1.702 x) in the feed-forward network (gpt-oss)."""

    geglu: bool = False
    """Gated linear unit with the tanh approximation of GELU in the feed-forward network (Gemma, T5 1.1)."""

    exact_gelu: bool = False
    """GELU by the error function in the feed-forward network, with --geglu too (ModernBERT)."""

    activation_func_clamp_value: PositiveFloat | None = None
    """Clamp the feed-forward network's inputs to the activation to at most this value, and its linear half to the range
    of plus and minus this value. Gated activations only."""

    glu_linear_offset: AnyFloat = 0.0
    """Added to the linear half of a gated activation (gpt-oss uses 1)."""

    hidden_dropout: Probability = 0.1
    """Dropout probability of the embedding and of each branch before it joins the residual stream."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in float32."""

    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Where the layers' modules come from: this library, or the package Transformer Engine."""

    bias_gelu_fusion: bool = True
    """No fused bias and GELU. Where there are biases, the fused form uses the tanh approximation of GELU; without it,
    or without biases, GELU is exact. Squared ReLU then is plain torch operations instead of one kernel."""

    bias_swiglu_fusion: bool = True
    """Plain torch operations for gated activations instead of one kernel on GPUs."""

    bias_dropout_fusion: bool = True
    """Plain torch operations for dropout and residual addition instead of one kernel on GPUs; the masks are the
    same."""

    no_persist_layer_norm: bool = False
    """Plain torch operations for norms instead of kernels that take the residual stream along."""

    @property
    def gated_linear_unit(self) -> bool:
        """Whether the feed-forward network multiplies two halves of its first GEMM's output."""
        return self.swiglu or self.quick_geglu or self.geglu


@dataclass(kw_only=True)
class InitializationConfig:
    """Seed and initial values"""

    seed: Annotated[int, Range(0, 2**32 - 1)] = 1234
    """Seed of the initial weights, of dropout and of the data order."""

    init_method_std: NonNegativeFloat = 0.02
    """Standard deviation of the normal distribution that weights start from; those that write into the residual stream
    are divided by sqrt(2 x layers)."""

    embedding_init_method_std: NonNegativeFloat = flag()
    """Standard deviation of the embedding's initial weights; default: --init-method-std."""

    init_method_xavier_uniform: bool = False
    """Xavier-uniform initial weights instead of normal ones."""

    perform_initialization: bool = flag("--no-initialization", default=True)
    """Leave the weights uninitialised; only for runs that load all of them."""
