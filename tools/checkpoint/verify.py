"""Whether a checkpoint is whole: ``python tools/checkpoint/verify.py FOLDER``.

Reads every byte. Native checkpoints: checksums of all files, every tensor covered exactly once. All formats: every
tensor can be read and holds finite values, and all names and shapes are those of the model that its settings (and flags
of pretrain_gpt.py behind the folder) describe. Exit code 0: whole; 1: the names of what is damaged or missing.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # not this folder, whose inspect.py would hide the standard library's
    sys.path[0] = sys.path[0].removesuffix("/tools/checkpoint")

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.export.interchange import Interchange
from megatron.training.checkpoint.files import saved_iterations
from tools.checkpoint import formats
from tools.checkpoint.convert import completed


def parser() -> argparse.ArgumentParser:
    """The flags of this tool; all others are those of the model."""
    made = formats.parser(__doc__)
    made.add_argument("folder", help="a checkpoint of any format")
    made.add_argument("--all", action="store_true", help="every iteration of a --save folder")
    made.add_argument("--no-names", action="store_true", help="do not compare names and shapes with a model's")
    return made


def main(argv: Sequence[str]) -> int:
    """Command line."""
    args, flags = parser().parse_known_args([each for each in argv if each != "--"])
    steps = saved_iterations(args.folder) if args.all else [args.ckpt_step]
    if not steps:
        raise UserError(f"{args.folder}: holds no iteration")
    damaged = 0
    for step in steps:
        problems = verify(args, flags, step)
        where = args.folder if step is None else f"{args.folder} iteration {step}"
        for problem in problems:
            print(f"DAMAGED {problem}")
        print(f"{where}: {'whole' if not problems else f'{len(problems)} problems'}")
        damaged += bool(problems)
    return int(damaged > 0)


def verify(args: argparse.Namespace, flags: list[str], step: int | None) -> list[str]:
    """What is wrong with one checkpoint."""
    try:
        kind, source = formats.open_checkpoint(args.folder, args.loader, step)
    except UserError as error:
        return [str(error)]
    problems = []
    if kind == "native":  # covered exactly once: opening it has checked that
        problems += CheckpointReader(formats.native_folder(Path(args.folder), step)).verify_assets()
    if not args.no_names:
        try:
            completed(source, flags, kind, args.folder)
        except UserError as error:
            problems.append(str(error))
    return problems + list(damaged_tensors(source))


def damaged_tensors(source: Interchange) -> Iterator[str]:
    """Tensors that cannot be read, or hold values that are not finite."""
    progress = formats.Progress("verified", formats.total_bytes(source.tensors))
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


if __name__ == "__main__":
    sys.exit(formats.program(main))
