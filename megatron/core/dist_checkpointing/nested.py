"""``save`` and ``load`` of nested dictionaries, as programs written for Megatron-LM call them: shards of tensors at any
depth, plus JSON values (an iteration, arguments), which are stored as one of the checkpoint's ``objects``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core.config.errors import UserError, listed
from megatron.core.dist_checkpointing import reader, writer
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.groups.process_groups import Group
from megatron.core.sharding.sharded_tensor import ShardedTensor

_WITHOUT_EFFECT = {
    "sharded_strategy",
    "common_strategy",
    "validate_access_integrity",
    "preprocess_common_before_consistancy_check",
    "content_metadata",
    "strict",
}
"""Arguments of Megatron-LM that are ignored: all ranks write and read, and everything is checked."""

_VALUES = "values"
"""Name of the stored object with the JSON values of the dictionaries."""


def save(
    sharded_state_dict: Mapping[str, object],
    checkpoint_dir: str | os.PathLike,
    *strategies: object,
    objects: dict[str, object] | None = None,
    assets: Mapping[str, str | os.PathLike] | None = None,
    group: Group | None = None,
    fault: writer.Fault = writer.no_fault,
    **accepted: object,
) -> int:
    """Write ``sharded_state_dict`` as the directory ``checkpoint_dir`` by ``writer.save``. Dictionaries hold shards and
    JSON values at any depth; only the first rank's JSON values and ``objects``, further ones, are stored.
    ``strategies`` and ``accepted``, Megatron-LM's arguments, are ignored. Raises UserError for other values, or for
    ``async_sharded_save``; TypeError for an unknown argument; CheckpointWriteError on all ranks if any rank could not
    write."""
    _check(accepted)
    values = _values(sharded_state_dict)
    if values:
        objects = {_VALUES: values, **(objects or {})}
    tensors = _tensors(sharded_state_dict)
    return writer.save(tensors, checkpoint_dir, objects=objects, assets=assets, group=group, fault=fault)


def load(
    sharded_state_dict: Mapping[str, object],
    checkpoint_dir: str | os.PathLike,
    *strategies: object,
    allow_unused: Iterable[str] = (),
    group: Group | None = None,
    **accepted: object,
) -> dict[str, Any]:
    """Fill the shards of ``sharded_state_dict`` in place; return new dictionaries with their local tensors and all
    stored JSON values, which replace passed ones. Other arguments and errors as in :func:`save` and ``reader.load``."""
    _check(accepted)
    filled = reader.load(_tensors(sharded_state_dict), checkpoint_dir, allow_unused=allow_unused, group=group)
    return _merged(_with_tensors(sharded_state_dict, filled), CheckpointReader(checkpoint_dir).objects.get(_VALUES, {}))


def _check(accepted: Mapping[str, object]) -> None:
    if unknown := sorted(accepted.keys() - _WITHOUT_EFFECT - {"async_sharded_save"}):
        raise TypeError(f"dist_checkpointing has no arguments {', '.join(unknown)}")
    if accepted.get("async_sharded_save"):
        raise UserError("async_sharded_save True: not available here; pass False (pretrain_gpt.py has --async-save)")


def _tensors(tree: Mapping[str, object], path: str = "") -> dict[str, ShardedTensor]:
    shards: dict[str, ShardedTensor] = {}
    for name, value in tree.items():
        if isinstance(value, ShardedTensor):
            shards[f"{path}{name}"] = value
        elif isinstance(value, Mapping):
            shards |= _tensors(value, f"{path}{name}/")
    return shards


def _values(tree: Mapping[str, object]) -> dict[str, object]:
    """Return ``tree`` without shards and dictionaries of only shards. Raises UserError for values that are not JSON."""
    values: dict[str, object] = {}
    for name, value in tree.items():
        inner = _values(value) if isinstance(value, Mapping) else value
        if not isinstance(value, ShardedTensor) and not (value and inner == {}):
            values[name] = inner
    if wrong := [name for name, value in values.items() if not _is_json(value)]:
        raise UserError(
            f"sharded_state_dict: {listed(wrong)}: neither rectangles of tensors nor JSON values; remove them, or "
            "convert them (vars(args), tensor.tolist())"
        )
    return values


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _with_tensors(tree: Mapping[str, object], filled: Mapping[str, object], path: str = "") -> dict[str, object]:
    return {
        name: _with_tensors(value, filled, f"{path}{name}/")
        if isinstance(value, Mapping)
        else filled.get(f"{path}{name}", value)
        for name, value in tree.items()
    }


def _merged(tree: object, stored: object) -> Any:
    """Stored values win."""
    if not isinstance(tree, dict) or not isinstance(stored, dict):
        return stored
    return {**tree, **{name: _merged(tree.get(name), value) for name, value in stored.items()}}
