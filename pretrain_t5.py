"""Pretrain T5-like models: ``torchrun --nproc_per_node=N pretrain_t5.py --num-layers … --data-path …_sentence``.

What is specific to T5 is a task: its model, data sets, batch, forward step, loss (megatron/training/tasks/t5.py).
"""

import sys

from megatron.training import entry


def main() -> int:
    """Parses the command line, then runs ``T5Task``."""
    return entry.main("pretrain_t5.py", "t5", tokenizer_type="BertWordPieceLowerCase")


if __name__ == "__main__":
    sys.exit(main())
