"""Commands in messages and help texts, as the user can type them. Torch-free.

Texts name the scripts of a checkout, ``tools/preprocess_data.py``. An installed package has no scripts: the console
command ``megatron`` shows its subcommands in their place."""

import argparse
import re
import sys

SUBCOMMANDS = {
    "sft": "sft",
    "dpo": "dpo",
    "distill": "distill",
    "preprocess_data": "preprocess",
    "train_tokenizer": "train-tokenizer",
    "check_dataset": "check-data",
    "merge_datasets": "merge-data",
    "energon_to_jsonl": "energon-to-jsonl",
    "make_corpus": "make-corpus",
    "checkpoint/convert": "convert",
    "checkpoint/inspect_checkpoint": "inspect",
    "checkpoint/verify": "verify",
    "lora": "lora",
    "card": "card",
    "prune": "prune",
    "quantize": "quantize",
    "inspect_batch": "inspect-batch",
    "generate": "generate",
    "serve": "serve",
    "evaluate": "evaluate",
    "fill_mask": "fill-mask",
    "report": "report",
    "plot_metrics": "plot",
    "verify_layout": "verify-layout",
    "verify_generation": "verify-generation",
    "check_cluster": "check-cluster",
    "plan": "plan",
    "draw_schedule": "draw-schedule",
    "unigram_baseline": "unigram-baseline",
}
"""Script below tools/, without .py -> subcommand of ``megatron``."""

_TOOL = re.compile(r"(?:python )?\btools/([a-z_/]+)\.py\b")
_LAUNCHED = re.compile(r"(\btorchrun (?:-\S+ )*)pretrain_(gpt|bert|t5|moe|hybrid|vlm)\.py\b")
_PROGRAM = re.compile(r"(?<!--program )(?:python )?\bpretrain_(gpt|bert|t5|moe|hybrid|vlm)\.py\b")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of a tool: the description's lines as they are, and each option with its default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return help_with_default(action)


def tool_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of exact flags for a tool whose module docstring is ``description``."""
    text = as_typed(description or "")
    return argparse.ArgumentParser(description=text, formatter_class=HelpFormatter, allow_abbrev=False)


def help_with_default(action: argparse.Action) -> str:
    """Return the help of an option, with its default in brackets unless that is a bool or stated."""
    text, default = action.help or "", action.default
    if default in (None, argparse.SUPPRESS, []) or isinstance(default, bool) or "default:" in text:
        return text
    values = default if isinstance(default, list | tuple) else [default]
    words = " ".join(str(getattr(value, "name", value)) for value in values)
    return f"{text} [{words.replace('%', '%%')}]"


def as_typed(text: str) -> str:
    """Return ``text`` with subcommands in place of scripts if this process is the console command ``megatron``, else
    unchanged. Values of ``--program`` and unknown scripts stay."""
    if not sys.argv[0].startswith("megatron "):
        return text
    text = _TOOL.sub(lambda m: f"megatron {SUBCOMMANDS[m[1]]}" if m[1] in SUBCOMMANDS else m[0], text)
    text = _LAUNCHED.sub(r"\1-m megatron pretrain \2", text)
    return _PROGRAM.sub(r"megatron pretrain \1", text)
