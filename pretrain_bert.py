"""Pretrain BERT-like models: ``torchrun --nproc_per_node=N pretrain_bert.py --num-layers … --data-path …_sentence``.

The model, data sets, batch, forward step and losses of BERT are the task in megatron/training/tasks/bert.py.
"""

import sys

from megatron.training import entry


def main() -> int:
    """Parse the command line and train; return the exit code."""
    return entry.pretrain("bert", "pretrain_bert.py")


if __name__ == "__main__":
    sys.exit(main())
