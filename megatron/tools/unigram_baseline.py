"""Compute a unigram baseline: the loss of token frequencies on the samples of a run's evaluation.

    python tools/unigram_baseline.py [the flags of the training run] --metrics RUN/metrics.jsonl

The unigram model uses the token frequencies of the training split, with each count plus one. ``--metrics`` also prints
the last validation loss of that run. With ``--program pretrain_bert.py`` or ``pretrain_t5.py`` only the target tokens
of training samples are counted. For BERT pairs, it also prints the loss of always predicting the order frequencies."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset
from megatron.core.models.registry import find_program
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.validation import eval_samples
from megatron.training.data.datasets import samples_per_split
from megatron.training.observe.metrics import read_metrics

MOST_SAMPLES = 20_000  # maximum number of training samples whose masked tokens are counted


def token_counts(train: Any, vocab_size: int) -> np.ndarray:
    """Return int64[vocab_size]: the number of times that each id is a training target, plus one. GPT: all tokens of the
    training split. BERT and T5: the targets of at most ``MOST_SAMPLES`` samples."""
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
    """Return the mean negative log-likelihood, in nats per unmasked token, of the first ``num_samples`` samples (or
    all, if fewer) under the frequencies ``counts``."""
    negative_log = -np.log(counts / counts.sum())
    total = tokens = 0.0
    for index in range(min(num_samples, len(valid))):
        sample = valid[index]
        total += float((negative_log[sample["labels"]] * sample["loss_mask"]).sum())
        tokens += float(sample["loss_mask"].sum())
    return total / tokens


def order_loss(train: Any, valid: Any, num_samples: int) -> float:
    """Return the mean negative log-likelihood of the pair order in ``valid``, predicted from its training frequency."""
    swapped = np.mean([train[index]["is_random"] for index in range(min(len(train), MOST_SAMPLES))])
    is_swapped = np.array([valid[index]["is_random"] for index in range(min(num_samples, len(valid)))])
    return float(-np.log(np.where(is_swapped == 1, swapped, 1 - swapped)).mean())


def main(argv: Sequence[str]) -> int:
    """Print the unigram loss on the evaluation samples of the run's flags ``argv``, for BERT's pairs also the loss of
    the order, and with --metrics the model's last losses. Builds data and tokenizer, no model."""
    parser = tool_parser(__doc__)
    parser.add_argument("--program", default="pretrain_gpt.py", help="program of these flags")
    parser.add_argument("--metrics", default=None, help="metrics.jsonl of a run to compare with")
    options, flags = parser.parse_known_args(argv)
    family, _ = find_program(options.program)
    defaults = {"tokenizer_type": family.tokenizer_type}
    cfg = validate_args(parse_args(flags, args_defaults=defaults, model_family=family.name), world_size=1)
    from megatron.training.tasks.language_model import task_class

    tokenizer = build_tokenizer(cfg.tokenizer)
    _, num_valid, _ = samples_per_split(cfg)
    train, valid, _ = task_class(cfg.model_family)(cfg, tokenizer).train_valid_test_datasets_provider((1, num_valid, 0))
    num_valid = len(valid) if num_valid is None else min(eval_samples(cfg.validation), len(valid))
    baseline = unigram_loss(token_counts(train, tokenizer.vocab_size), valid, num_valid)
    print(f"unigram model of the training tokens: validation loss {baseline:.4f} (perplexity {np.exp(baseline):.1f})")
    pairs = "is_random" in valid[0] and cfg.flat.bert_binary_head
    if pairs:
        print(f"always the more frequent order:       validation loss {order_loss(train, valid, num_valid):.4f}")
    if options.metrics is not None:
        evaluations = [record for record in read_metrics(options.metrics) if record["kind"] == "valid"]
        if not evaluations:
            raise UserError(f"--metrics {options.metrics}: contains no validation loss; use a run with --eval-iters")
        loss = evaluations[-1]["lm loss"]
        print(f"trained model, the same tokens:       validation loss {loss:.4f} (perplexity {np.exp(loss):.1f})")
        if pairs:
            print(f"trained model, the same pairs:        validation loss {evaluations[-1]['sop loss']:.4f}")
    return 0
