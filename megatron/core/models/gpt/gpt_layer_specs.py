"""Layer specs of GPT models: slots filled from a backend."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from megatron.core.config.moe import has_experts
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.backends import get_backend
from megatron.core.models.common.layer_specs import layer_spec
from megatron.core.transformer import multi_token_prediction as prediction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

_FOLLOWS_FROM_CONFIG = {"normalization", "moe_use_legacy_grouped_gemm", "use_te_op_fuser", "use_kitchen", "vp_stage"}
"""Arguments of existing programs that choose nothing: the configuration, or the stage being built, says it."""


def _accept(names: Iterable[str]) -> None:
    if strange := sorted(set(names) - _FOLLOWS_FROM_CONFIG):
        raise TypeError(f"layer specs have no argument {', '.join(strange)}")


def _layer_spec(
    backend: str, num_experts: int | None = None, moe_grouped_gemm: bool = False, qk_layernorm: bool = False,
    multi_latent_attention: bool = False, fp8: str | None = None, *, qk_l2_norm: bool = False, **accepted: object,
) -> ModuleSpec:  # fmt: skip
    _accept(accepted)
    return layer_spec(
        get_backend(backend), qk_layernorm=qk_layernorm, qk_l2_norm=qk_l2_norm, experts=bool(num_experts),
        multi_latent_attention=multi_latent_attention,
    )  # fmt: skip


get_gpt_layer_local_spec = partial(_layer_spec, "local")
"""A layer from torch alone. Norms of queries and keys are also built when the configuration asks for them; what
follows from the configuration (``fp8`` and the rest) is accepted for programs that pass it."""

get_gpt_layer_with_transformer_engine_spec = partial(_layer_spec, "transformer_engine")
"""A layer of Transformer Engine modules; ValueError with the command that installs the package where it is missing."""


def get_gpt_decoder_block_spec(
    config: TransformerConfig, use_transformer_engine: bool = False, **accepted: object
) -> TransformerBlockSubmodules:
    """One spec per layer of the whole model, and the final norm, as the configuration asks for them."""
    _accept({*accepted} - {"qk_l2_norm"})
    backend = get_backend("transformer_engine" if use_transformer_engine else "local")
    kinds = {name: getattr(config, name) for name in ("qk_layernorm", "qk_l2_norm", "multi_latent_attention")}
    layers = [
        layer_spec(backend, **kinds, experts=has_experts(config, number)) for number in range(1, config.num_layers + 1)
    ]
    return TransformerBlockSubmodules(layers, backend.norm)


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: ModuleSpec | TransformerBlockSubmodules,
    use_transformer_engine: bool = False,
    **accepted: object,
) -> prediction.MultiTokenPredictionBlockSubmodules | None:
    """Depths that predict further tokens, each with a layer like the last one of ``spec``; None without any. For all
    pipeline stages alike: the model knows which of them has those."""
    _accept({*accepted} - {"vp_stage"})
    if config.mtp_num_layers is None:
        return None
    norm = get_backend("transformer_engine" if use_transformer_engine else "local").norm
    last = spec if isinstance(spec, ModuleSpec) else spec.layer_specs[-1]
    slots = prediction.MultiTokenPredictionLayerSubmodules(last, norm, norm, norm)
    depth = ModuleSpec(prediction.MultiTokenPredictionLayer, submodules=slots)
    return prediction.MultiTokenPredictionBlockSubmodules([depth] * config.mtp_num_layers)
