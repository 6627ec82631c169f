"""Writes a folder that ``from_pretrained`` and vLLM take as it is: weights, ``config.json``, tokenizer.

Everything goes into a hidden folder beside the target, tensor by tensor, and one rename makes it the target.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import UserError
from megatron.core.export.hf.config_file import CONFIG, GENERATION, read_config
from megatron.core.export.hf.conversion import Placement, placements, to_theirs
from megatron.core.export.hf.family import complete, counters
from megatron.core.export.hf.registry import family_for
from megatron.core.export.interchange import Interchange
from megatron.core.export.safetensors_files import write_safetensors
from megatron.core.sharding.lazy_tensor import LazyTensor

EMBEDDING = "model.embedding.word_embeddings.weight"
_LISTED = 20


def save(
    model: Interchange, folder: Path, dtype: torch.dtype | None, *, max_shard_bytes: int, family: str | None,
    on_tensor: Callable[[str], None] | None,
) -> None:  # fmt: skip
    """See :func:`megatron.core.export.hf.save_hf`."""
    if os.path.lexists(folder):
        raise UserError(f"{folder}: exists already; name a new folder")
    source = read_config(model.assets["hf/config.json"].parent) if "hf/config.json" in model.assets else {}
    if EMBEDDING not in model.tensors:
        raise UserError(f"{EMBEDDING} is missing: not a language model of ours")
    settings = complete({**model.settings, "vocab_size": model.tensors[EMBEDDING].shape[0]})
    chosen = family_for(settings, source.get("model_type"), only=family)
    plan = placements(chosen, settings)
    _check(plan, model.tensors)
    tensors = to_theirs(plan, model.tensors)
    kinds = {name: _stored(name, tensor, dtype) for name, tensor in tensors.items()}
    config = chosen.save_settings(settings)
    config["torch_dtype"] = str(max(kinds.values(), key=list(kinds.values()).count)).removeprefix("torch.")
    config |= {name: source[name] for name in sorted(chosen.passive & source.keys() - _OWN)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir()
        _write_weights(temporary, tensors, kinds, max_shard_bytes, on_tensor)
        _write_json(temporary / CONFIG, config)
        if "hf/generation_config.json" not in model.assets:
            ids = [name for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config]
            _write_json(temporary / GENERATION, {"_from_model_config": True, **{name: config[name] for name in ids}})
        for name, path in model.assets.items():
            place = name.partition("/")[2]
            if place != CONFIG:
                shutil.copyfile(path, temporary / place)
                _fsync(temporary / place)
        _fsync(temporary)
        os.rename(temporary, folder)
        _fsync(folder.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
        raise


_OWN = {"model_type", "architectures", "auto_map", "dtype", "torch_dtype", "_name_or_path", "transformers_version"}
"""Keys that say what this folder is, not where its weights began."""


def _stored(name: str, tensor: LazyTensor, dtype: torch.dtype | None) -> torch.dtype:
    """``dtype`` where it is given; the balance of experts keeps its fp32, as steps of 1e-3 are lost in bf16."""
    return tensor.dtype if dtype is None or name.endswith("correction_bias") else dtype


def _check(plan: list[Placement], tensors: Mapping[str, LazyTensor]) -> None:
    wanted = {f"model.{each.name}": each.shape for each in plan}
    extra = {f"model.{name}" for name in counters({each.name: each.shape for each in plan})}
    problems = [f"{name} {list(shape)} is missing" for name, shape in wanted.items() if name not in tensors]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, the settings make it {list(shape)}"
        for name, shape in wanted.items() if name in tensors and tensors[name].shape != shape
    ]  # fmt: skip
    weights = {name for name in tensors if name.startswith("model.")}
    problems += [f"{name} has no place there" for name in sorted(weights - wanted.keys() - extra)]
    if problems:
        listed = "; ".join(problems[:_LISTED]) + ("; …" if len(problems) > _LISTED else "")
        raise UserError(f"weights and settings do not fit ({len(problems)} problems): {listed}")


def _write_weights(
    folder: Path, tensors: Mapping[str, LazyTensor], kinds: Mapping[str, torch.dtype], max_shard_bytes: int,
    on_tensor: Callable[[str], None] | None,
) -> None:  # fmt: skip
    shards: list[dict[str, LazyTensor]] = [{}]
    total = size = 0
    for name, tensor in tensors.items():
        count = math.prod(tensor.shape) * kinds[name].itemsize
        if shards[-1] and size + count > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        total, size = total + count, size + count
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        whole = "model.safetensors"
        file = whole if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, dtypes=kinds, on_tensor=on_tensor)
        names |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
