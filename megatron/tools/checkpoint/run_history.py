"""Settings and counters of a run at one of its iterations, from its checkpoints.

A run may continue with other batch sizes, data or length. A checkpoint has the settings of the iterations that led to
it; its predecessor has the counters at which they start. What these two leave open is an error, not a guess."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron.core.config.cli import from_object
from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.manifest import MANIFEST, read_manifest
from megatron.core.schedules.batch_size import batch_size_plateaus
from megatron.training.checkpoint.files import Found, find_checkpoint, get_checkpoint_name, saved_iterations
from megatron.training.checkpoint.history import same_folder
from megatron.training.checkpoint.schema import is_count, malformed
from megatron.training.checkpoint.settings import DATA_STREAM
from megatron.training.config.flat import FlatConfig, flags_by_field
from megatron.training.config.pretrain_config import PretrainConfig, compose
from megatron.training.data.datasets import batch_size_at
from megatron.training.exits.conditions import last_iteration
from megatron.training.stored_settings import stored_family


@dataclass(frozen=True)
class Saved:
    """Settings and counters of a checkpoint; ``tokenizer`` is the fingerprint."""

    directory: str
    cfg: PretrainConfig
    iteration: int
    consumed: int
    tokenizer: str | None


def read_saved(directory: str) -> Saved:
    """Return settings and counters of a checkpoint. Raises CheckpointError unless it is as training writes it."""
    return _parse(directory, read_manifest(directory)["objects"])


def _parse(directory: str, objects: dict[str, Any]) -> Saved:
    """With settings as on a command line."""
    wrong = malformed(objects)
    if not wrong:
        args = objects["args"]
        family = stored_family(args, directory)
        specs = flags_by_field(family.name)
        values: dict[str, Any] = {"model_family": family.name, "needs_data": args.get("needs_data") is not False}
        for name in ("world_size", "data_parallel_size"):
            values[name] = args.get(name)
            wrong += [] if is_count(values[name]) and values[name] else [f"{name} is {values[name]!r:.60}"]
        for name in args.keys() & specs.keys():
            try:
                values[name] = None if args[name] is None else from_object(specs[name], args[name])
            except ValueError as error:
                wrong.append(f"{name} is {args[name]!r:.60}: {error}")
    if wrong:
        where = os.path.join(directory, MANIFEST)
        raise CheckpointDamagedError(f"{where}: not as training writes it: {'; '.join(sorted(wrong))}")
    consumed = objects["train_state"]["consumed_train_samples"]
    cfg = compose(FlatConfig(**values))
    return Saved(directory, cfg, objects["iteration"], consumed, objects["tokenizer"])


def first_readable(folder: str, iterations: Iterable[int]) -> Saved | None:
    """Return the first complete checkpoint. Raises CheckpointError if its settings are not as training writes them."""
    for iteration in iterations:
        directory = get_checkpoint_name(folder, iteration)
        with suppress(CheckpointError):
            objects = read_manifest(directory)["objects"]
            break
    else:
        return None
    return _parse(directory, objects)


def neighbors(latest: Found, iteration: int) -> tuple[Saved | None, Saved | None]:
    """Return the last checkpoint before ``iteration`` (None: the run started from scratch) and the first one that
    includes it (None: it is after ``latest``), of the history of ``latest``, which may begin in another folder."""
    folder = os.path.dirname(latest.directory)
    saved = [candidate for candidate in saved_iterations(folder) if candidate <= latest.iteration]
    before = first_readable(folder, (candidate for candidate in saved if candidate < iteration))
    after = first_readable(folder, (candidate for candidate in reversed(saved) if candidate >= iteration))
    start = None if before is not None or after is None else origin(after)
    if start is not None and start.iteration >= iteration:
        return neighbors(start, iteration)
    return before if start is None else read_saved(start.directory), after


def origin(first: Saved) -> Found | None:
    """Return the checkpoint of another folder from which the run of ``first``, the oldest in its own, continued; None
    if it started at iteration 0. Raises UserError if that folder cannot tell."""
    checkpoint, folder = first.cfg.checkpoint, os.path.dirname(first.directory)
    weights_only = checkpoint.finetune or first.cfg.upcycling.moe_use_upcycling
    if checkpoint.load in (None, checkpoint.save) or weights_only or same_folder(checkpoint.load, folder):
        return None
    source = find_checkpoint(checkpoint.load, checkpoint.ckpt_step) if os.path.isdir(str(checkpoint.load)) else None
    if source is None or source.iteration >= first.iteration:
        raise UserError(
            f"{first.directory}: continues a checkpoint of --load {checkpoint.load}, which is not there now, so that"
            f" settings up to iteration {first.iteration} are unknown; restore it, or choose a later iteration"
        )
    return None if source.release else source


def advance(cfg: PretrainConfig, consumed: int, iterations: int) -> int:
    """Return the consumed samples ``iterations`` after ``consumed``, by the batch sizes of ``cfg``."""
    size_at, last = batch_size_at(cfg), batch_size_plateaus(cfg.flat)[-1].first_sample
    for step in range(iterations):
        if consumed >= last:
            return consumed + (iterations - step) * size_at(consumed)
        consumed += size_at(consumed)
    return consumed


def at_iteration(folder: str, step: int | None, iteration: int) -> tuple[Saved, int, list[str]]:
    """Return the checkpoint with the settings of ``iteration``, the samples consumed before it, and notes for the user.

    Args:
        folder: value for --load.
        step: checkpoint whose history is searched; None: the latest.

    Raises:
        UserError: no checkpoint, or settings that changed at an unknown iteration, or the run ends before."""
    latest = find_checkpoint(folder, step)
    if latest is None or latest.release:
        raise CheckpointError(f"--load {folder}: holds no checkpoint of training")
    before, after = neighbors(latest, iteration)
    first, start = (0, 0) if before is None else (before.iteration, before.consumed)
    settings = after or before
    assert settings is not None, "found is one of them"
    cfg, notes = settings.cfg, list[str]()
    end = last_iteration(cfg, first, start)
    if after is None and end is not None and iteration > end:
        raise UserError(f"--iteration {iteration}: the run ends at iteration {end} (--train-iters)")
    if after is None:
        notes.append("not read yet: a run that continues with these settings reads it")
    elif (reached := advance(cfg, start, after.iteration - first)) != after.consumed:
        raise UserError(
            f"--iteration {iteration}: the batch size changed between iterations {first} and {after.iteration}, no"
            f" checkpoint tells when ({after.directory} has consumed {after.consumed} samples, its settings give"
            f" {reached})"
        )
    elif before is not None and (changes := _changes(before.cfg, cfg)):
        saves = [interval for config in (before.cfg, cfg) for interval in _save_intervals(config)]
        if any((first // interval + 1) * interval < after.iteration for interval in saves):
            raise UserError(
                f"--iteration {iteration}: settings changed between iterations {first} and {after.iteration}, and the"
                f" checkpoints between them, which would tell when, are missing ({'; '.join(changes)})"
            )
        notes += [f"changed after iteration {first}: {change}" for change in changes]
    if iteration in cfg.training.iterations_to_skip:
        notes.append("read, but not trained on: --iterations-to-skip")
    return settings, advance(cfg, start, iteration - 1 - first), notes


def _changes(old: PretrainConfig, new: PretrainConfig) -> list[str]:
    before, after = old.flat.values(), new.flat.values()
    names = [name for name in DATA_STREAM if name in before and name in after]
    return [f"{name} was {before[name]}, is {after[name]}" for name in names if before[name] != after[name]]


def _save_intervals(cfg: PretrainConfig) -> list[int]:
    intervals = cfg.checkpoint.save_interval, cfg.checkpoint.non_persistent_save_interval
    return [interval for interval in intervals if interval is not None]
