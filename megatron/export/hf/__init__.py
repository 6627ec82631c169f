"""Import and export of Hugging Face models. Each model family is a table in ``families/``.

settings, attention_settings   rules between config.json and command-line settings
layouts                        mapping between local and HF tensor layouts
family, registry               the table type; lookup of families
conversion                     lazy conversion of tensors
reader, writer                 HF folders"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron.export.files import Target
    from megatron.export.hf.quantization import Quantize
    from megatron.export.interchange import Interchange

MAX_SHARD_BYTES = 5 * 10**9


def load_hf_settings(folder: str | os.PathLike, model_family: str | None = None) -> dict[str, Any]:
    """Convert the ``config.json`` of ``folder`` to command-line settings; models of images and text are read as
    ``model_family``, or as text. Raises UserError for an unknown family, or a value that settings cannot represent."""
    from megatron.export.hf.registry import load_settings

    return load_settings(Path(folder), model_family)[1]


def load_hf(folder: str | os.PathLike, model_family: str | None = None) -> Interchange:
    """Open a HF folder: ``config.json`` and safetensors or ``.bin`` weights, in one file or several with an index.
    Models of images and text are read as ``model_family``, or as text.

    Tensors are lazy; fp8 blocks and MXFP4 are read as bf16. Assets are the tokenizer files (``tokenizer/…``),
    ``hf/config.json`` and ``hf/generation_config.json``; :func:`save_hf` copies keys from the latter that settings do
    not determine. Raises UserError: config.json has a value that cannot be represented, or a tensor is missing,
    unexpected, damaged or of the wrong shape."""
    from megatron.export.hf.reader import load

    return load(Path(folder), model_family)


def save_hf(
    model: Interchange,
    folder: str | os.PathLike | Target,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    family: str | None = None,
    preferred: str | None = None,
    original: str | os.PathLike | None = None,
    quantize: Quantize | None = None,
) -> None:
    """Write ``model`` as a HF folder, atomically: ``folder`` is complete or does not exist.

    If ``folder`` is a ``Target``, resumes its earlier attempt and leaves publishing to the caller.

    Args:
        dtype: cast weights to this dtype; None: unchanged.
        max_shard_bytes: maximum file size; a larger tensor gets a separate file.
        family: the ``model_type`` to write. None: the source folder's, else ``preferred``, if the settings still
            match it; else llama or t5, else the first family that matches.
        preferred: the ``model_type`` to write if several families match.
        original: HF folder with the same model: the result is a copy of it in which only the weights of ``model``
            change. Everything else keeps its bytes; its dtypes and its family apply. Its quantized weights become
            bf16.
        quantize: "fp8-blocks": linear layers of decoders in fp8 (e4m3) with a scale per 128 x 128 block, as in the
            folders of DeepSeek-V3 and Qwen3-FP8. "fp8-dynamic": with one scale per layer, in the form of
            compressed-tensors. A table of linear layers, such as decoder.layers.0.mlp.linear_fc1, and static scales of
            their inputs: the same with these scales. None: not quantized. Ignored with ``original``.

    Raises:
        UserError: the folder exists or cannot be written, no family matches, a tensor is missing or unexpected, or
            ``original`` contains another model."""
    from megatron.export.hf.writer import save

    where = Path(folder) if isinstance(folder, str | os.PathLike) else folder
    place = None if original is None else Path(original)
    names = {"family": family, "preferred": preferred}
    save(model, where, dtype, max_shard_bytes=max_shard_bytes, original=place, quantize=quantize, **names)
