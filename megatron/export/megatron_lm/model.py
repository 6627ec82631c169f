"""Code shared by both Megatron-LM formats: locating a checkpoint (``<load>/iter_0001000`` from the tracker, or the
folder itself), and conversion of global tensors and arguments to an ``Interchange``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import listed
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.files import TRACKER, checkpoint_directory, read_tracker
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.interchange import Interchange, Settings, differences
from megatron.export.megatron_lm import names as table
from megatron.export.unpickler import Record

Named = Mapping[str, LazyTensor]


def find_folder(folder: Path, step: int | None, marker: str) -> Path:
    """Return the checkpoint directory: ``folder`` if ``step`` is None and it contains ``marker`` (a glob pattern), else
    of ``step``, by default the tracker's iteration. Raises CheckpointError if there is none."""
    if step is None and any(folder.glob(marker)):
        return folder
    try:
        which = read_tracker(folder) if step is None else step
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no checkpoint of this format: neither {marker} nor {TRACKER}") from None
    path = Path(checkpoint_directory(folder, which))
    if not any(path.glob(marker)):
        raise CheckpointError(
            f"{path}: holds no {marker}: missing, of another format, or being written (.metadata is last)"
        )
    return path


def build_interchange(
    state: Mapping[str, object], weights: Named, optimizer: Mapping[str, Named], *, where: str, padded_vocabulary: bool
) -> Interchange:
    """Convert global tensors with Megatron-LM names, one per layer, to an ``Interchange`` with notes; RNG states are
    dropped.

    Args:
        state: ``args``, ``iteration``, ``opt_param_scheduler``, ``optimizer`` without its tensors …
        weights: unsharded weights by name.
        optimizer: state kind -> name -> unsharded tensor; ``main_param`` is dropped without bf16 or fp16.
        where: the checkpoint, for messages.
        padded_vocabulary: keep the padding rows of the vocabulary; ``vocab_size`` is then the padded one.

    Raises:
        CheckpointError: arguments missing or without counterpart, or missing layers, tensors or optimizer state."""
    args = state.get("args")
    if not isinstance(args, Record) or not args.attributes:
        raise CheckpointError(f"{where}: lacks the arguments of its run (args), needed to interpret its weights")
    if unknown := table.arguments_without_counterpart(args.attributes):
        raise CheckpointError(f"{where}: these arguments of its run are not supported: {'; '.join(unknown)}")
    settings = table.convert_arguments(args.attributes, {name: tensor.shape for name, tensor in weights.items()})
    padded = next((t.shape[0] for name, t in weights.items() if table.find_place(name).name == table.VOCABULARY[0]), 0)
    notes = ["random states are not converted: dropout masks will differ from a continuation in Megatron-LM"]
    if padded_vocabulary:
        settings["vocab_size"] = padded
    elif padded > settings["vocab_size"]:
        notes.append(
            f"its word embedding has {padded} rows for a vocabulary of {settings['vocab_size']}; the padding is left"
            " out, and no longer part of the softmax: losses drop by its share. --keep-vocab-padding keeps it"
        )
    settings = {name: value for name, value in settings.items() if name != "padded_vocab_size"}
    tied = not settings.get("untie_embeddings_and_output_weights", False)
    tensors = our_tensors(weights, settings, "model.", tied, where)
    half = settings.get("bf16") or settings.get("fp16")
    for kind, named in optimizer.items():
        if kind != "main_param" or half:
            tensors |= our_tensors(named, settings, f"optimizer.{kind}.", tied, where)
    notes += _complete(tensors, settings, where)
    return Interchange(settings, tensors, checkpoint_objects(state, settings, bool(optimizer)), notes=notes)


def our_tensors(named: Named, settings: Settings, prefix: str, tied: bool, where: str) -> dict[str, LazyTensor]:
    """Convert tensors to local names (with ``prefix``) and shapes, lazily; stack the experts of a layer. Omits
    non-weight buffers and, if ``tied``, the output layer's weight. CheckpointError for others."""
    tensors: dict[str, LazyTensor] = {}
    experts: dict[str, dict[int, tuple[table.Counterpart, LazyTensor]]] = {}
    for name, tensor in named.items():
        if table.is_no_weight(name) or (tied and name.endswith("output_layer.weight")):
            continue
        place = table.find_place(name)
        if place.expert is not None:
            experts.setdefault(place.name, {})[place.expert] = (place, tensor)
            continue
        tensors[prefix + place.name] = _shaped(place, tensor, settings, where)
    for name, parts in experts.items():
        if sorted(parts) != list(range(len(parts))):
            raise CheckpointError(f"{where}: {name} of experts {sorted(parts)} only")
        place, first = parts[0]
        pieces = [parts[index][1] for index in range(len(parts))]
        stacked = LazyTensor((len(pieces), *first.shape), first.dtype, partial(_stack, pieces))
        tensors[prefix + name] = _shaped(place, stacked, settings, where)
    return tensors


def _stack(pieces: list[LazyTensor]) -> Tensor:
    return torch.stack([piece.read() for piece in pieces])


def _shaped(place: table.Counterpart, tensor: LazyTensor, settings: Settings, where: str) -> LazyTensor:
    """Drops the padding of the vocabulary. Raises CheckpointError with the name if the shape does not fit."""
    try:
        shape = table.our_shape(place, tensor.shape, settings)
    except (CheckpointError, IndexError, KeyError) as error:
        raise CheckpointError(f"{where}: {place.name} of shape {list(tensor.shape)}: {error}") from None

    def read() -> Tensor:
        values = tensor.read()
        if place.row.fold in table.SECTIONS:
            sections = values.split(table.section_rows(place.row, settings))
            return torch.cat([section.unflatten(0, (shape[0], -1)) for section in sections], 1)
        return (values[: shape[0]] if place.name in table.VOCABULARY else values).reshape(shape)

    local = LazyTensor(shape, tensor.dtype, read)
    return table.reorder_gates(local, settings, to_local=True) if place.row.fold == "groups" else local


