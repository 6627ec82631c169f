"""Pretrain mixtures of experts: ``torchrun --nproc_per_node=N pretrain_moe.py --num-experts E --num-layers …``.

Same as ``pretrain_gpt.py``, with --num-experts required.
"""

import sys

from megatron.training import entry


def main() -> int:
    """Parse the command line and train; return the exit code."""
    return entry.pretrain("moe", "pretrain_moe.py")


if __name__ == "__main__":
    sys.exit(main())
