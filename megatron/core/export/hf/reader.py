"""Reads a folder of Hugging Face's: ``config.json`` and weights, safetensors or ``.bin``, in one file or several."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import UserError, listed
from megatron.core.export.files import read_safetensors, read_shards
from megatron.core.export.hf.conversion import expected, placements, to_ours
from megatron.core.export.hf.family import Family, complete
from megatron.core.export.hf.registry import CONFIG, GENERATION, load_settings
from megatron.core.export.interchange import Interchange, differences
from megatron.core.sharding.lazy_tensor import LazyTensor

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json", "tekken.json",
)  # fmt: skip
"""Files that go along, where they are."""
_FIRST_STD = 0.02
"""Initial standard deviation of modules that a folder lacks."""


def load(folder: Path) -> Interchange:
    """See :func:`megatron.core.export.hf.load_hf`."""
    family, settings = load_settings(folder)
    plan = placements(family, complete(settings))
    found = _with_base(_with_names_of_today(_open_weights(folder), family), family)
    stand_ins = {name: same for name, same in family.stand_ins.items() if name in expected(plan).keys() - found.keys()}
    found |= {name: found[same] for name, same in stand_ins.items() if same in found}
    _drop_blank(found, family.blank(complete(settings)), folder)
    begun = _begin_optional(found, expected(plan), family)
    left_out = _check(found, expected(plan), family, settings, folder)
    if len(kinds := {tensor.dtype for tensor in found.values() if not tensor.dtype.is_floating_point}):
        raise UserError(f"{folder}: holds weights of {kinds}: quantized models cannot be converted")
    assets = {f"tokenizer/{name}": folder / name for name in TOKENIZER if (folder / name).is_file()}
    assets |= {f"hf/{name}": folder / name for name in (CONFIG, GENERATION) if (folder / name).is_file()}
    notes = [f"left out {len(left_out)} tensors that the model does not have: {listed(left_out)}"] if left_out else []
    notes += [f"the folder has no {name}: it begins as a copy of {same}" for name, same in stand_ins.items()]
    notes += [f"the folder has no {listed(begun)}: random values begin there"] if begun else []
    return Interchange(settings, to_ours(plan, found), assets=assets, notes=notes)


def _open_weights(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of the folder's weights; those of the index, where there is one, and no others."""
    for stem, ending, opener in (
        ("model", "safetensors", read_safetensors), ("pytorch_model", "bin", _open_bin)
    ):  # fmt: skip
        single, index = folder / f"{stem}.{ending}", folder / f"{stem}.{ending}.index.json"
        if single.is_file() and not index.is_file():
            return opener(single)
        if index.is_file():
            return read_shards(index, opener)
    raise UserError(f"{folder}: no weights: model.safetensors, pytorch_model.bin or an index of either is expected")


def _open_bin(path: Path) -> dict[str, LazyTensor]:
    """A pickle of tensors: torch's restricted unpickler builds nothing else, and maps the data; that of files as old as
    GPT-2's cannot be mapped and is read as a whole."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a file of tensors alone, or damaged: {reason:.300}") from None
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{path}: not a table of tensors")
    return {str(name): LazyTensor.of(value.detach()) for name, value in state.items()}


def _with_names_of_today(found: dict[str, LazyTensor], family: Family) -> dict[str, LazyTensor]:
    """Names that older files have, as today's; of a tensor under both names the old one stays."""
    renamed = {}
    for name, tensor in found.items():
        new = _name_of_today(name, family)
        renamed[name if new in found else new] = tensor
    return renamed


def _name_of_today(name: str, family: Family) -> str:
    for old, new in family.aliases.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _begin_optional(found: dict[str, LazyTensor], wanted: Mapping[str, tuple[int, ...]], family: Family) -> list[str]:
    """Give modules that a folder lacks their first values; their tensors' names."""
    missing = [name for name in wanted if name not in found and name.rpartition(".")[0] in family.optional]
    if any(name in found for name in wanted if name.rpartition(".")[0] in family.optional):
        return []  # a folder that lacks a part of them is damaged
    kind = next(iter(found.values())).dtype if found else torch.float32
    generator = torch.Generator().manual_seed(0)
    for name in missing:
        spread = _FIRST_STD if len(wanted[name]) > 1 else 0.0
        found[name] = LazyTensor.of((torch.randn(wanted[name], generator=generator) * spread).to(kind))
    return missing


def _drop_blank(found: dict[str, LazyTensor], names: Iterable[str], folder: Path) -> None:
    for name in names:
        if (blank := found.pop(name, None)) is not None and blank.read().any():
            raise UserError(f"{folder}: {name}: is not zero, but config.json's model has no place for it")


def _with_base(found: dict[str, LazyTensor], family: Family) -> dict[str, LazyTensor]:
    """Names as a whole model has them: files of GPT-2 leave out ``transformer.``."""
    if any(name.startswith(family.base) for name in found):
        return found
    heads = {layout for layout in (family.weights.get("output_layer"),) if isinstance(layout, str)}
    return {name if name.rpartition(".")[0] in heads else family.base + name: each for name, each in found.items()}


def _check(
    found: dict[str, LazyTensor], wanted: Mapping[str, tuple[int, ...]], family: Family, settings: Mapping[str, Any],
    folder: Path,
) -> list[str]:  # fmt: skip
    """Drop what the family leaves out, and return its names; raise for everything that is missing, left over or of
    another shape."""
    tied, copies = family.tied(settings), family.copies(settings)
    unused = "|".join(family.unused).replace("{num_layers}", str(settings["num_layers"]))
    left_out = []
    for name in [each for each in found if each not in wanted]:
        today = _name_of_today(name, family)
        same = tied.get(name) or copies.get(name) or (today if today != name else None)
        if same is not None and not _equal(found[name], found.get(same)):
            fix = "; set tie_word_embeddings in config.json to false" if name in tied else ""
            raise UserError(f"{folder}: {name}: differs from {same}, of which it should be a copy{fix}")
        if same is not None or (unused and re.fullmatch(unused, name)):
            del found[name]
            left_out += [] if name in copies else [name]
    if problems := differences(found, wanted):
        head = f"{family.weights['output_layer']}.weight"
        hint = f"; config.json says that {head} is not tied" if head in wanted.keys() - found.keys() else ""
        said = f"{len(problems)} problems{hint}"
        raise UserError(f"{folder}: weights and config.json do not fit ({said}): {listed(problems, '; ')}")
    return left_out


def _equal(one: LazyTensor, other: LazyTensor | None) -> bool:
    if other is None or one.shape != other.shape:
        return False
    step = max(2**22 // max(one.shape[-1], 1), 1)
    starts = range(0, one.shape[0], step)
    ends = [min(start + step, one.shape[0]) for start in starts]
    return all(torch.equal(one.rows(*place), other.rows(*place)) for place in zip(starts, ends))
