"""Flags of the tools that generate or score with the engine, on one rank or on those that torchrun started. Torch-free.

torchrun --nproc-per-node 2 -m megatron generate --load RUN/checkpoints --prompt "def main():"
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from megatron.core.config.errors import UserError
from megatron.core.safe_files import why_not_creatable
from megatron.training.config.launcher import launched_world_size

if TYPE_CHECKING:
    from megatron.core.inference.engine import Engine
    from megatron.training.trained_model import TrainedModel

Result = TypeVar("Result")
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the tokenizer, ranks and CUDA graphs."""
    add_tokenizer_flags(parser)
    about = ("ranks that split each layer; default: all ranks of torchrun", "ranks that split the layers", "EP ranks")
    for name, words in zip(SIZES, about):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=words)
    parser.add_argument(
        "--cuda-graph-impl",
        choices=("local", "none"),
        default="local",
        help="record decode steps as CUDA graphs where possible; none: do not",
    )


def check_new_folder(flag: str, path: str) -> None:
    """Raise UserError unless the folder ``path`` can be created; it may exist if it is empty."""
    if not path.strip():
        raise UserError(f"{flag} {path}: is an empty path; check whether a shell variable is unset")
    if reason := why_not_creatable(path):
        raise UserError(f"{flag} {path}: {reason}; choose another folder")
    if os.path.lexists(path) and (os.path.islink(path) or os.listdir(path)):
        raise UserError(f"{flag} {path}: exists already; choose another name, or remove it")


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a tokenizer in place of the run's."""
    parser.add_argument(
        "--tokenizer-model", metavar="PATH", help="another tokenizer; default: the run's, or its copy in the checkpoint"
    )
    parser.add_argument("--tokenizer-type", metavar="TYPE", help="its type; default: the run's")


def tokenizer_settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings of :func:`add_tokenizer_flags` that ``args`` has."""
    values = {"tokenizer_type": args.tokenizer_type, "tokenizer_model": args.tokenizer_model}
    return {name: value for name, value in values.items() if value is not None}


def layout_flags(args: argparse.Namespace) -> list[str]:
    """Empty on one rank. Raises UserError if the sizes do not multiply to the number of torchrun's ranks."""
    ranks = launched_world_size() or 1
    flags = {f"--{name.replace('_', '-')}": getattr(args, name) for name in SIZES}
    for flag, value in flags.items():
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: must be at least 1")
    tensor, pipeline, expert = flags.values()
    pipeline, expert = pipeline or 1, expert or 1
    sizes = tensor or max(ranks // (pipeline * expert), 1), pipeline, expert
    flags = dict(zip(flags, sizes))
    if (product := math.prod(sizes)) != ranks:
        words = " ".join(f"{flag} {size}" for flag, size in flags.items() if size > 1)
        raise UserError(
            f"{words}: needs {product} ranks, there are {ranks} ranks; use torchrun --nproc-per-node {product} -m "
            "megatron ..."
        )
    return [] if ranks == 1 else [word for flag, size in flags.items() for word in (flag, str(size))]


def load_gpt(args: argparse.Namespace, *, images: bool = False) -> TrainedModel:
    """Return the GPT model of --load on this rank, with ``images`` the vision tower of a Hugging Face folder, too.
    Collective over the ranks of torchrun."""
    from megatron.core.models.gpt.model import GPTModel
    from megatron.training.trained_model import load_trained_model

    layout, tokenizer = layout_flags(args), tokenizer_settings(args)
    trained = load_trained_model(
        args.load, args.ckpt_step, "tools/generate.py", args.family, layout, tokenizer, images=images
    )
    if not isinstance(trained.model, GPTModel):
        raise UserError(f"--load {args.load}: is an encoder-decoder model; use tools/generate.py on one rank")
    return trained


def on_first_rank(engine: Engine, run: Callable[[], Result]) -> Result | None:
    """Return the result of ``run`` on rank 0, whose steps all ranks run; other ranks return None. Collective."""
    from megatron.training.initialize import shut_down

    if not engine.is_first_rank:
        engine.follow()
        shut_down()
        return None
    try:
        return run()
    finally:
        engine.stop()
        shut_down()
