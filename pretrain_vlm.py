"""Pretrain models that read images: ``torchrun --nproc_per_node=N pretrain_vlm.py --vision-model-type qwen …``.

Same as ``pretrain_gpt.py``, with a vision tower.
"""

import sys

from megatron.training import entry


def main() -> int:
    """Parse the command line and train; return the exit code."""
    return entry.pretrain("vlm", "pretrain_vlm.py")


if __name__ == "__main__":
    sys.exit(main())
