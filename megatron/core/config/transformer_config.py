"""The library's configuration of a transformer: every field a layer reads, in one flat object. Torch-free at import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args

from megatron.core.config.attention import AttentionConfig
from megatron.core.config.cli import ConfigError, Problem, derived
from megatron.core.config.memory import RecomputeConfig
from megatron.core.config.mla import LatentAttentionConfig
from megatron.core.config.model_parallel_config import ModelParallelConfig, ParallelismConfig, PrecisionConfig
from megatron.core.config.moe import MoEConfig, TokenDispatcher
from megatron.core.config.mtp import MTPConfig
from megatron.core.config.network import InitializationConfig, NetworkSizeConfig, ScaledOutputConfig
from megatron.core.config.optional import MultiplierConfig
from megatron.core.config.pipeline import PipelineConfig


def default_ffn_hidden_size(hidden_size: int, *, gated: bool) -> int:
    """4 x hidden, or for SwiGLU 8/3 x hidden rounded down to a multiple of 64 (at least 64)."""
    if not gated:
        return 4 * hidden_size
    return max(64, int(hidden_size * 4 * 2 / 3) // 64 * 64)


_RENAMED = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "layernorm_epsilon": "norm_epsilon",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
_ACTIVATIONS = {("silu", True): "swiglu", ("quick_gelu", True): "quick_geglu", ("squared_relu", False): "squared_relu",
                ("relu", False): "relu", ("fast_gelu", True): "geglu"}  # fmt: skip
"""Our switch by the name of Megatron-LM's ``activation_func`` and by ``gated_linear_unit``."""


@dataclass(kw_only=True)
class ModelSettings(
    NetworkSizeConfig,
    MultiplierConfig,
    ScaledOutputConfig,
    AttentionConfig,
    LatentAttentionConfig,
    MoEConfig,
    MTPConfig,
    InitializationConfig,
    ParallelismConfig,
    PrecisionConfig,
    PipelineConfig,
    RecomputeConfig,
):
    """The flags that layers read, shared by a model's configuration and the command line. Fields only."""


