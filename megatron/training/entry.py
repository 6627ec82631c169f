"""What the entry scripts do: read the command line, then train the task of a model family."""

from __future__ import annotations

from collections.abc import Callable

from megatron.training.arguments import exit_on_config_error, parse_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.dry_run import preflight


def main(
    program: str, model_family: str, *, tokenizer_type: str, check: Callable[[PretrainConfig], None] = lambda cfg: None
) -> int:
    """Runs ``program``; returns the exit code. ``tokenizer_type`` is its default; ``check`` raises for what it does not
    take besides. Parses first: ``--help`` and bad flags answer before torch is loaded."""
    with exit_on_config_error(program):
        cfg = parse_args(args_defaults={"tokenizer_type": tokenizer_type}, model_family=model_family)
        check(cfg)
        if preflight(cfg):
            return 0

    from megatron.training.run import run
    from megatron.training.tasks.language_model import task_class

    return run(cfg, task_class(model_family))
