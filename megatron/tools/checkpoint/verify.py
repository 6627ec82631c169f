"""Verify that a checkpoint is complete: ``python tools/checkpoint/verify.py FOLDER``.

Reads every byte. In all formats, every tensor must be readable and finite, and all names and shapes must match the
model that the checkpoint's settings describe (add flags of pretrain_gpt.py after the folder to complete them). For
native checkpoints, also checks the checksums of all files and that the shards cover every tensor exactly once.
Exit code 0: complete; 1: damaged, prints all damaged or missing tensors and files; 2: the folder does not exist, or
has no known format."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron.core.config.errors import UserError, counted
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.export.interchange import Interchange
from megatron.tools.checkpoint import formats
from megatron.tools.checkpoint.convert import completed
from megatron.training.checkpoint.files import saved_iterations


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of this tool; unknown flags are passed to the model's parser."""
    arguments = formats.parser(__doc__)
    arguments.add_argument("folder", help="a checkpoint of any format")
    arguments.add_argument("--all", action="store_true", help="every iteration of a --save folder")
    arguments.add_argument("--no-names", action="store_true", help="do not compare names and shapes with the model")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Read all of the checkpoint that ``argv`` names, print its problems, and return the exit code: 1 if one is
    damaged, else 0. Raises UserError: the folder does not exist or contains no iteration."""
    args, flags = parser().parse_known_args([word for word in argv if word != "--"])
    if not os.path.lexists(args.folder):
        raise UserError(f"{args.folder}: there is no such folder")
    if args.loader == "auto":
        formats.detect_format(Path(args.folder))  # a folder of no format is no damaged checkpoint
    steps = saved_iterations(args.folder) if args.all else [args.ckpt_step]
    if not steps:
        raise UserError(f"{args.folder}: holds no iteration")
    damaged = 0
    for step in steps:
        problems = verify(args, flags, step)
        where = args.folder if step is None else f"{args.folder} iteration {step}"
        for problem in problems:
            print(f"DAMAGED {problem}")
        print(f"{where}: {counted(len(problems), 'problem') if problems else 'whole'}")
        damaged += bool(problems)
    return int(damaged > 0)


def verify(args: argparse.Namespace, flags: list[str], step: int | None) -> list[str]:
    """Return the problems of one iteration; a checkpoint that cannot be opened has only this one. Reads everything."""
    try:
        kind, source = formats.open_checkpoint(args.folder, args.loader, step)
    except UserError as error:
        return [str(error)]
    problems = []
    if kind == "native":  # opening it has checked that shards cover every tensor exactly once
        problems += CheckpointReader(formats.native_folder(Path(args.folder), step)).verify_assets()
    if not args.no_names and "base" not in source.objects:  # adapters: the names of no full model
        try:
            completed(source, flags, kind, args.folder)
        except UserError as error:
            problems.append(str(error))
    return problems + list(damaged_tensors(source))


def damaged_tensors(source: Interchange) -> Iterator[str]:
    """Yield one message per tensor that is unreadable or contains NaN or infinity, with progress on stderr."""
    progress = formats.CopyProgress("verified", formats.total_bytes(source.tensors))
    for name, tensor in formats.in_order(progress.watch(source.tensors)):
        try:
            values = tensor.read().reshape(-1)
        except UserError as error:
            yield str(error)
            continue
        if tensor.dtype.is_floating_point:
            wrong = sum(int((~torch.isfinite(part)).sum()) for part in values.split(1 << 24))
            if wrong:
                yield f"{name}: {wrong} of {values.numel()} values are not finite"
    progress.finish()
