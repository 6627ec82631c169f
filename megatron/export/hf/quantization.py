"""``quantization_config`` of a ``config.json``: the quantized formats that can be read. Torch-free."""

from __future__ import annotations

from typing import Literal

from megatron.export.hf.settings import Table, refuse

KEY = "quantization_config"
BLOCK_SIZE = [128, 128]
"""Rows and columns of a block with one fp8 scale."""

Format = Literal["fp8", "mxfp4"]


def weight_format(config: Table) -> Format | None:
    """Return the format of quantized weights; None if none are quantized. Raises UserError for another method than fp8
    blocks and MXFP4, other blocks, or static scales of activations."""
    text = config.get("text_config")
    table = config.get(KEY) or (text.get(KEY) if isinstance(text, dict) else None)
    if not table:
        return None
    if not isinstance(table, dict):
        raise refuse(KEY, table, "expected an object")
    method, size, scheme = (table.get(key) for key in ("quant_method", "weight_block_size", "activation_scheme"))
    fix = "use the folder of the model in bf16, or dequantize with transformers (model.dequantize(), save_pretrained)"
    if method not in ("fp8", "mxfp4"):
        reason = "which cannot be converted; fp8 with 128 x 128 blocks and mxfp4 can"
        raise refuse(f"config.json: {KEY}: quant_method", method, f"{reason}; {fix}")
    if method == "fp8" and size != BLOCK_SIZE:
        raise refuse(
            f"config.json: {KEY} of fp8: weight_block_size", size, f"only {BLOCK_SIZE} can be converted; {fix}"
        )
    if method == "fp8" and scheme not in (None, "dynamic"):
        raise refuse(f"config.json: {KEY} of fp8: activation_scheme", scheme, f"only 'dynamic' can be converted; {fix}")
    return "fp8" if method == "fp8" else "mxfp4"


def without_quantization(config: Table) -> dict[str, object]:
    """Return a ``config.json`` of the same model with weights that are not quantized."""
    parts = {name: without_quantization(value) for name, value in config.items() if name == "text_config" and value}
    return {name: value for name, value in {**config, **parts}.items() if name != KEY}


def written_config(modules_to_not_convert: list[str]) -> dict[str, object]:
    """Return the ``quantization_config`` of fp8 blocks, as in the folders of DeepSeek and Qwen."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": BLOCK_SIZE,
        "modules_to_not_convert": modules_to_not_convert,
    }
