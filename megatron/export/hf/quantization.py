"""``quantization_config`` of a ``config.json``: the quantized formats that can be read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron.export.hf.settings import Table, refuse

KEY = "quantization_config"
BLOCK_SIZE = [128, 128]
"""Rows and columns of a block with one fp8 scale."""

Format = Literal["fp8", "mxfp4", "float-quantized"]
"""fp8 in blocks, MXFP4, or fp8 with one scale per matrix or row (compressed-tensors)."""
Form = Literal["fp8-dynamic", "fp8-blocks"]
"""Forms of quantized weights without static scales of inputs that can be written: one scale per layer, or blocks."""
Quantize = Form | Mapping[str, float]
"""Form; or static scales of inputs by local names of linear layers, such as decoder.layers.0.mlp.linear_fc1."""


def weight_format(config: Table) -> Format | None:
    """Return the format of quantized weights; None if none are quantized. UserError for an unknown form."""
    text = config.get("text_config")
    table = config.get(KEY) or (text.get(KEY) if isinstance(text, dict) else None)
    if not table:
        return None
    if not isinstance(table, dict):
        raise refuse(KEY, table, "expected an object")
    method, size, scheme = (table.get(key) for key in ("quant_method", "weight_block_size", "activation_scheme"))
    fix = "use the folder of the model in bf16, or dequantize with transformers (model.dequantize(), save_pretrained)"
    if method == "compressed-tensors":
        groups = table.get("config_groups")
        readable = isinstance(groups, dict) and all(_has_one_scale(group) for group in groups.values())
        if table.get("format") != "float-quantized" or not readable or table.get("kv_cache_scheme"):
            reason = f"only fp8 with one scale per matrix or row can be converted, without a cache scheme; {fix}"
            raise refuse(f"config.json: {KEY} of 'compressed-tensors': format", table.get("format"), reason)
        return "float-quantized"
    if method not in ("fp8", "mxfp4"):
        reason = "which cannot be converted; fp8 and mxfp4 can"
        raise refuse(f"config.json: {KEY}: quant_method", method, f"{reason}; {fix}")
    if method == "fp8" and size != BLOCK_SIZE:
        raise refuse(
            f"config.json: {KEY} of fp8: weight_block_size", size, f"only {BLOCK_SIZE} can be converted; {fix}"
        )
    if method == "fp8" and scheme not in (None, "dynamic"):
        raise refuse(f"config.json: {KEY} of fp8: activation_scheme", scheme, f"only 'dynamic' can be converted; {fix}")
    return "fp8" if method == "fp8" else "mxfp4"


def _has_one_scale(group: object) -> bool:
    """Return whether a group of compressed-tensors has fp8 weights with a scale per matrix or row."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("strategy") not in ("tensor", "channel"):
        return False
    return (weights.get("num_bits"), weights.get("type")) == (8, "float")


def without_quantization(config: Table) -> dict[str, object]:
    """Return a ``config.json`` of the same model with weights that are not quantized."""
    parts = {name: without_quantization(value) for name, value in config.items() if name == "text_config" and value}
    return {name: value for name, value in {**config, **parts}.items() if name != KEY}


def written_config(quantize: Quantize, modules_to_not_convert: list[str]) -> dict[str, object]:
    """Return the ``quantization_config``: of fp8 blocks as in the folders of DeepSeek and Qwen, else of
    compressed-tensors, which vLLM and SGLang load."""
    if quantize != "fp8-blocks":
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        is_dynamic = quantize == "fp8-dynamic"
        inputs = {**number, "strategy": "token" if is_dynamic else "tensor", "dynamic": is_dynamic}
        weights = {**number, "strategy": "tensor", "dynamic": False}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
            "ignore": modules_to_not_convert,
        }
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": BLOCK_SIZE,
        "modules_to_not_convert": modules_to_not_convert,
    }
