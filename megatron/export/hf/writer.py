"""Writes a folder that ``from_pretrained`` and vLLM take as it is: weights, ``config.json``, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.core.config.errors import UserError, counted, listed
from megatron.core.dist_checkpointing.errors import CheckpointWriteError
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.dist_checkpointing.writer import copy_asset, write_file
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import Target
from megatron.export.hf.conversion import Placement, placements, same_values, to_hf
from megatron.export.hf.copies import kept_files, original_family, updated
from megatron.export.hf.family import Family, complete
from megatron.export.hf.quantization import KEY, Quantize, written_config
from megatron.export.hf.quantized_tensors import linear_layers, quantized
from megatron.export.hf.registry import family_for, read_config
from megatron.export.hf.settings import Table
from megatron.export.hf.side_files import CONFIG, GENERATION, is_tokenizer_file
from megatron.export.hf.tokenizer_files import TOKENS, ExportedTokenizer, export_tokenizer
from megatron.export.interchange import Interchange, differences

EMBEDDING = "model.embedding.word_embeddings.weight"
IDENTITY = {"model_type", "architectures", "auto_map", "dtype", "torch_dtype", "_name_or_path", "transformers_version"}
"""Keys of config.json that say what a folder is, not where its weights began."""
SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", *TOKENS)
"""Keys of a generation_config.json that do not depend on the model it was made for."""


class _Folder(NamedTuple):
    """Contents of a folder."""

    tensors: dict[str, LazyTensor]
    tables: dict[str, dict[str, object]] = {}
    """JSON by file name."""
    contents: dict[str, bytes] = {}
    copies: dict[str, Path] = {}


def save(
    model: Interchange,
    folder: Path | Target,
    dtype: torch.dtype | None,
    *,
    max_shard_bytes: int,
    family: str | None,
    preferred: str | None = None,
    original: Path | None = None,
    quantize: Quantize | None = None,
) -> None:
    """Write ``model`` as a Hugging Face folder. ``family`` forces a family; else the source's, ``preferred``, or the
    first that fits. A ``Target`` is filled but not published, and OSError passes."""
    settings = _settings(model)
    if original is not None:
        chosen, stored = original_family(original, settings)
        tensors = updated(chosen, _plan(chosen, settings, model), stored, model.tensors)
        tables, copies = kept_files(original)
        result = _Folder(tensors, tables, copies=copies)
    else:
        result = _new_folder(model, settings, dtype, family=family, preferred=preferred, quantize=quantize)
    with nullcontext(folder) if isinstance(folder, Target) else Target(folder) as target:
        try:
            target.write_shards(result.tensors, max_shard_bytes)
            for name, table in result.tables.items():
                target.write_json(name, table)
            for name, content in result.contents.items():
                write_file(target.folder / name, content)
            for name, path in result.copies.items():
                copy_asset(path, target.folder / name)
            if target is not folder:
                target.publish()
        except OSError as error:
            if target is folder:
                raise
            raise CheckpointWriteError(f"{target.final}: cannot be written ({error.strerror})") from error


def check_quantizable(model: Interchange, form: str) -> None:
    """Raise UserError if ``model`` cannot be written in the quantized format ``form``; reads no weight."""
    _, _, plan = _described(model, _settings(model))
    linear_layers(plan, form)


def _settings(model: Interchange) -> Table:
    if EMBEDDING not in model.tensors:
        raise UserError(f"{EMBEDDING} is missing: not a language model of this library")
    return complete({**model.settings, "vocab_size": model.tensors[EMBEDDING].shape[0]})


def _described(
    model: Interchange, settings: Table, family: str | None = None, preferred: str | None = None
) -> tuple[Table, Family, list[Placement]]:
    """Return the ``config.json`` that ``model`` was read with (empty: none), its family and the plan of its tensors."""
    original = model.assets.get(f"hf/{CONFIG}")
    before = {} if original is None else read_config(original, settings["model_family"])
    chosen = family_for(settings, before.get("model_type", preferred), only=family)
    return before, chosen, _plan(chosen, settings, model)


def _plan(family: Family, settings: Table, model: Interchange) -> list[Placement]:
    plan = placements(family, settings)
    weights = {name: tensor for name, tensor in model.tensors.items() if name.startswith("model.")}
    if problems := differences(weights, {f"model.{placement.name}": placement.shape for placement in plan}):
        count = counted(len(problems), "problem")
        raise UserError(f"weights and settings do not fit ({count}): {listed(problems, '; ')}")
    return plan


def _new_folder(
    model: Interchange,
    settings: Table,
    dtype: torch.dtype | None,
    *,
    family: str | None,
    preferred: str | None,
    quantize: Quantize | None,
) -> _Folder:
    before, chosen, plan = _described(model, settings, family, preferred)
    tensors = {name: _stored(name, tensor, dtype) for name, tensor in to_hf(plan, model.tensors).items()}
    tensors |= {name: tensors[same] for name, same in chosen.copies(settings).items()}
    for name, source in chosen.stand_ins.items():
        if name in tensors and same_values(tensors[name], tensors[source]):  # transformers omits the copy too
            del tensors[name]
    kind = dtype or model.tensors[EMBEDDING].dtype
    tensors |= {name: LazyTensor.of(torch.zeros(shape, dtype=kind)) for name, shape in chosen.blank(settings).items()}
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    saved = chosen.save_settings(settings)
    config = saved | {"torch_dtype": max(set(kinds), key=kinds.count)}
    config |= {name: before[name] for name in sorted(chosen.passive & before.keys() - IDENTITY)}
    tokenizer = ExportedTokenizer()  # a folder's own config.json and tokenizer go along as they are
    if not before:
        tokenizer = export_tokenizer(settings, model.assets, settings["vocab_size"])
        config |= {**dict.fromkeys(TOKENS), **tokenizer.ids}
    # RoBERTa's positions depend on a token id
    config |= {name: value for name, value in saved.items() if value is not None}
    tables = {CONFIG: chosen.nested(config)}
    if quantize is not None:
        tensors, unquantized = quantized(tensors, plan, quantize)
        heads = [name.removesuffix(".weight") for name in chosen.tied(settings)]  # a module without a tensor
        tables[CONFIG][KEY] = written_config(quantize, chosen.module_names([*unquantized, *heads]))
    if chosen.model_family != "bert":
        tables[GENERATION] = _generation(model.assets, config)
    assets = ((asset.removeprefix("tokenizer/"), path) for asset, path in model.assets.items())
    copies = {name: path for name, path in assets if is_tokenizer_file(name) and name not in tokenizer.files}
    return _Folder(tensors, tables, tokenizer.files, copies)


def _generation(assets: Mapping[str, Path], config: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of ``generate()`` of the source folder, or the sampling settings next to the tokenizer."""
    settings: dict[str, object] = {"_from_model_config": True}
    if f"hf/{GENERATION}" in assets:
        settings = read_json(assets[f"hf/{GENERATION}"])
    elif f"tokenizer/{GENERATION}" in assets:
        generation = read_json(assets[f"tokenizer/{GENERATION}"])
        settings = {name: generation[name] for name in SAMPLING if name in generation}
    ids = {name: config[name] for name in (*TOKENS, "decoder_start_token_id") if name in config}
    return {**settings, **{name: value for name, value in ids.items() if settings.get(name) is None}}


def keeps_dtype(name: str) -> bool:
    """Whether a tensor is never cast: the balance of experts is fp32, as steps of 1e-3 are lost in bf16."""
    return name.endswith("correction_bias")


def _stored(name: str, tensor: LazyTensor, dtype: torch.dtype | None) -> LazyTensor:
    if dtype is None or keeps_dtype(name):
        return tensor
    return replace(tensor, dtype=dtype, read=lambda: tensor.read().to(dtype))
