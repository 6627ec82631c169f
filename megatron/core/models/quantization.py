"""Quantization-aware training as a model transform, and the rules of its flag. Torch-free:
``tensor_parallel/fake_quantization.py`` has the GEMMs. Parameters and checkpoints do not change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.config.lora import LoraConfig
from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.config.quantization import QuantizationConfig
from megatron.core.models.transforms import ModelTransform

if TYPE_CHECKING:
    from torch import nn

    from megatron.core.groups.process_groups import ProcessGroups


class QuantizationTransform(ModelTransform):
    """Lets linear layers compute with fake-quantized weights and inputs."""

    def apply(self, model: nn.Module, groups: ProcessGroups) -> None:
        from megatron.core.tensor_parallel.fake_quantization import quantize_layers

        quantize_layers(model, groups)


def quantization_transform(cfg: Settings) -> QuantizationTransform | None:
    """Return the transform of --export-quant-cfg; None without it."""
    return None if cfg.group(QuantizationConfig).export_quant_cfg is None else QuantizationTransform()


def quantization_needs_plain_linear_layers(cfg: Settings) -> Problems:
    """Reject settings that replace the GEMMs or weights of linear layers themselves."""
    model = cfg.model
    unsupported = {
        f"--transformer-impl {model.transformer_impl}": model.transformer_impl != "local",
        "--fp8-format": model.fp8 is not None,
        "--batch-invariant-mode": model.batch_invariant_mode,
        "--lora-rank": cfg.group(LoraConfig).lora_rank is not None,
    }
    for flag in [flag for flag, is_on in unsupported.items() if is_on]:
        if cfg.group(QuantizationConfig).export_quant_cfg is not None:
            yield problem(cfg, "export_quant_cfg", f"is not supported with {flag}", "remove one of them")
