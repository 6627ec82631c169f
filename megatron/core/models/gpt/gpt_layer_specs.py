"""Layer specs of GPT models, built from a backend."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from megatron import serve_other_names
from megatron.core.config.hybrid import depth_kinds
from megatron.core.config.layer_kinds import layer_kinds
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.backends import get_backend
from megatron.core.models.common.layer_specs import layer_spec
from megatron.core.transformer import multi_token_prediction as prediction
from megatron.core.transformer.norm import L2Norm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

_FOLLOWS_FROM_CONFIG = {
    "experimental_attention_variant",
    "kitchen_attention_backend",
    "mla_down_proj_fusion",
    "moe_use_legacy_grouped_gemm",
    "normalization",
    "use_grouped_gemm_for_dense_mlp",
    "use_kitchen",
    "use_kitchen_attention",
    "use_te_activation_func",
    "use_te_op_fuser",
    "vp_stage",
}
"""Ignored arguments of existing programs: the configuration or the pipeline stage determines them."""


def _accept(names: Iterable[str]) -> None:
    if unknown := sorted(set(names) - _FOLLOWS_FROM_CONFIG):
        raise TypeError(f"layer specs have no argument {', '.join(unknown)}")


def _layer_spec(
    backend: str,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: str | None = None,
    *,
    qk_l2_norm: bool = False,
    **accepted: object,
) -> ModuleSpec:
    _accept(accepted)
    modules = get_backend(backend)
    norm = L2Norm if qk_l2_norm and not multi_latent_attention else modules.norm if qk_layernorm else None
    kinds = "latent_attention" if multi_latent_attention else "attention", "experts" if num_experts else "mlp"
    return layer_spec(modules, kinds, qk_norm=norm)


get_gpt_layer_local_spec = partial(_layer_spec, "local")
"""Spec of a layer that needs only torch. Norms of queries and keys are also built if the configuration enables them.
Arguments that the configuration determines (``fp8`` and others) are accepted and ignored."""

get_gpt_layer_with_transformer_engine_spec = partial(_layer_spec, "transformer_engine")
"""Spec of a Transformer Engine layer. Without the package: local modules with its parameter names."""


def get_gpt_decoder_layer_specs(
    config: TransformerConfig, use_transformer_engine: bool = False, **accepted: object
) -> list[ModuleSpec]:
    """Return one spec per layer of the full model; ``config`` selects attention and which layers are MoE. Known
    arguments of Megatron-LM in ``accepted`` are ignored. Raises TypeError: an argument is unknown."""
    _accept({*accepted} - {"qk_l2_norm"})
    backend = get_backend("transformer_engine" if use_transformer_engine else "local")
    return [layer_spec(backend, layer_kinds(config, number)) for number in range(1, config.num_layers + 1)]


def get_gpt_decoder_block_spec(
    config: TransformerConfig, use_transformer_engine: bool = False, **accepted: object
) -> TransformerBlockSubmodules:
    """Return the specs of :func:`get_gpt_decoder_layer_specs` and the final norm."""
    layers = get_gpt_decoder_layer_specs(config, use_transformer_engine, **accepted)
    backend = get_backend("transformer_engine" if use_transformer_engine else "local")
    return TransformerBlockSubmodules(layers, backend.norm)


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: ModuleSpec | TransformerBlockSubmodules,
    use_transformer_engine: bool = False,
    **accepted: object,
) -> prediction.MultiTokenPredictionBlockSubmodules | None:
    """Return the spec of the multi-token prediction depths, each with the layers of a depth of the hybrid pattern, else
    with a layer like the last one of ``spec``; None without ``mtp_num_layers``. Pass the same result on all pipeline
    stages: the model builds the depths on the last stage only."""
    _accept({*accepted} - {"vp_stage"})
    if config.mtp_num_layers is None:
        return None
    backend = get_backend("transformer_engine" if use_transformer_engine else "local")
    norm = backend.norm
    last = spec if isinstance(spec, ModuleSpec) else spec.layer_specs[-1]
    if kinds := depth_kinds(config):
        last = ModuleSpec(prediction.PredictionLayers, submodules=[layer_spec(backend, (kind,)) for kind in kinds])
    slots = prediction.MultiTokenPredictionLayerSubmodules(last, norm, norm, norm)
    depth = ModuleSpec(prediction.MultiTokenPredictionLayer, submodules=slots)
    return prediction.MultiTokenPredictionBlockSubmodules([depth] * config.mtp_num_layers)


serve_other_names(__name__)
