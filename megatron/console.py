"""The console command ``megatron``: pretraining programs and tools as subcommands.

``python -m megatron`` and the scripts of a checkout (``pretrain_gpt.py``, ``tools/*.py``) run the same code. A
subcommand's module is imported only when it is called, so that ``megatron --help`` answers at once."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise

from megatron.core.config.cli import ConfigError, report, suggestion
from megatron.core.config.commands import as_typed
from megatron.core.config.errors import EXIT_BAD_INPUT, UserError, folder_fix
from megatron.core.dist_checkpointing.files import may_hold_checkpoint
from megatron.core.models.registry import programs
from megatron.version import version_text

TOOLS = {
    "sft": ("sft", "fine-tune a Hugging Face model on conversations"),
    "dpo": ("dpo", "train a Hugging Face model on preference pairs"),
    "distill": ("distill", "train a Hugging Face model on the distributions of a larger one"),
    "preprocess": ("preprocess_data", "tokenize text into the .bin and .idx files that training reads"),
    "train-tokenizer": ("train_tokenizer", "train a byte-level BPE or WordPiece tokenizer"),
    "check-data": ("check_dataset", "check tokenized data sets and print their contents"),
    "merge-data": ("merge_datasets", "join tokenized data sets"),
    "energon-to-jsonl": ("energon_to_jsonl", "convert data sets of megatron-energon to JSON lines and images"),
    "make-corpus": ("make_corpus", "write a sample corpus: stories, or text of Python's standard library"),
    "convert": ("checkpoint.convert", "convert checkpoints: Hugging Face, Megatron-LM, native, safetensors"),
    "lora": ("lora", "write adapters in PEFT's format, read them, or merge them into the weights"),
    "prune": ("prune", "prune a trained GPT to a smaller one: channels, heads, experts, layers"),
    "quantize": ("quantize", "quantize a GPT model to fp8, calibrated on texts, as a Hugging Face folder"),
    "inspect": ("checkpoint.inspect_checkpoint", "print the tensors of a checkpoint, or compare two"),
    "card": ("card", "verify a Hugging Face folder: conversion, training, layouts, text; write a card"),
    "verify": ("checkpoint.verify", "check that a checkpoint is complete and undamaged"),
    "generate": ("generate", "generate text with a trained GPT or T5 model"),
    "serve": ("serve", "serve a trained GPT model over HTTP with OpenAI's interface"),
    "evaluate": ("evaluate", "score a trained GPT model on tasks of lm-evaluation-harness"),
    "fill-mask": ("fill_mask", "predict masked words with a trained BERT model"),
    "report": ("report", "write an HTML page about a run, or compare runs"),
    "plot": ("plot_metrics", "plot the metrics of runs"),
    "verify-layout": ("verify_layout", "compare a parallel layout with a single process"),
    "verify-generation": ("verify_generation", "compare the log-probabilities of trainer and generator bit for bit"),
    "check-cluster": ("check_cluster", "measure links, collectives and GPUs of a cluster and name slow ones"),
    "plan": ("plan", "find the fastest layouts of a model on a cluster, with memory, time and cost"),
    "draw-schedule": ("draw_schedule", "draw a pipeline schedule"),
    "inspect-batch": ("inspect_batch", "print the text of a training batch"),
    "unigram-baseline": ("unigram_baseline", "loss of a unigram model on a run's validation samples"),
}
"""Subcommand -> (module below megatron.tools, description)."""

PRETRAIN_USAGE = """usage: megatron pretrain {%s} [--nproc N] [--flag value ...]
       megatron pretrain --model llama3-8b [--nproc N] [--flag value ...]

