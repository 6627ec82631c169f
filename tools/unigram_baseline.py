"""How much of a validation loss is mere token frequency: a unigram model's loss on the very samples of an evaluation.

    python tools/unigram_baseline.py [the flags of the training run] --metrics RUN/metrics.jsonl

The unigram model is the token frequencies of the training split, each count plus one. With ``--metrics`` the last
validation loss of that run is printed beside it.
"""

import sys
from typing import Any

import numpy as np

from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import exit_on_config_error, parse_args, validate_args
from megatron.training.data.datasets import samples_per_split
from megatron.training.observe.metrics import read_metrics


def add_flags(parser: Any) -> Any:
    """This tool's own flag beside those of training."""
    parser.add_argument("--metrics", default=None, help="metrics.jsonl of a run to compare with")
    return parser


def unigram_loss(train: Any, valid: Any, vocab_size: int, num_samples: int) -> float:
    """Mean negative log-likelihood in nats per valid token of the first ``num_samples`` samples of ``valid``."""
    counts = np.ones(vocab_size, dtype=np.int64)
    for document in train.indices:
        counts += np.bincount(train.dataset[int(document)], minlength=vocab_size)
    negative_log = -np.log(counts / counts.sum())
    total = tokens = 0.0
    for index in range(min(num_samples, len(valid))):
        sample = valid[index]
        total += float((negative_log[sample["labels"]] * sample["loss_mask"]).sum())
        tokens += float(sample["loss_mask"].sum())
    return total / tokens


def main() -> int:
    """Command line."""
    with exit_on_config_error("unigram_baseline.py"):
        cfg = validate_args(parse_args(extra_args_provider=add_flags), world_size=1)
    from megatron.training.tasks.gpt import GPTTask

    tokenizer = build_tokenizer(cfg)
    _, num_valid, _ = samples_per_split(cfg)
    train, valid, _ = GPTTask(cfg, tokenizer).train_valid_test_datasets_provider((1, num_valid, 0))
    baseline = unigram_loss(train, valid, tokenizer.vocab_size, num_valid or len(valid))
    print(f"unigram model of the training tokens: validation loss {baseline:.4f} (perplexity {np.exp(baseline):.1f})")
    if cfg.extra["metrics"] is not None:
        evaluations = [record for record in read_metrics(cfg.extra["metrics"]) if record["kind"] == "valid"]
        if not evaluations:
            print(f"error: {cfg.extra['metrics']} holds no validation loss", file=sys.stderr)
            return 1
        loss = evaluations[-1]["lm loss"]
        print(f"trained model, the same tokens:       validation loss {loss:.4f} (perplexity {np.exp(loss):.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
