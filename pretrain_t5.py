"""Pretrain T5-like models: ``torchrun --nproc_per_node=N pretrain_t5.py --num-layers … --data-path …_sentence``.

What is specific to T5 is a task: its model, data sets, batch, forward step, loss (megatron/training/tasks/t5.py).
"""

import sys

from megatron.training.arguments import exit_on_config_error, parse_args
from megatron.training.report.dry_run import preflight


def main() -> int:
    """Parse first: ``--help`` and bad flags answer before torch is loaded."""
    with exit_on_config_error("pretrain_t5.py"):
        cfg = parse_args(args_defaults={"tokenizer_type": "BertWordPieceLowerCase"}, model_family="t5")
        if preflight(cfg):
            return 0

    from megatron.training.run import run
    from megatron.training.tasks.t5 import T5Task

    return run(cfg, T5Task)


if __name__ == "__main__":
    sys.exit(main())
