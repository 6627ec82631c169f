"""Checkpoints of programs with their own training loop, in the format of this library's runs."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from megatron.compat.program import current_program
from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import RELEASE, TRACKER, checkpoint_directory, read_tracker
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.checkpoint.checkpointer import Checkpointer
from megatron.training.config.checkpointing import CheckpointConfig
from megatron.training.train_state import TrainState


def get_checkpoint_tracker_filename(checkpoints_path: str | os.PathLike) -> str:
    """Return the path of the file in ``checkpoints_path`` that names the newest iteration."""
    return os.path.join(checkpoints_path, TRACKER)


def isfile(path: str | os.PathLike) -> bool:
    """Whether ``path`` is a file."""
    return os.path.isfile(path)


def read_metadata(tracker_filename: str | os.PathLike) -> tuple[int, bool]:
    """Return (iteration, whether it is a release) of a tracker file. Raises CheckpointError for other contents."""
    which = read_tracker(Path(tracker_filename).parent)
    return (0, True) if which == RELEASE else (int(which), False)


def get_load_checkpoint_path_by_args(args: Namespace, load_arg: str = "load") -> str:
    """Return the checkpoint that the setting ``load_arg`` names: a folder with a tracker (then ``args.ckpt_step`` or
    its newest iteration), or the checkpoint's directory. Raises UserError if it is None."""
    folder = getattr(args, load_arg)
    if folder is None:
        raise UserError(f"get_load_checkpoint_path_by_args: no folder; set --{load_arg.replace('_', '-')}")
    path = Path(folder)
    if isfile(path / TRACKER):
        return checkpoint_directory(path, read_tracker(path) if args.ckpt_step is None else args.ckpt_step)
    if args.ckpt_step is not None:
        return checkpoint_directory(path.parent, args.ckpt_step)
    return str(path)


def load_tensors_metadata(checkpoint_dir: str | os.PathLike) -> dict[str, Namespace]:
    """Return the ``global_shape`` of the tensors of a checkpoint: this library's or Megatron-LM's ``torch_dist``.
    Reads no values. Raises CheckpointError: the directory is no checkpoint, or damaged."""
    from megatron.export.megatron_lm.torch_dist import stored_shapes

    folder = Path(checkpoint_dir)
    if (folder / ".metadata").exists() and not (folder / "metadata.json").exists():
        shapes = stored_shapes(folder)
    else:
        reader = CheckpointReader(folder)
        shapes = {name: reader.shape(name) for name in reader.names}
    return {name: Namespace(key=name, global_shape=shape) for name, shape in shapes.items()}


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Accepted: :func:`save_checkpoint` returns when the checkpoint is complete."""


def save_checkpoint(
    iteration: int,
    model: Sequence[nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    *ignored: object,
    non_persistent_ckpt: bool = False,
    release: bool = False,
    **unused: object,
) -> None:
    """Write ``<args.save>/iter_…`` and its tracker, as the training loop does; ``get_args()`` gives the folder and
    the samples consumed. Returns when the checkpoint is complete. Collective. Groups, ranks and contexts among the
    other arguments have no effect.

    Raises:
        UserError: no --save, or ``non_persistent_ckpt`` or ``release`` is set.
        CheckpointError: the save failed, or another job writes to --save, such as the loop of ``pretrain()``."""
    if non_persistent_ckpt or release:
        name = "release" if release else "non_persistent_ckpt"
        raise UserError(f"save_checkpoint({name}=True): not available here; pass False")
    program = current_program()
    if program.args.save is None:
        raise UserError("save_checkpoint: no folder; add --save")
    state = TrainState(
        iteration,
        program.args.consumed_train_samples,
        getattr(program.args, "skipped_train_samples", 0),
        program.args.consumed_valid_samples,
        floating_point_operations=float(num_floating_point_operations_so_far),
    )
    checkpointer = _checkpointer(model, optimizer, opt_param_scheduler)
    try:
        if not checkpointer.save(state):
            raise CheckpointError(checkpointer.last_failure)
    finally:
        checkpointer.close()


def load_checkpoint(
    ddp_model: Sequence[nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    *ignored: object,
    **unused: object,
) -> tuple[int, float]:
    """Restore the checkpoint of --load into model, optimizer and scheduler; return (iteration, FLOPs so far), zeros
    without a checkpoint. Sets ``consumed_train_samples`` and ``consumed_valid_samples`` of ``get_args()``. Collective.

    Raises:
        UserError: ``load_arg`` names another setting than --load, or ``strict`` is False.
        CheckpointError: see ``Checkpointer.load``."""
    if load_arg != "load" or not strict:
        raise UserError(f"load_checkpoint(load_arg={load_arg!r}, strict={strict}): pass load_arg='load', strict=True")
    checkpointer = _checkpointer(ddp_model, optimizer, opt_param_scheduler)
    try:
        state = checkpointer.load()
    finally:
        checkpointer.close()
    if state is None:
        return 0, 0.0
    args = current_program().args
    args.iteration, args.consumed_train_samples = state.iteration, state.consumed_train_samples
    args.skipped_train_samples, args.consumed_valid_samples = state.skipped_train_samples, state.consumed_valid_samples
    return state.iteration, state.floating_point_operations


def _checkpointer(model: Sequence[nn.Module], optimizer: Any, scheduler: Any) -> Checkpointer:
    """Return a checkpointer for the checkpoint settings that ``get_args()`` has now."""
    program, groups = current_program(), parallel_state.get_process_groups()
    now = {field.name: getattr(program.args, field.name) for field in fields(CheckpointConfig)}
    cfg = program.cfg.with_settings(**now)
    return Checkpointer(cfg, model, optimizer, scheduler, groups=groups, tokenizer=program.tokenizer)


def load_common_state_dict(checkpoint_dir: str | os.PathLike) -> dict[str, Any]:
    """Return the values of a checkpoint that are no tensors: what ``dist_checkpointing.save`` got, or the state of a
    run (``args`` as a namespace, ``iteration``, ``num_floating_point_operations_so_far``, ``opt_param_scheduler``).
    Also reads a ``torch_dist`` checkpoint of Megatron-LM (its pickles without running their code). Raises
    CheckpointError: the directory is no checkpoint, or damaged."""
    from megatron.export.megatron_lm.torch_dist import read_common_state

    folder = Path(checkpoint_dir)
    if (folder / ".metadata").exists() and not (folder / "metadata.json").exists():
        state = read_common_state(folder)
        arguments = getattr(state.get("args"), "attributes", None)
        return state if arguments is None else {**state, "args": Namespace(**arguments)}
    objects = CheckpointReader(folder).objects
    state = {"iteration": objects["iteration"]} if "iteration" in objects else {}
    if isinstance(arguments := objects.get("args"), dict):
        state["args"] = Namespace(**arguments)
    if isinstance(counters := objects.get("train_state"), dict):
        state["num_floating_point_operations_so_far"] = counters.get("floating_point_operations", 0.0)
    if "scheduler" in objects:
        state["opt_param_scheduler"] = objects["scheduler"]
    return {**state, **objects.get("values", {})}
