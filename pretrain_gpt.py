"""Pretrain GPT-like models: ``torchrun --nproc_per_node=N pretrain_gpt.py --num-layers … --data-path …``.

What is specific to GPT is a task: its model, data sets, batch, forward step and loss (megatron/training/tasks/gpt.py).
"""

import sys
from collections.abc import Callable

from megatron.training.arguments import exit_on_config_error, parse_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.dry_run import preflight


def main(program: str = "pretrain_gpt.py", check: Callable[[PretrainConfig], None] = lambda cfg: None) -> int:
    """Parse first: ``--help`` and bad flags answer before torch is loaded. ``check`` raises for what ``program`` does
    not take besides."""
    with exit_on_config_error(program):
        cfg = parse_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
        check(cfg)
        if preflight(cfg):
            return 0

    from megatron.training.run import run
    from megatron.training.tasks.gpt import GPTTask

    return run(cfg, GPTTask)


if __name__ == "__main__":
    sys.exit(main())
