"""The library's configuration of a transformer: every field a layer reads, in one flat object. Torch-free at import."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from megatron.core.config.absent import rejected_settings
from megatron.core.config.cli import ConfigError, Problem, derived
from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.config.model_rules import invalid_values, library_problems
from megatron.core.config.model_settings import ModelSettings, following_sizes
from megatron.core.config.moe import MoEConfig
from megatron.core.config.mup import width_multiplier

_RENAMED = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "layernorm_epsilon": "norm_epsilon",
    "fp8_param": "fp8_param_gather",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
_ACTIVATIONS = {
    ("silu", True): "swiglu",
    ("quick_gelu", True): "quick_geglu",
    ("squared_relu", False): "squared_relu",
    ("relu", False): "relu",
    ("fast_gelu", True): "geglu",
}
"""Our switch by the name of Megatron-LM's ``activation_func`` and by ``gated_linear_unit``."""
_PLAIN_GELU = "gelu", False
"""The activation without a switch."""


@dataclass(kw_only=True)
class TransformerConfig(ModelParallelConfig, ModelSettings):
    """Sizes and choices of a transformer. ``num_query_groups``, ``ffn_hidden_size`` (4 x hidden), ``kv_channels`` and
    ``embedding_init_method_std`` follow from the other sizes when they are None. Impossible sizes raise one
    :class:`~megatron.core.config.cli.ConfigError` with all of them."""

    use_cpu_initialization: bool = derived(False)
    """Build the model on the CPU, not on the current GPU."""

    attention_softmax_in_fp32: bool = True
    """As in the group of the command line, whose default is False."""

    bias_gelu_fusion: bool = False
    """As in the group of the command line, whose default is True (the tanh approximation of GELU)."""

    impossible_activation: tuple[str, bool] | None = derived(None)
    """Name of ``activation_func`` and ``gated_linear_unit`` as a program gave them, if this library does not have both
    together. Programs may set one of them later, before ``__post_init__``."""

    cuda_graph_impl = "none"
    """Megatron-LM's name; not a setting of models here, since training loops record graphs."""

    @property
    def activation_func(self) -> Any:
        """The torch function of the feed-forward network, under Megatron-LM's name. Imports torch."""
        import torch
        import torch.nn.functional as F

        if self.squared_relu:
            return lambda x: F.relu(x).square()
        if self.quick_geglu:
            return lambda x: x * torch.sigmoid(1.702 * x)
        if self.geglu:
            return partial(F.gelu, approximate="tanh")
        return F.silu if self.swiglu else F.relu if self.relu else F.gelu

    @activation_func.setter
    def activation_func(self, function: Any) -> None:
        self._choose_activation((_name_of(function), self._activation()[1]))

    @ModelSettings.gated_linear_unit.setter  # type: ignore[attr-defined]
    def gated_linear_unit(self, gated: bool) -> None:
        self._choose_activation((self._activation()[0], bool(gated)))

    def _activation(self) -> tuple[str, bool]:
        """Megatron-LM's name of the activation, and whether there is a gate."""
        chosen = (names for names, switch in _ACTIVATIONS.items() if getattr(self, switch))
        return self.impossible_activation or next(chosen, _PLAIN_GELU)

    def _choose_activation(self, names: tuple[str, bool]) -> None:
        vars(self).update(dict.fromkeys(_ACTIVATIONS.values(), False) | _switches(names))

    @property
    def bias_activation_fusion(self) -> bool:
        """Whether the activation has a fused kernel, under Megatron-LM's name."""
        return self.bias_swiglu_fusion if self.gated_linear_unit else self.bias_gelu_fusion

    @bias_activation_fusion.setter
    def bias_activation_fusion(self, fused: bool) -> None:
        self.bias_swiglu_fusion = self.bias_gelu_fusion = fused

    @property
    def mup_width_mult(self) -> float:
        """Width multiplier of muP, under Megatron-LM's name."""
        return width_multiplier(self)

    @property
    def persist_layer_norm(self) -> bool:
        """Opposite of ``no_persist_layer_norm``, under Megatron-LM's name."""
        return not self.no_persist_layer_norm

    @persist_layer_norm.setter
    def persist_layer_norm(self, persistent: bool) -> None:
        self.no_persist_layer_norm = not persistent

    @classmethod
    def in_our_words(cls, arguments: dict[str, object]) -> dict[str, object]:
        """Return ``arguments`` of Megatron-LM's constructor under the names that they have here, single values for
        lists. Drops settings of the training loop and, without CUDA graphs, cuda_graph_* settings. Other names stay
        unchecked."""
        # not in compat: programs and models have one class, whose objects must answer to both names
        # older names take precedence: ``dataclasses.replace`` passes all fields in addition to the requested names
        settings = {name: value for name, value in arguments.items() if name not in _RENAMED}
        settings |= {_RENAMED[name]: value for name, value in arguments.items() if name in _RENAMED}
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type"):
            if not isinstance(settings.get(name, []), list):
                settings[name] = [settings[name]]
        if "bias_activation_fusion" in settings:
            fused = settings.pop("bias_activation_fusion")
            settings = {"bias_gelu_fusion": fused, "bias_swiglu_fusion": fused} | settings
        if settings.get("mtp_num_layers") == 0:
            settings["mtp_num_layers"] = None
        settings.pop("barrier_with_L1_time", None)  # this and the next are flags of the training loop
        if settings.get("cuda_graph_impl", "none") == "none":
            settings = {name: value for name, value in settings.items() if not name.startswith("cuda_graph_")}
        if "persist_layer_norm" in settings:
            settings["no_persist_layer_norm"] = not settings.pop("persist_layer_norm")
        if {"activation_func", "gated_linear_unit"} & settings.keys():
            function, gated = settings.pop("activation_func", None), settings.pop("gated_linear_unit", False)
            settings |= _switches((_name_of(function), bool(gated)))
        return settings

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            if (value := getattr(self, name)) is None or value < 1:
                raise ConfigError([Problem(name, "must be a positive integer", value)])
        own = {field.name for field in fields(self)}  # the rest was set by a program before it called this method
        if problems := rejected_settings({name: value for name, value in vars(self).items() if name not in own}):
            raise ConfigError(problems)
        if self.impossible_activation:
            name, gated = self.impossible_activation
            reason = f"{'gated' if gated else 'plain'} {name} is not available"
            fix = "gelu, relu and squared_relu, or with gated_linear_unit silu, quick_gelu and fast_gelu"
            raise ConfigError([Problem("activation_func", reason, fix=fix)])
        if problems := invalid_values(self):  # before other checks, which compute with the values
            raise ConfigError(problems)
        derived_sizes = following_sizes(self, gated=False)  # 4 x hidden also with SwiGLU, as in Megatron-LM's library
        for name, value in derived_sizes.items():
            setattr(self, name, value)
        if problems := library_problems(self, vars(self).keys() - derived_sizes.keys()):
            raise ConfigError(problems)
        if (self.virtual_pipeline_model_parallel_size or 1) > 1 and self.pipeline_model_parallel_size == 1:
            reason = "requires pipeline_model_parallel_size > 1"
            size = self.virtual_pipeline_model_parallel_size
            raise ConfigError([Problem("virtual_pipeline_model_parallel_size", reason, size, "remove it")])
        if self.virtual_pipeline_model_parallel_size is not None and self.num_virtual_stages_per_pipeline_rank is None:
            self.num_virtual_stages_per_pipeline_rank = self.virtual_pipeline_model_parallel_size


