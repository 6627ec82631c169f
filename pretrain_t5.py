"""Pretrain T5-like models: ``torchrun --nproc_per_node=N pretrain_t5.py --num-layers … --data-path …_sentence``.

The model, data sets, batch, forward step and loss of T5 are the task in megatron/training/tasks/t5.py.
"""

import sys

from megatron.training import entry


def main() -> int:
    """Parse the command line and train; return the exit code."""
    return entry.pretrain("t5", "pretrain_t5.py")


if __name__ == "__main__":
    sys.exit(main())
