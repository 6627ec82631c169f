"""Fine-tune a Hugging Face model on conversations.

    python tools/sft.py --data chats.jsonl --load-hf FOLDER --save RUN
    python tools/sft.py --data chats.jsonl --load-hf FOLDER --inspect 2

Short form of pretrain_gpt.py --sft (pretrain_vlm.py if the model reads images and a conversation has some) with
defaults for fine-tuning: one pass over the conversations at a small learning rate. Accepts all flags of that program,
which replace the defaults, and --nproc N for N processes on this machine. The same command continues a run from its
--save folder."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.commands import as_typed, tool_parser
from megatron.core.config.errors import UserError, folder_fix, printable
from megatron.core.config.vision import VisionConfig
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.models.registry import programs

MAX_LENGTH = 4096
"""Default of --seq-length for models of longer contexts."""
DEFAULTS = {
    "num-epochs": "1", "micro-batch-size": "1", "global-batch-size": "16", "lr": "1e-5", "min-lr": "1e-6",
    "lr-decay-style": "cosine", "lr-warmup-fraction": "0.03", "weight-decay": "0", "attention-dropout": "0",
    "hidden-dropout": "0", "log-interval": "1",
}  # fmt: skip
"""Flags of pretrain_gpt.py that this tool sets."""
IMAGE_KEY = re.compile(rb'(?<!\\)"(?:images?|image_url)"')
"""A key or a type of the images of a conversation."""


def parse_command_line(argv: Sequence[str], about: str, teacher: bool = False) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this tool and all others, with --nproc. ``about``: text of --help; ``teacher``: whether the
    tool has --teacher, for which the others contain --export-kd-teacher-load."""
    parser = tool_parser(about)
    if teacher:
        text = "model whose distributions are learned: a --save directory or a Hugging Face folder"
        parser.add_argument("--teacher", required=True, metavar="FOLDER", help=text)
    parser.add_argument("--data", required=True, metavar="FILE", help="JSON lines file to train on")
    parser.add_argument("--valid-data", metavar="FILE", help="JSON lines file for validation, all of it")
    parser.add_argument("--load-hf", required=True, metavar="FOLDER", help="model to start from, with its tokenizer")
    parser.add_argument("--inspect", type=int, metavar="N", help="print N rows with their loss masks, and stop")
    options, rest = parser.parse_known_args(argv)
    if teacher:
        rest += ["--export-kd-teacher-load", options.teacher]
    if options.inspect is not None and options.inspect < 1:
        raise UserError(f"--inspect {options.inspect}: must be at least 1")
    if not os.path.isdir(options.load_hf):
        raise UserError(f"--load-hf {options.load_hf}: there is no such folder; {folder_fix(options.load_hf)}")
    return options, rest


def run_flags(
    options: argparse.Namespace, rest: Sequence[str], kind: str = "--sft", values: Mapping[str, str] = DEFAULTS
) -> list[str]:
    """Return the flags of pretrain_gpt.py: ``kind`` and ``rest``, after default ``values``."""
    defaults = dict(values)
    if config := model_config(options.load_hf):
        length = config.get("text_config", config).get("max_position_embeddings")
        defaults["seq-length"] = str(min(MAX_LENGTH, length if isinstance(length, int) else MAX_LENGTH))
    names = {word.partition("=")[0].lstrip("-").replace("_", "-") for word in rest if word.startswith("--")}
    if {"train-iters", "train-samples"} & names:
        del defaults["num-epochs"]
    flags = [word for name, value in defaults.items() if name not in names for word in (f"--{name}", value)]
    if "save" in names and "load" not in names:
        place = next(index for index, word in enumerate(rest) if word.partition("=")[0] == "--save")
        flags += ["--load", rest[place].partition("=")[2] or "".join(rest[place + 1 : place + 2])]
    if not {"bf16", "fp16"} & names and os.path.exists("/dev/nvidiactl"):
        flags.append("--bf16")
    validation = ["--eval-iters", "0"]
    if options.valid_data:
        validation = ["--valid-data-path", options.valid_data, "--full-validation"]
    return [kind, "--load-hf", options.load_hf, "--train-data-path", options.data, *validation, *flags, *rest]


def model_config(folder: str) -> dict[str, Any]:
    """Return the content of config.json; empty without the file."""
    path = Path(folder, "config.json")
    return dict(read_json(path)) if path.is_file() else {}


def has_images(options: argparse.Namespace) -> bool:
    """Return whether the model reads images and the data or the validation data has some."""
    from megatron.core.datasets.conversations.prepare import read_lines

    files = filter(None, (options.data, options.valid_data))
    return "vision_config" in model_config(options.load_hf) and any(
        IMAGE_KEY.search(line) for path in files for _, line in read_lines(path)
    )


def print_rows(flags: Sequence[str], count: int, program: str) -> None:
    """Print the first ``count`` rows of the packed conversations of a run."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpoint.other_formats import apply_hf_settings
    from megatron.training.data.datasets import select_data_set
    from megatron.training.initialize import configure_logging

    configure_logging()
    cfg = validate_args(apply_hf_settings(parse_args(flags, model_family=program)), 1, announce=False)
    kind, config = select_data_set(cfg, build_tokenizer(cfg.tokenizer))
    sizes = [None, None if cfg.data.valid_data_path else 0, 0]  # also reports lines of the validation data
    data = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()[0]
    for row in range(min(count, len(data))):
        print(f"row {row}:")
        for text in data.describe(row):
            print(printable(text))


def main(argv: Sequence[str]) -> int:
    """Train, or print samples; return the exit code. Raises UserError: wrong flags, data or model."""
    return fine_tune(argv, __doc__ or "", "--sft", DEFAULTS)


def fine_tune(argv: Sequence[str], about: str, kind: str, defaults: Mapping[str, str], teacher: bool = False) -> int:
    """Run :func:`main` for another ``kind`` of training (a flag of pretrain_gpt.py) with its ``defaults``, and with
    --teacher if ``teacher``."""
    options, rest = parse_command_line(argv, about, teacher)
    from megatron.console import parse_nproc, pretrain

    processes, rest = parse_nproc(rest)
    reads_images = kind == "--sft" and has_images(options)
    program = next(
        name for name, (family, _) in programs().items() if not reads_images or VisionConfig in family.groups
    )
    if options.inspect:
        print_rows(run_flags(options, [*rest, "--train-iters", "1"], kind, defaults), options.inspect, program)
        return 0
    flags = run_flags(options, rest, kind, defaults)
    print(as_typed(" ".join([f"python pretrain_{program}.py", *flags])), flush=True)
    return pretrain([program, *(["--nproc", processes] if processes else []), *flags])
