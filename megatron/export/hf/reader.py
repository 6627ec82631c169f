"""Reader of Hugging Face folders: ``config.json`` and safetensors or ``.bin`` weights, in one file or several."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from megatron.core.config.errors import UserError, counted, listed
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import paused_collection, read_safetensors, read_shards
from megatron.export.hf.conversion import expected, placements, same_values, to_local
from megatron.export.hf.family import Family, complete
from megatron.export.hf.quantization import weight_format
from megatron.export.hf.quantized_tensors import dequantized
from megatron.export.hf.registry import load_settings
from megatron.export.hf.side_files import CONFIG, GENERATION, TOKENIZER, side_files
from megatron.export.interchange import Interchange, check_names, differences
from megatron.export.torch_file import read_torch_file

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights."""
_FIRST_STD = 0.02
"""Standard deviation of the random values of omitted heads."""


@paused_collection()
def load(folder: Path, model_family: str | None = None) -> Interchange:
    """Return the model of a Hugging Face folder with lazy tensors; see :func:`megatron.export.hf.load_hf`."""
    family, settings, unread = load_settings(folder, model_family)
    stored, quantized = read_weights(folder)
    tensors = {name: stored[stored_name] for stored_name, name in family.family_names(stored).items()}
    tower = len(stored) - len(tensors)
    tensors = _with_base(_with_current_names(tensors, family), family)
    try:
        plan = placements(family.stored_as(tensors), complete(settings))
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    absent = expected(plan).keys() - tensors.keys()
    stand_ins = {name: same for name, same in family.stand_ins.items() if name in absent}
    tensors |= {name: tensors[same] for name, same in stand_ins.items() if same in tensors}
    _drop_blank(tensors, family.blank(complete(settings)), folder)
    begun = _begin_heads(tensors, expected(plan), family)
    left_out = _check(tensors, expected(plan), family, settings, folder)
    if kinds := {str(tensor.dtype) for tensor in tensors.values() if tensor.dtype not in DTYPES}:
        reason = f"which {CONFIG} does not explain; its quantization_config must name the method"
        raise UserError(f"{folder}: holds weights of {', '.join(sorted(kinds))}, {reason}")
    assets = {f"tokenizer/{name}": path for name, path in side_files(folder, TOKENIZER).items()}
    assets |= {f"hf/{name}": path for name, path in side_files(folder, (CONFIG, GENERATION)).items()}
    notes = [f"left out {len(left_out)} tensors that the model does not have: {listed(left_out)}"] if left_out else []
    if tower and family.container is not None:
        reason = f"{tower} tensors {family.container.tower}*; --save-hf-interval and convert --original-dir keep it"
        notes.append(f"the vision tower is neither loaded nor trained ({reason})")
    notes += [f"{quantized} quantized tensors are read as bf16"] if quantized else []
    notes += [f"left out keys of {CONFIG} without effect on the model: {', '.join(unread)}"] if unread else []
    notes += [f"the folder has no {name}: it begins as a copy of {same}" for name, same in stand_ins.items()]
    notes += [f"the folder has no {listed(begun)}: random values begin there"] if begun else []
    return Interchange(settings, to_local(plan, tensors), assets=assets, notes=notes)


def read_weights(folder: Path) -> tuple[dict[str, LazyTensor], int]:
    """Return the lazy tensors of a folder, the quantized ones in bf16, and the number of these. Raises UserError for a
    quantization that cannot be read, or scales that do not fit."""
    stored, form = open_weights(folder), weight_format(read_json(folder / CONFIG))
    tensors = stored if form is None else dequantized(stored, form, folder)
    return tensors, len(stored) - len(tensors)


def open_weights(folder: Path) -> dict[str, LazyTensor]:
    """Open the weights of a folder: ``model.safetensors`` before ``pytorch_model.bin``, an index before a file."""
    for stem, ending, opener in (("model", "safetensors", read_safetensors), ("pytorch_model", "bin", _open_bin)):
        single, index = folder / f"{stem}.{ending}", folder / f"{stem}.{ending}.index.json"
        if single.is_file() and not index.is_file():
            return opener(single)
        if index.is_file():
            return read_shards(index, opener)
    raise UserError(f"{folder}: no weights: model.safetensors, pytorch_model.bin or an index of either is expected")


