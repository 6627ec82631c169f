"""Pretrain BERT-like models: ``torchrun --nproc_per_node=N pretrain_bert.py --num-layers … --data-path …_sentence``.

What is specific to BERT is a task: its model, data sets, batch, forward step, losses (megatron/training/tasks/bert.py).
"""

import sys

from megatron.training.arguments import exit_on_config_error, parse_args
from megatron.training.report.dry_run import preflight


def main() -> int:
    """Parse first: ``--help`` and bad flags answer before torch is loaded."""
    with exit_on_config_error("pretrain_bert.py"):
        cfg = parse_args(args_defaults={"tokenizer_type": "BertWordPieceLowerCase"}, model_family="bert")
        if preflight(cfg):
            return 0

    from megatron.training.run import run
    from megatron.training.tasks.bert import BertTask

    return run(cfg, BertTask)


if __name__ == "__main__":
    sys.exit(main())
