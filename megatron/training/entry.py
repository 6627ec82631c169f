"""The pretraining programs: read the command line, then train the task of a model family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.config.cli import ConfigError, Problem
from megatron.training.arguments import exit_on_config_error, parse_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.dry_run import preflight


def experts_are_given(cfg: PretrainConfig) -> None:
    """Raise ConfigError for a model without experts."""
    if cfg.num_moe_experts is None:
        raise ConfigError([Problem("--num-experts", "is required", fix="for example --num-experts 8")])


@dataclass(frozen=True)
class EntryProgram:
    """Pretraining program: its model family, default tokenizer type and an additional check of the settings."""

    model_family: str
    tokenizer_type: str
    check: Callable[[PretrainConfig], None] = lambda cfg: None


PROGRAMS = {
    "gpt": EntryProgram("gpt", "GPT2BPETokenizer"),
    "moe": EntryProgram("gpt", "GPT2BPETokenizer", experts_are_given),
    "bert": EntryProgram("bert", "BertWordPieceLowerCase"),
    "t5": EntryProgram("t5", "BertWordPieceLowerCase"),
}


def pretrain(name: str, called: str, argv: Sequence[str] | None = None) -> int:
    """Run the program ``name``; return the exit code. Raises SystemExit with status 2, after a list of problems on
    stderr, for a wrong configuration, and with 0 after --help or --version. A dry run returns 0.

    Parses the command line first, so that ``--help`` and wrong flags are answered before torch is imported.

    Args:
        name: a key of :data:`PROGRAMS`.
        called: name of the command as the user typed it, for error messages.
        argv: its flags; None: this process's command line.
    """
    program = PROGRAMS[name]
    with exit_on_config_error(called):
        defaults = {"tokenizer_type": program.tokenizer_type}
        cfg = parse_args(argv, args_defaults=defaults, model_family=program.model_family)
        program.check(cfg)
        if preflight(cfg):
            return 0

    from megatron.training.run import run
    from megatron.training.tasks.language_model import task_class

    return run(cfg, task_class(program.model_family))