def _complete(tensors: Mapping[str, LazyTensor], settings: Settings, where: str) -> list[str]:
    """Raise CheckpointError for missing layers, or optimizer state of some weights only; return notes for the user."""
    weights = {name[len("model.") :]: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    family = settings["model_family"]
    for stack in {"gpt": ("decoder",), "bert": ("encoder",), "t5": ("encoder", "decoder")}[family]:
        layers = table.layer_indices(weights, stack)
        count = settings.get("decoder_num_layers" if (family, stack) == ("t5", "decoder") else "num_layers")
        if layers != list(range(count if isinstance(count, int) else len(layers))):
            raise CheckpointError(f"{where}: holds layers {layers}, its arguments say {count}")
    kinds = sorted({name.split(".")[1] for name in tensors if name.startswith("optimizer.")})
    trained = {name: weight.shape for name, weight in weights.items() if not name.endswith("expert_bias")}
    shapes = {f"optimizer.{kind}.{name}": shape for kind in kinds for name, shape in trained.items()}
    if problems := differences({name: tensors[name] for name in shapes if name in tensors}, shapes):
        raise CheckpointError(f"{where}: {listed(problems, '; ')}")
    return [] if kinds else ["it holds no optimizer state: give --no-load-optim or --finetune"]


# ---- the state of the run


def checkpoint_objects(state: Mapping[str, Any], settings: Settings, with_optimizer: bool) -> dict[str, object]:
    """Return the JSON objects of a native checkpoint: iteration, ``train_state``, ``scheduler`` if ``state`` has one,
    and ``with_optimizer`` step and loss scale. Raises CheckpointError for malformed numbers or scheduler state."""
    args = state["args"].attributes
    iteration = _count(state.get("iteration", args.get("iteration", 0)), "iteration")
    train_state: dict[str, object] = {
        name: _count(args.get(name, 0) or 0, name)
        for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    }
    flops = _number(state.get("num_floating_point_operations_so_far") or 0)
    if not isinstance(flops, int | float) or not 0 <= flops < 1e300:
        raise CheckpointDamagedError(f"num_floating_point_operations_so_far is {flops!r:.60}, expected a count")
    train_state |= {"iteration": iteration, "skipped_iterations": 0, "floating_point_operations": float(flops)}
    objects: dict[str, object] = {"iteration": iteration, "train_state": train_state, "tokenizer": None}
    if isinstance(schedule := state.get("opt_param_scheduler"), dict):
        objects["scheduler"] = _schedule(schedule, settings)
    if with_optimizer:
        optimizer = state.get("optimizer")
        step = _find(optimizer, ("common_step", "step"))
        scaler = _find(optimizer, ("grad_scaler",))
        fields = scaler if isinstance(scaler, dict) else {}
        names = ("scale", "growth_tracker", "hysteresis_tracker")
        values = {name: _number(fields[name]) for name in names if name in fields}
        values |= {name: int(value) for name, value in values.items() if name != "scale"}
        constant = settings.get("loss_scale") is not None or not settings.get("fp16")
        objects["optimizer"] = {
            "step": _count(iteration if step is None else _number(step), "the optimizer's step"),
            "grad_scaler": {} if constant or len(values) != 3 else values,
        }
    return objects


def _schedule(schedule: Mapping[str, object], settings: Settings) -> dict[str, object]:
    """Lengths are in samples in both formats. Raises CheckpointError for missing fields."""
    anneal = settings.get("lr_wsd_decay_samples")
    if anneal is None and settings.get("lr_wsd_decay_iters") is not None:
        sizes = (_count(settings.get(name), name) for name in ("lr_wsd_decay_iters", "global_batch_size"))
        anneal = math.prod(sizes)
    fields = (
        "max_lr",
        "min_lr",
        "lr_warmup_steps",
        "lr_decay_steps",
        "lr_decay_style",
        "start_wd",
        "end_wd",
        "wd_incr_steps",
        "wd_incr_style",
    )
    if missing := [name for name in (*fields, "num_steps") if name not in schedule]:
        raise CheckpointError(f"the state of its scheduler lacks {', '.join(missing)}")
    return {
        **{name: schedule[name] for name in fields},
        "init_lr": settings.get("lr_warmup_init", 0.0),
        "wsd_decay_steps": anneal,
        "lr_wsd_decay_style": settings.get("lr_wsd_decay_style", "exponential"),
        "num_steps": schedule["num_steps"],
    }


def _number(value: object) -> Any:
    if isinstance(value, LazyTensor):
        if value.shape not in ((), (1,)):
            raise CheckpointDamagedError(f"a tensor of shape {list(value.shape)} where a number is expected")
        return value.read().item()
    return value


def _count(value: object, name: str) -> int:
    if not isinstance(value, int | float) or not 0 <= value < 2**53 or value != int(value):
        raise CheckpointDamagedError(f"{name} is {value!r:.60}, expected a count")
    return int(value)


def _find(value: object, names: tuple[str, ...]) -> object:
    """Search breadth-first; None also after a million items."""
    todo, num_items = deque([value]), 0
    while todo and num_items < 10**6:
        item, num_items = todo.popleft(), num_items + 1
        if isinstance(item, dict):
            for name in names:
                if item.get(name) is not None:
                    return item[name]
            todo += item.values()
        elif isinstance(item, list):
            todo += item
    return None
