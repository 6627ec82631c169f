"""Reader of Hugging Face folders: ``config.json`` and safetensors or ``.bin`` weights, in one file or several."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from megatron.core.config.errors import UserError, counted, listed
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import paused_collection, read_safetensors, read_shards
from megatron.export.hf.conversion import expected, placements, same_values, to_local
from megatron.export.hf.family import Family, complete
from megatron.export.hf.registry import load_settings
from megatron.export.hf.side_files import CONFIG, GENERATION, TOKENIZER, side_files
from megatron.export.interchange import Interchange, check_names, differences
from megatron.export.torch_file import read_torch_file

_FIRST_STD = 0.02
"""Standard deviation of the random values of omitted heads."""


@paused_collection()
def load(folder: Path) -> Interchange:
    """Return the model of a Hugging Face folder with lazy tensors, completed settings, tokenizer files and notes for
    the user. Raises UserError if family or settings are not supported, if names or shapes differ from what
    ``config.json`` describes, or for quantized weights. See :func:`megatron.export.hf.load_hf`."""
    family, settings, unread = load_settings(folder)
    try:
        plan = placements(family, complete(settings))
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    found = _with_base(_with_current_names(_open_weights(folder), family), family)
    stand_ins = {name: same for name, same in family.stand_ins.items() if name in expected(plan).keys() - found.keys()}
    found |= {name: found[same] for name, same in stand_ins.items() if same in found}
    _drop_blank(found, family.blank(complete(settings)), folder)
    begun = _begin_heads(found, expected(plan), family)
    left_out = _check(found, expected(plan), family, settings, folder)
    if len(kinds := {tensor.dtype for tensor in found.values() if not tensor.dtype.is_floating_point}):
        raise UserError(f"{folder}: holds weights of {kinds}: quantized models cannot be converted")
    assets = {f"tokenizer/{name}": path for name, path in side_files(folder, TOKENIZER).items()}
    assets |= {f"hf/{name}": path for name, path in side_files(folder, (CONFIG, GENERATION)).items()}
    notes = [f"left out {len(left_out)} tensors that the model does not have: {listed(left_out)}"] if left_out else []
    notes += [f"left out keys of {CONFIG} without effect on the model: {', '.join(unread)}"] if unread else []
    notes += [f"the folder has no {name}: it begins as a copy of {same}" for name, same in stand_ins.items()]
    notes += [f"the folder has no {listed(begun)}: random values begin there"] if begun else []
    return Interchange(settings, to_local(plan, found), assets=assets, notes=notes)


def _open_weights(folder: Path) -> dict[str, LazyTensor]:
    """Return the lazy tensors of the folder's weights: of ``model.safetensors`` before ``pytorch_model.bin``; an index
    of either wins over its single file, and exactly its tensors must exist. Raises UserError without weights,
    CheckpointDamagedError for a damaged file."""
    for stem, ending, opener in (("model", "safetensors", read_safetensors), ("pytorch_model", "bin", _open_bin)):
        single, index = folder / f"{stem}.{ending}", folder / f"{stem}.{ending}.index.json"
        if single.is_file() and not index.is_file():
            return opener(single)
        if index.is_file():
            return read_shards(index, opener)
    raise UserError(f"{folder}: no weights: model.safetensors, pytorch_model.bin or an index of either is expected")


def _open_bin(path: Path) -> dict[str, LazyTensor]:
    """Return the lazy tensors of a ``torch.save`` file of any torch version. Raises UserError unless it is a flat
    dictionary of named tensors, CheckpointError for a damaged file or an unsafe pickle."""
    state = read_torch_file(path)
    tensors = isinstance(state, dict) and all(isinstance(value, LazyTensor) for value in state.values())
    if not tensors or not all(isinstance(name, str) for name in state):
        raise UserError(f"{path}: not a table of tensors")
    check_names(state, path)
    return state


def _with_current_names(found: dict[str, LazyTensor], family: Family) -> dict[str, LazyTensor]:
    """Rename old names to current ones; if both exist, the tensor with the old name keeps it."""
    renamed = {}
    for name, tensor in found.items():
        new = _current_name(name, family)
        renamed[name if new in found else new] = tensor
    return renamed


def _current_name(name: str, family: Family) -> str:
    for old, new in family.aliases.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _begin_heads(found: dict[str, LazyTensor], wanted: Mapping[str, tuple[int, ...]], family: Family) -> list[str]:
    """Add every head without any tensor in ``found``, in the dtype of the model's first tensor: seeded random matrices,
    norms of one, zero biases. Return the added names. A head with only some of its tensors stays as it is: damaged."""
    kind = next((found[name].dtype for name in wanted if name in found), torch.float32)
    generator, begun = torch.Generator().manual_seed(0), list[str]()
    for modules in family.heads:
        names = [name for name in wanted if name.rpartition(".")[0] in modules]
        if any(name in found for name in names):
            continue
        for name in names:
            values = torch.full(wanted[name], float(name.endswith(".weight")))
            if len(wanted[name]) > 1:
                values.normal_(std=_FIRST_STD, generator=generator)
            found[name] = LazyTensor.of(values.to(kind))
        begun += names
    return begun


def _drop_blank(found: dict[str, LazyTensor], names: Iterable[str], folder: Path) -> None:
    for name in names:
        if (blank := found.pop(name, None)) is not None and blank.read().any():
            raise UserError(f"{folder}: {name}: is not zero, but config.json's model does not contain it")


def _with_base(found: dict[str, LazyTensor], family: Family) -> dict[str, LazyTensor]:
    """Add the family's base prefix if all names omit it (GPT-2 files omit ``transformer.``)."""
    if any(name.startswith(family.base) for name in found):
        return found
    heads = {layout for layout in (family.weights.get("output_layer"),) if isinstance(layout, str)}
    return {name if name.rpartition(".")[0] in heads else family.base + name: each for name, each in found.items()}


def _check(
    found: dict[str, LazyTensor],
    wanted: Mapping[str, tuple[int, ...]],
    family: Family,
    settings: Mapping[str, object],
    folder: Path,
) -> list[str]:
    """Delete ignored tensors and equal copies from ``found``; return the deleted names, except MTP copies.

    Raises UserError for copies that differ, and for missing, unexpected or misshapen tensors."""
    tied, copies = family.tied(settings), family.copies(settings)
    unused = "|".join(family.unused).replace("{num_layers}", str(settings["num_layers"]))
    left_out = []
    for name in [each for each in found if each not in wanted]:
        today = _current_name(name, family)
        same = tied.get(name) or copies.get(name) or (today if today != name else None)
        if same is not None and not same_values(found[name], found.get(same)):
            fix = "; set tie_word_embeddings in config.json to false" if name in tied else ""
            raise UserError(f"{folder}: {name}: differs from {same}, although it should be its copy{fix}")
        if same is not None or (unused and re.fullmatch(unused, name)):
            del found[name]
            left_out += [] if name in copies else [name]
    if problems := differences(found, wanted):
        head = f"{family.weights['output_layer']}.weight"
        hint = f"; config.json says that {head} is not tied" if head in wanted.keys() - found.keys() else ""
        said = f"{counted(len(problems), 'problem')}{hint}"
        raise UserError(f"{folder}: weights and config.json do not fit ({said}): {listed(problems, '; ')}")
    return left_out