def _open_bin(path: Path) -> dict[str, LazyTensor]:
    """Raises UserError unless the file is a flat dictionary of tensors, CheckpointError for an unsafe pickle."""
    state = read_torch_file(path)
    tensors = isinstance(state, dict) and all(isinstance(value, LazyTensor) for value in state.values())
    if not tensors or not all(isinstance(name, str) for name in state):
        raise UserError(f"{path}: not a table of tensors")
    check_names(state, path)
    return state


def _with_current_names(tensors: dict[str, LazyTensor], family: Family) -> dict[str, LazyTensor]:
    """If a tensor exists with the old and the current name, the former stays."""
    renamed = {}
    for name, tensor in tensors.items():
        new = _current_name(name, family)
        renamed[name if new in tensors else new] = tensor
    return renamed


def _current_name(name: str, family: Family) -> str:
    for old, new in family.aliases.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _begin_heads(tensors: dict[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]], family: Family) -> list[str]:
    """Add heads without any tensor: seeded random matrices, norms of one, zero biases. Return the added names."""
    kind = next((tensors[name].dtype for name in shapes if name in tensors), torch.float32)
    generator, begun = torch.Generator().manual_seed(0), list[str]()
    for modules in family.heads:
        names = [name for name in shapes if name.rpartition(".")[0] in modules]
        if any(name in tensors for name in names):
            continue
        for name in names:
            values = torch.full(shapes[name], float(name.endswith(".weight")))
            if len(shapes[name]) > 1:
                values.normal_(std=_FIRST_STD, generator=generator)
            tensors[name] = LazyTensor.of(values.to(kind))
        begun += names
    return begun


def _drop_blank(tensors: dict[str, LazyTensor], names: Iterable[str], folder: Path) -> None:
    for name in names:
        if (blank := tensors.pop(name, None)) is not None and blank.read().any():
            raise UserError(f"{folder}: {name}: is not zero, but config.json's model does not contain it")


def _with_base(tensors: dict[str, LazyTensor], family: Family) -> dict[str, LazyTensor]:
    """GPT-2 files omit ``transformer.`` in all names."""
    if any(name.startswith(family.base) for name in tensors):
        return tensors
    heads = {layout for layout in (family.weights.get("output_layer"),) if isinstance(layout, str)}
    prefixes = {name: "" if name.rpartition(".")[0] in heads else family.base for name in tensors}
    return {prefixes[name] + name: tensor for name, tensor in tensors.items()}


def _check(
    tensors: dict[str, LazyTensor],
    shapes: Mapping[str, tuple[int, ...]],
    family: Family,
    settings: Mapping[str, object],
    folder: Path,
) -> list[str]:
    """Delete ignored tensors and equal copies; return their names. Raises UserError for any other difference."""
    tied, copies = family.tied(settings), family.copies(settings)
    unused = "|".join(family.unused).replace("{num_layers}", str(settings["num_layers"]))
    left_out = []
    for name in [name for name in tensors if name not in shapes]:
        today = _current_name(name, family)
        same = tied.get(name) or copies.get(name) or (today if today != name else None)
        if same is not None and not same_values(tensors[name], tensors.get(same)):
            fix = "; set tie_word_embeddings in config.json to false" if name in tied else ""
            raise UserError(f"{folder}: {name}: differs from {same}, although it should be its copy{fix}")
        if same is not None or (unused and re.fullmatch(unused, name)):
            del tensors[name]
            left_out += [] if name in copies else [name]
    if problems := differences(tensors, shapes):
        head = f"{family.weights['output_layer']}.weight"
        hint = f"; config.json says that {head} is not tied" if head in shapes.keys() - tensors.keys() else ""
        cause = f"{counted(len(problems), 'problem')}{hint}"
        raise UserError(f"{folder}: weights and config.json do not fit ({cause}): {listed(problems, '; ')}")
    return left_out
