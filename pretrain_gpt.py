"""Pretrain GPT-like models: ``torchrun --nproc_per_node=N pretrain_gpt.py --num-layers … --data-path …``.

The model, data sets, batch, forward step and loss of GPT are the task in megatron/training/tasks/gpt.py.
"""

import sys

from megatron.training import entry


def main() -> int:
    """Parse the command line and train; return the exit code."""
    return entry.pretrain("gpt", "pretrain_gpt.py")


if __name__ == "__main__":
    sys.exit(main())
