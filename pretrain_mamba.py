"""The former name of ``pretrain_hybrid.py``."""

import sys

from megatron.training import entry


def main() -> int:
    """Parse the command line and train; return the exit code."""
    return entry.pretrain("hybrid", "pretrain_mamba.py")


if __name__ == "__main__":
    sys.exit(main())