def _name_of(function: Any) -> str:
    return "gelu" if function is None else getattr(function, "__name__", type(function).__name__)


def _switches(names: tuple[str, bool]) -> dict[str, Any]:
    """The values of fields that stand for an activation of Megatron-LM."""
    if names in _ACTIVATIONS:
        return {_ACTIVATIONS[names]: True, "impossible_activation": None}
    return {"impossible_activation": None if names == _PLAIN_GELU else names}


def _older_name(name: str) -> property:
    return property(lambda config: getattr(config, name), lambda config, value: setattr(config, name, value))


for _older, _name in _RENAMED.items():
    setattr(TransformerConfig, _older, _older_name(_name))


def config_from_settings(settings: Any, config_class: type[TransformerConfig] | None = None) -> TransformerConfig:
    """Return the configuration of the transformer that flat ``settings``, such as ``get_args()``, describe. Expert
    settings of a model without experts are ignored. ``config_class``: class to build; None: TransformerConfig."""
    config_class = config_class or TransformerConfig
    names = {field.name for field in fields(ModelSettings)}
    names |= {"rotary_base", "rotary_percent"} & {field.name for field in fields(config_class)}
    if settings.num_moe_experts is None:
        names -= {field.name for field in fields(MoEConfig)}
    return config_class(**{name: getattr(settings, name) for name in names})


@dataclass(kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """Transformer with multi-latent attention, with the defaults of Megatron-LM's library, not its command line."""

    multi_latent_attention: bool = True
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    rope_type: Literal["rope", "yarn", "none"] | None = "yarn"
    rotary_scaling_factor: float = 40.0
    yarn_original_max_position_embeddings: int | None = 4096

    rotary_base: float = 10000
    """Base of the rotary frequencies; the models' ``rotary_base`` is ignored."""

    rotary_percent: float = 1.0
    """Fraction of the rotary channels that are rotated with ``rope_type`` "rope"; the models' ``rotary_percent`` is
    ignored."""
