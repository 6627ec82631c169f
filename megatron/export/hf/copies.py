"""Exports into a copy of a Hugging Face folder. The copy keeps the bytes of tensors that were not loaded (vision tower,
prediction depths), of config.json and of the files of tokenizer and processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron.core.config.errors import UserError, listed
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.hf.conversion import Placement, to_hf
from megatron.export.hf.family import Family, complete
from megatron.export.hf.quantization import weight_format, without_quantization
from megatron.export.hf.reader import read_weights
from megatron.export.hf.registry import load_settings
from megatron.export.hf.settings import Table
from megatron.export.hf.side_files import CONFIG, GENERATION, PROCESSOR, TOKENIZER, side_files

OF_TRAINING = ("max_position_embeddings", "attention_dropout")
"""Keys of config.json that may differ from the original."""


def original_family(folder: Path, settings: Table) -> tuple[Family, dict[str, LazyTensor]]:
    """Return the family of ``folder``, with its layouts, and its lazy tensors. Raises UserError if the model of
    completed ``settings`` is another one."""
    family, source, _ = load_settings(folder, settings["model_family"])
    before, after = family.save_settings(complete(source)), family.save_settings(settings)
    different = [key for key in before if key not in OF_TRAINING and before[key] != after[key]]
    if different:
        values = listed([f"{key} is {after[key]!r:.80} instead of {before[key]!r:.80}" for key in different], "; ")
        raise UserError(f"{folder}: contains another model than the one to export: {values}")
    stored, _ = read_weights(folder)
    return family.stored_as(family.family_names(stored).values()), stored


def updated(
    family: Family, plan: list[Placement], stored: Mapping[str, LazyTensor], tensors: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the ``stored`` tensors of a folder with the values of local ``tensors`` in stored dtypes."""
    names = {name: stored_name for stored_name, name in family.family_names(stored).items()}
    new = to_hf(plan, tensors)
    if missing := new.keys() - names.keys():
        raise UserError(f"the original folder lacks {listed(sorted(missing))}")
    trained = {names[name]: _cast(tensor, stored[names[name]]) for name, tensor in new.items()}
    return trained | {name: tensor for name, tensor in stored.items() if name not in trained}


def _cast(tensor: LazyTensor, stored: LazyTensor) -> LazyTensor:
    return LazyTensor(stored.shape, stored.dtype, lambda: tensor.read().to(stored.dtype))


def kept_files(folder: Path) -> tuple[dict[str, dict[str, object]], dict[str, Path]]:
    """Return the files next to the weights that change (the ``config.json`` of quantized weights, which the copy has
    in bf16), as JSON, and those that the copy keeps."""
    files, config = side_files(folder, (CONFIG, GENERATION, *TOKENIZER, *PROCESSOR)), read_json(folder / CONFIG)
    if weight_format(config) is None:
        return {}, files
    return {CONFIG: without_quantization(config)}, {name: path for name, path in files.items() if name != CONFIG}
