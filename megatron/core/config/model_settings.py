"""The flags of a model as one group of fields, and the sizes that follow from others. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.attention import AttentionConfig
from megatron.core.config.fp8 import Fp8Config
from megatron.core.config.hybrid import HybridConfig
from megatron.core.config.linear_attention import LinearAttentionConfig
from megatron.core.config.memory import RecomputeConfig
from megatron.core.config.mla import LatentAttentionConfig
from megatron.core.config.model_parallel_config import ParallelismConfig, PrecisionConfig
from megatron.core.config.moe import MoEConfig
from megatron.core.config.mtp import MTPConfig
from megatron.core.config.mup import MupConfig
from megatron.core.config.network import InitializationConfig, NetworkSizeConfig, ScaledOutputConfig
from megatron.core.config.optional import MultiplierConfig
from megatron.core.config.pipeline import PipelineConfig


@dataclass(kw_only=True)
class ModelSettings(
    NetworkSizeConfig,
    MultiplierConfig,
    MupConfig,
    ScaledOutputConfig,
    AttentionConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    HybridConfig,
    MoEConfig,
    MTPConfig,
    InitializationConfig,
    ParallelismConfig,
    PrecisionConfig,
    Fp8Config,
    PipelineConfig,
    RecomputeConfig,
):
    """The flags that layers read, shared by a model's configuration and the command line. Fields only."""


def default_ffn_hidden_size(hidden_size: int, *, gated: bool) -> int:
    """4 x hidden, or for SwiGLU 8/3 x hidden rounded down to a multiple of 64 (at least 64)."""
    if not gated:
        return 4 * hidden_size
    return max(64, int(hidden_size * 4 * 2 / 3) // 64 * 64)


def following_sizes(settings: ModelSettings, *, gated: bool) -> dict[str, object]:
    """Return {name: value} for sizes that are None in ``settings`` and follow from the others. ``gated``: whether the
    feed-forward network has the default size of SwiGLU."""
    hidden, heads = settings.hidden_size, settings.num_attention_heads
    values = {
        "num_query_groups": heads,
        "kv_channels": max(hidden // heads, 1) if hidden and heads else None,
        "ffn_hidden_size": default_ffn_hidden_size(hidden, gated=gated) if hidden else None,
        "embedding_init_method_std": settings.init_method_std,
    }
    if settings.hybrid_layer_pattern is not None and hidden:
        values["mamba_num_heads"] = max(2 * hidden // settings.mamba_head_dim, 1)
    if settings.num_moe_experts is not None:
        values["moe_ffn_hidden_size"] = settings.ffn_hidden_size or values["ffn_hidden_size"]
    channels = settings.kv_channels or values["kv_channels"]
    if settings.use_mup and channels:
        values["softmax_scale"] = (settings.mup_base_head_dim or 1.0) ** 0.5 / channels**settings.mup_attn_scale_power
    return {name: value for name, value in values.items() if getattr(settings, name) is None}
