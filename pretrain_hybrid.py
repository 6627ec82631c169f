"""Pretrain hybrid models: ``torchrun --nproc_per_node=N pretrain_hybrid.py --hybrid-layer-pattern M-M*- …``.

Same as ``pretrain_gpt.py``, with --hybrid-layer-pattern required.
"""

import sys

from megatron.training import entry


def main() -> int:
    """Parse the command line and train; return the exit code."""
    return entry.pretrain("hybrid", "pretrain_hybrid.py")


if __name__ == "__main__":
    sys.exit(main())