def following_sizes(settings: ModelSettings) -> dict[str, Any]:
    """Return {name: value} for the number of query groups, head dim, FFN size, embedding init std and (with experts)
    expert FFN size, each only if it is None in ``settings``, derived from the others; None if these are missing too.
    Changes nothing."""
    hidden, heads = settings.hidden_size, settings.num_attention_heads
    values = {
        "num_query_groups": heads,
        "kv_channels": max(hidden // heads, 1) if hidden and heads else None,
        "ffn_hidden_size": default_ffn_hidden_size(hidden, gated=settings.swiglu) if hidden else None,
        "embedding_init_method_std": settings.init_method_std,
    }
    if settings.num_moe_experts is not None:
        values["moe_ffn_hidden_size"] = settings.ffn_hidden_size or values["ffn_hidden_size"]
    return {name: value for name, value in values.items() if getattr(settings, name) is None}


@dataclass(kw_only=True)
class TransformerConfig(ModelParallelConfig, ModelSettings):
    """Sizes and choices of a transformer.

    ``num_query_groups``, ``ffn_hidden_size``, ``kv_channels`` and ``embedding_init_method_std`` follow from the other
    sizes when they are None. Impossible sizes raise one :class:`~megatron.core.config.cli.ConfigError`
    with all of them.
    """

    use_cpu_initialization: bool = derived(False)
    """Build the model on the CPU, not on the current GPU."""

    @property
    def layernorm_epsilon(self) -> float:
        """The older name of ``norm_epsilon``."""
        return self.norm_epsilon

    @classmethod
    def in_our_words(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments ``given`` of Megatron-LM's constructor under the names that they have here, a new dict:
        older names (which win), single values for lists, fused activations, activation functions. Drops settings of the
        training loop and, without CUDA graphs, cuda_graph_* settings. Other names stay unchecked.

        Raises:
            ConfigError: an activation that this library does not have.
        """
        # older names take precedence: ``dataclasses.replace`` passes all fields in addition to the requested names
        settings = {name: value for name, value in given.items() if name not in _RENAMED}
        settings |= {_RENAMED[name]: value for name, value in given.items() if name in _RENAMED}
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
            if not isinstance(settings.get(name, []), list):
                settings[name] = [settings[name]]
        if "bias_activation_fusion" in settings:
            fused = settings.pop("bias_activation_fusion")
            settings = {"bias_gelu_fusion": fused, "bias_swiglu_fusion": fused} | settings
        settings.pop("barrier_with_L1_time", None)  # this and the next are flags of the training loop
        if settings.get("cuda_graph_impl", "none") == "none":
            settings = {name: value for name, value in settings.items() if not name.startswith("cuda_graph_")}
        if "persist_layer_norm" in settings:
            settings["no_persist_layer_norm"] = not settings.pop("persist_layer_norm")
        if {"activation_func", "gated_linear_unit"} & settings.keys():
            function, gated = settings.pop("activation_func", None), settings.pop("gated_linear_unit", False)
            name = "gelu" if function is None else getattr(function, "__name__", type(function).__name__)
            kind = name, bool(gated)
            if kind != ("gelu", False):
                if kind not in _ACTIVATIONS:
                    reason = f"{'gated' if gated else 'plain'} {kind[0]} is not available"
                    fix = "gelu, relu and squared_relu, or with gated_linear_unit silu, quick_gelu and fast_gelu"
                    raise ConfigError([Problem("activation_func", reason, fix=fix)])
                settings[_ACTIVATIONS[kind]] = True
        return settings

    def __post_init__(self) -> None:
        """Raise ConfigError with all impossible sizes; then fill in, in place, derived sizes that are None, the number
        of virtual stages, and ``pipeline_dtype`` fp32 for an fp32 residual stream."""
        if problems := list(self._impossible_sizes()):
            raise ConfigError(problems)
        for name, value in following_sizes(self).items():
            setattr(self, name, value)
        if self.virtual_pipeline_model_parallel_size is not None and self.num_virtual_stages_per_pipeline_rank is None:
            self.num_virtual_stages_per_pipeline_rank = self.virtual_pipeline_model_parallel_size

    def _impossible_sizes(self) -> Iterator[Problem]:
        """Yield problems of the configuration: missing basic sizes (nothing else is checked then), heads, latent
        attention, experts, fp16 with bf16, several activations, sequence parallelism without tensor parallelism,
        dropout outside [0, 1)."""
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            value = getattr(self, name)
            if value is None or value < 1:
                yield Problem(name, "must be a positive integer", value)
                return
        yield from self._impossible_heads()
        yield from self._impossible_latents()
        yield from self._impossible_experts()
        if self.fp16 and self.bf16:
            yield Problem("fp16", "excludes bf16", True, "choose one of the two")
        if sum((self.swiglu, self.squared_relu, self.relu, self.quick_geglu, self.geglu)) > 1:
            yield Problem("swiglu", "only one of swiglu, squared_relu, relu, quick_geglu and geglu can be chosen")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield Problem("sequence_parallel", "needs tensor_model_parallel_size > 1", True)
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                yield Problem(name, "must be at least 0 and less than 1", getattr(self, name))

    def _impossible_heads(self) -> Iterator[Problem]:
        """Yield problems of the attention heads: they must divide ``hidden_size`` (without ``kv_channels`` or latent
        attention), be a multiple of the query groups and of the tensor-parallel size; norms across heads need
        RMSNorm."""
        heads, groups, hidden = self.num_attention_heads, self.num_query_groups, self.hidden_size
        if heads is None or hidden is None:
            return
        if self.kv_channels is None and hidden % heads and not self.multi_latent_attention:
            yield Problem("num_attention_heads", f"does not divide hidden_size {hidden}", heads, "or give kv_channels")
        if groups is not None and (groups < 1 or heads % groups):
            yield Problem("num_query_groups", f"must divide num_attention_heads {heads}", groups)
        if self.qk_layernorm_across_heads and self.normalization != "RMSNorm":
            yield Problem("qk_layernorm_across_heads", "needs normalization RMSNorm", True)
        if heads % self.tensor_model_parallel_size:
            size = self.tensor_model_parallel_size
            yield Problem("num_attention_heads", f"is not a multiple of tensor_model_parallel_size {size}", heads)

    def _impossible_latents(self) -> Iterator[Problem]:
        """Yield problems of multi-latent attention: settings of ordinary attention that it excludes (grouped queries,
        interleaved rotation, L2 norm, QKV bias, norms across heads, softmax scale), an odd rope dimension, a fused down
        projection without ``q_lora_rank``."""
        if not self.multi_latent_attention:
            return
        if self.num_query_groups not in (None, self.num_attention_heads):
            yield Problem("num_query_groups", "excludes multi_latent_attention", self.num_query_groups, "remove it")
        for name in ("rotary_interleaved", "qk_l2_norm", "add_qkv_bias", "qk_layernorm_across_heads", "softmax_scale"):
            if getattr(self, name):
                yield Problem(name, "excludes multi_latent_attention", getattr(self, name), "remove it")
        if self.qk_pos_emb_head_dim % 2:
            yield Problem("qk_pos_emb_head_dim", "must be even: pairs are rotated", self.qk_pos_emb_head_dim)
        if self.mla_down_proj_fusion and self.q_lora_rank is None:
            yield Problem("mla_down_proj_fusion", "needs q_lora_rank", True)

    def _impossible_experts(self) -> Iterator[Problem]:
        """Yield problems of experts: EP above 1 without experts; experts not divisible by EP, ``moe_router_topk`` above
        their number, a layer pattern of another length, an unknown dispatcher. For dense models other MoE settings are
        ignored."""
        experts, pattern = self.num_moe_experts, self.moe_layer_freq
        if experts is None:  # programs pass moe_* settings to every model; a dense one reads none of them
            if self.expert_model_parallel_size > 1:
                size, fix = self.expert_model_parallel_size, "give it, or make expert_model_parallel_size 1"
                yield Problem("num_moe_experts", f"is needed by expert_model_parallel_size {size}", fix=fix)
            return
        if experts % self.expert_model_parallel_size:
            size = self.expert_model_parallel_size
            yield Problem("num_moe_experts", f"is not a multiple of expert_model_parallel_size {size}", experts)
        if self.moe_router_topk > experts:
            yield Problem("moe_router_topk", f"is more than num_moe_experts {experts}", self.moe_router_topk)
        if isinstance(pattern, list) and len(pattern) != self.num_layers:
            reason = f"has {len(pattern)} entries for num_layers {self.num_layers}"
            yield Problem("moe_layer_freq", reason, pattern, "give a 0 or 1 for every layer")
        if self.moe_token_dispatcher_type not in (kinds := get_args(TokenDispatcher)):
            yield Problem("moe_token_dispatcher_type", f"is none of {', '.join(kinds)}", self.moe_token_dispatcher_type)


def config_from_settings(settings: Any, config_class: type[TransformerConfig] | None = None) -> TransformerConfig:
    """Return the configuration of the transformer that flat ``settings``, such as ``get_args()``, describe. Expert
    settings of a model without experts are ignored. ``config_class``: class to build; None: TransformerConfig."""
    names = {field.name for field in fields(ModelSettings)}
    if settings.num_moe_experts is None:
        names -= {field.name for field in fields(MoEConfig)}
    return (config_class or TransformerConfig)(**{name: getattr(settings, name) for name in names})


@dataclass(kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """Transformer with multi-latent attention, with the defaults of Megatron-LM's library (its command
    line has other defaults)."""

    multi_latent_attention: bool = True
    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    rotary_scaling_factor: float = 40.0