--model NAME sets a published shape and, if none is named, selects the program; megatron pretrain gpt --help models
lists the names.
--nproc N starts N processes on this machine, usually one per GPU, as torchrun --nproc_per_node=N does. On several
machines run on each of them: torchrun OPTIONS -m megatron pretrain gpt --flag value ...
megatron pretrain gpt --help lists the flags. A model family outside of this package is named by its module.
"""


def usage() -> str:
    """The text of ``megatron --help``."""
    lines = ["usage: megatron COMMAND ...", "", "pretraining (--nproc N starts N processes on this machine):"]
    lines += [f"  {'pretrain ' + name:<18}{program.about}" for name, (_, program) in programs().items()]
    lines += ["", "tools:", *(f"  {name:<18}{text}" for name, (_, text) in TOOLS.items())]
    lines += ["", "megatron COMMAND --help lists the flags of a command; megatron --version prints the version."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand ``argv[0]`` (pretrain or a tool); return the exit code. ``argv`` None means this process's
    command line, whose ``sys.argv[0]`` becomes ``megatron COMMAND``. Help and --version are printed here. An unknown
    or missing subcommand gives EXIT_BAD_INPUT and a message on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        (sys.stdout if words else sys.stderr).write(usage())
        return 0 if words else EXIT_BAD_INPUT
    if "--version" in words:
        print(version_text())
        return 0
    name, *arguments = words
    if argv is None:
        program = f" {arguments[0]}" if name == "pretrain" and arguments else ""
        sys.argv[0] = f"megatron {name}{program}"  # argparse prints it in usage lines
    if name == "pretrain":
        return pretrain(arguments)
    if name not in TOOLS:
        sys.stderr.write(f"error: megatron {name}: unknown command; {suggestion(name, ['pretrain', *TOOLS])}\n")
        return EXIT_BAD_INPUT
    return run_tool(name, arguments)


def run_tool(name: str, arguments: Sequence[str]) -> int:
    """Import and run a tool of :data:`TOOLS`; return its exit code. UserError and OSError become one message on stderr
    and the error's exit code or :data:`EXIT_BAD_INPUT`; a closed pipe gives 1, Ctrl-C 130. Other errors propagate."""
    try:
        check_folders(name, arguments)
        return import_module(f"megatron.tools.{TOOLS[name][0]}").main(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, OSError) as error:
        if isinstance(error, ConfigError):
            report(error)
        else:
            message, flag = str(error), output_flag(arguments)
            if isinstance(error, OSError) and error.errno in NO_SPACE and flag:
                file = f": {error.filename}" if error.filename else ""
                message = f"{flag}: cannot be written ({error.strerror}{file}); make room, or choose another folder"
            sys.stderr.write(f"error: {as_typed(message)}\n")
        return error.exit_code if isinstance(error, UserError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; run the same command again\n")
        return 130


FOLDERS = {
    **dict.fromkeys(("generate", "serve", "evaluate", "fill-mask", "inspect-batch", "prune"), "--load"),
    "quantize": "--load --load-hf",
    "card": "--load-hf",
    "convert": "--load-dir",
    "verify": "",
    "inspect": "",
}
"""Tool -> flags of the folder that it reads; empty: its first word."""


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
OUTPUTS = ("--output-prefix", "--output", "--save-hf", "--save-dir", "--save")


def output_flag(arguments: Sequence[str]) -> str:
    """Return the flag of the tool's output and its value, such as "--output tokenizer", or ""."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    for word, value in pairwise(words):
        if word.replace("_", "-") in OUTPUTS:
            return f"{word} {value}"
    return ""


def check_folders(name: str, arguments: Sequence[str]) -> None:
    """Raise UserError if a folder that the tool ``name`` reads does not exist or holds no checkpoint: before the tool
    imports torch, which takes seconds."""
    flags = FOLDERS.get(name)
    if flags is None or {"-h", "--help"} & set(arguments):
        return
    words = [word for argument in arguments for word in (argument.split("=", 1) if flags else [argument])]
    normal = [word.replace("_", "-") for word in words]
    flag = next((word for word in normal if word in flags.split()), "")
    place = normal.index(flag) + 1 if flag else len(words) if flags else 0
    if place < len(words) and not words[place].startswith("--"):
        if not os.path.lexists(words[place]):
            fix = folder_fix(words[place]) if flag else "check the path"
            raise UserError(f"{flag} {words[place]}: there is no such folder; {fix}".lstrip())
        if not may_hold_checkpoint(words[place]):
            raise UserError(f"{flag} {words[place]}: holds no checkpoint; give the --save folder of a run".lstrip())


def pretrain(arguments: Sequence[str]) -> int:
    """Run the pretraining program ``arguments[0]``, or the one of --model, in this process; return the exit code. With
    --nproc, check the settings, and replace this process by torchrun. Help and wrong names print a message."""
    if arguments and arguments[0] not in programs():
        from megatron.training.entry import with_program

        arguments = with_program(arguments)
    if not arguments or (arguments[0] not in programs() and "." not in arguments[0]):
        wants_help = {"-h", "--help"} & set(arguments[:1])
        if arguments and not wants_help:
            hint = suggestion(arguments[0], programs())
            sys.stderr.write(f"error: megatron pretrain {arguments[0]}: there is no such program; {hint}\n")
        (sys.stdout if wants_help else sys.stderr).write(PRETRAIN_USAGE % ",".join(programs()))
        return 0 if wants_help else EXIT_BAD_INPUT
    name, flags = arguments[0], list(arguments[1:])
    try:
        count, flags = parse_nproc(flags)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    from megatron.training import entry

    called = f"megatron pretrain {name}"
    if count is None or {"-h", "--help"} & set(flags):
        return entry.pretrain(name, called, flags)
    if count.isdecimal():
        os.environ["WORLD_SIZE"] = count  # as in the processes: wrong settings end here, in one message
        try:
            if entry.read_settings(name, called, flags) is None:
                return 0
        finally:
            del os.environ["WORLD_SIZE"]
    launcher = ["-m", "megatron.training.start.torchrun", "--standalone", f"--nproc_per_node={count}"]
    sys.stdout.flush()
    return os.execv(sys.executable, [sys.executable, *launcher, "-m", "megatron", "pretrain", name, *flags])


def parse_nproc(flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split ``flags`` into the value of --nproc (None: not given) and the other flags. Raises UserError: the value is
    not a number of processes, or a launcher has started this process already."""
    count, remaining, words = None, [], iter(flags)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") not in ("--nproc", "--nproc-per-node"):
            remaining.append(word)
            continue
        count = value if equals else next(words, "")
        if not (count.isdecimal() and 0 < int(count[:6]) < 10**5) and count not in ("auto", "cpu", "gpu"):
            raise UserError(f"{flag} {count or '(empty)'}: must be a positive integer, auto, cpu or gpu")
        if "RANK" in os.environ:
            raise UserError(f"{flag} {count}: torchrun has already started this process; remove {flag}")
    return count, remaining
