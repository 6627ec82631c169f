"""Pretrain BERT-like models: ``torchrun --nproc_per_node=N pretrain_bert.py --num-layers … --data-path …_sentence``.

What is specific to BERT is a task: its model, data sets, batch, forward step, losses (megatron/training/tasks/bert.py).
"""

import sys

from megatron.training import entry


def main() -> int:
    """Parses the command line, then runs ``BertTask``."""
    return entry.main("pretrain_bert.py", "bert", tokenizer_type="BertWordPieceLowerCase")


if __name__ == "__main__":
    sys.exit(main())
