"""How much of a validation loss is mere token frequency: a unigram model's loss on the very samples of an evaluation.

    python tools/unigram_baseline.py [the flags of the training run] --metrics RUN/metrics.jsonl

The unigram model is the token frequencies of the training split, each count plus one. With ``--metrics`` the last
validation loss of that run is printed beside it. With ``--program pretrain_bert.py`` or ``pretrain_t5.py`` the
frequencies are those of what training samples predict, and the order of pairs is compared with always saying the same.
"""

import argparse
import sys
from typing import Any

import numpy as np

from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import exit_on_config_error, parse_args, validate_args
from megatron.training.data.datasets import samples_per_split
from megatron.training.model_description import PROGRAMS
from megatron.training.observe.metrics import read_metrics

MOST_SAMPLES = 20_000  # of training, whose masked tokens are counted


def token_counts(train: Any, vocab_size: int) -> np.ndarray:
    """int64[vocab_size], how often each id is to be predicted in training, plus one."""
    counts = np.ones(vocab_size, dtype=np.int64)
    if not isinstance(train, MaskedWordPieceDataset):
        for document in train.indices:
            counts += np.bincount(train.dataset[int(document)], minlength=vocab_size)
        return counts
    for index in range(min(len(train), MOST_SAMPLES)):
        sample = train[index]
        counts += np.bincount(sample["labels"][sample["loss_mask"] > 0], minlength=vocab_size)
    return counts


def unigram_loss(counts: np.ndarray, valid: Any, num_samples: int) -> float:
    """Mean negative log-likelihood in nats per valid token of the first ``num_samples`` samples of ``valid``."""
    negative_log = -np.log(counts / counts.sum())
    total = tokens = 0.0
    for index in range(min(num_samples, len(valid))):
        sample = valid[index]
        total += float((negative_log[sample["labels"]] * sample["loss_mask"]).sum())
        tokens += float(sample["loss_mask"].sum())
    return total / tokens


def order_loss(train: Any, valid: Any, num_samples: int) -> float:
    """Mean negative log-likelihood of the order of ``valid``'s pairs if it is told from its frequency alone."""
    swapped = np.mean([train[index]["is_random"] for index in range(min(len(train), MOST_SAMPLES))])
    found = np.array([valid[index]["is_random"] for index in range(min(num_samples, len(valid)))])
    return float(-np.log(np.where(found == 1, swapped, 1 - swapped)).mean())


def main(argv: list[str]) -> int:
    """Command line."""
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--program", default="pretrain_gpt.py", choices=[*PROGRAMS], help="whose the flags are")
    own.add_argument("--metrics", default=None, help="metrics.jsonl of a run to compare with")
    options, flags = own.parse_known_args(argv)
    with exit_on_config_error("unigram_baseline.py"):
        family = PROGRAMS[options.program]
        defaults = {"tokenizer_type": "GPT2BPETokenizer" if family == "gpt" else "BertWordPieceLowerCase"}
        cfg = validate_args(parse_args(flags, args_defaults=defaults, model_family=family), world_size=1)
    from megatron.training.tasks.language_model import task_class

    tokenizer = build_tokenizer(cfg)
    _, num_valid, _ = samples_per_split(cfg)
    train, valid, _ = task_class(cfg.model_family)(cfg, tokenizer).train_valid_test_datasets_provider((1, num_valid, 0))
    num_valid = num_valid or len(valid)
    baseline = unigram_loss(token_counts(train, tokenizer.vocab_size), valid, num_valid)
    print(f"unigram model of the training tokens: validation loss {baseline:.4f} (perplexity {np.exp(baseline):.1f})")
    pairs = "is_random" in valid[0] and cfg.bert_binary_head
    if pairs:
        print(f"always the more frequent order:       validation loss {order_loss(train, valid, num_valid):.4f}")
    if options.metrics is not None:
        evaluations = [record for record in read_metrics(options.metrics) if record["kind"] == "valid"]
        if not evaluations:
            print(f"error: {options.metrics} holds no validation loss", file=sys.stderr)
            return 1
        loss = evaluations[-1]["lm loss"]
        print(f"trained model, the same tokens:       validation loss {loss:.4f} (perplexity {np.exp(loss):.1f})")
        if pairs:
            print(f"trained model, the same pairs:        validation loss {evaluations[-1]['sop loss']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
