"""Pretrain GPT-like models: ``torchrun --nproc_per_node=N pretrain_gpt.py --num-layers … --data-path …``.

What is specific to GPT is a task: its model, data sets, batch, forward step and loss (megatron/training/tasks/gpt.py).
"""

import sys

from megatron.training import entry


def main() -> int:
    """Parses the command line, then runs ``GPTTask``."""
    return entry.main("pretrain_gpt.py", "gpt", tokenizer_type="GPT2BPETokenizer")


if __name__ == "__main__":
    sys.exit(main())
