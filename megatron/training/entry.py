"""The pretraining programs: read the command line, then train the task of a model family."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.config.cli import ConfigError
from megatron.core.config.problems import missing
from megatron.core.models.registry import find_program, programs
from megatron.training.arguments import exit_on_config_error, parse_args
from megatron.training.config.named_models import named_models
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.dry_run import preflight


def with_program(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` of ``megatron pretrain`` with the program of --model in front, where a flag or the model's
    name comes first; else unchanged. The program of an unknown model is the default one, which reports it."""
    words = [part for word in arguments for part in word.split("=", 1)]
    if words[0] in named_models():
        words = ["--model", *words]  # the model itself is named in place of a program
        arguments = ["--model", *arguments]
    if words[0].startswith("--") and "--model" in words[:-1]:
        model = named_models().get(words[words.index("--model") + 1])
        return [next(iter(programs())) if model is None else model.program, *arguments]
    return list(arguments)


def read_settings(name: str, called: str, argv: Sequence[str] | None = None) -> PretrainConfig | None:
    """Parse and check the command line of :func:`pretrain`, without importing torch; return the settings, None after a
    dry run. Raises SystemExit with status 2 for a wrong configuration, and with 0 after --help or --version."""
    family, program = find_program(name)
    with exit_on_config_error(called):
        defaults = {"tokenizer_type": family.tokenizer_type}
        cfg = parse_args(argv, args_defaults=defaults, model_family=family.name)
        is_stored = cfg.checkpoint.use_checkpoint_args or cfg.checkpoint.load_hf  # read later, with torch
        if not is_stored and (unset := [field for field in program.required if getattr(cfg.flat, field) is None]):
            raise ConfigError(missing(cfg, field) for field in unset)
        return None if preflight(cfg) else cfg


def pretrain(name: str, called: str, argv: Sequence[str] | None = None) -> int:
    """Run the program ``name``; return the exit code, 0 after a dry run. Raises SystemExit as :func:`read_settings`,
    which comes first, so that ``--help`` and wrong flags are answered before torch is imported.

    Args:
        name: a program of the registry, such as ``gpt``, or the module of a model family outside of ``megatron``.
        called: name of the command as the user typed it, for error messages.
        argv: its flags; None: this process's command line."""
    cfg = read_settings(name, called, argv)
    if cfg is None:
        return 0

    from megatron.training.run import run
    from megatron.training.tasks.language_model import task_class

    return run(cfg, task_class(cfg.model_family))
