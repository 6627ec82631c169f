"""The size of evaluation data sets, which determines their shuffle, equals Megatron-LM's."""

import numpy as np
import pytest

from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.data.datasets import samples_per_split
from megatron.training.tasks.language_model import task_class
from tests.test_utils.gpt_runs import MODEL_FLAGS, write_dataset

RUN = "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 25 --eval-iters 3"


def settings(flags, prefix=None):
    data = f"--data-path {prefix} --split 5,4,1" if prefix else "--mock-data"
    return validate_args(parse_args([*MODEL_FLAGS, *f"{RUN} {data} {flags}".split()]), world_size=1)


@pytest.mark.parametrize(
    "flags, valid, test",
    [
        ("--eval-interval 10", (25 // 10 + 1) * 3 * 4, 3 * 4),
        ("--eval-interval 25", 2 * 3 * 4, 3 * 4),
        ("--eval-interval 10 --start-eval-at-iter 10", (3 - 1) * 3 * 4, 3 * 4),
        ("--eval-interval 10 --start-eval-at-iter 100", 3 * 4, 3 * 4),  # the evaluation after training
        ("--eval-interval 10 --eval-global-batch-size 6", 3 * 3 * 6, 3 * 6),
        ("--eval-interval 10 --skip-train", 3 * 4, 3 * 4),
        ("--eval-interval 10 --full-validation", None, None),
        ("", 3 * 4, 3 * 4),
        ("--eval-interval 10 --rampup-batch-size 2 2 8", 3 * 3 * 4, 3 * 4),
    ],
)
def test_samples_per_split_count_every_evaluation(flags, valid, test):
    assert samples_per_split(settings(flags))[1:] == (valid, test)


def test_samples_per_split_derive_iterations_from_samples():
    iterations = MODEL_FLAGS.index("--train-iters"), MODEL_FLAGS.index("--lr-warmup-iters")
    model = [word for i, word in enumerate(MODEL_FLAGS) if not any(i - at in (0, 1) for at in iterations)]
    flags = "--mock-data --global-batch-size 4 --train-samples 90 --eval-iters 3 --eval-interval 10"
    cfg = validate_args(parse_args([*model, *flags.split()]), world_size=1)
    assert samples_per_split(cfg) == (90, (90 // 4 // 10 + 1) * 3 * 4, 3 * 4)


def test_validation_set_is_shuffled_for_all_evaluations(tmp_path):
    cfg = settings("--eval-interval 5", write_dataset(tmp_path / "data"))
    task = task_class("gpt")(cfg, build_tokenizer(cfg.tokenizer))
    _, valid, _ = task.train_valid_test_datasets_provider(samples_per_split(cfg))
    expected = GPTDataset(valid.dataset, valid.dataset_path, valid.indices, 6 * 3 * 4, valid.index_split, valid.config)
    assert len(expected) >= 6 * 3 * 4
    assert np.array_equal(valid.shuffle_index, expected.shuffle_index)
    one = GPTDataset(valid.dataset, valid.dataset_path, valid.indices, 3 * 4, valid.index_split, valid.config)
    assert not np.array_equal(valid.shuffle_index[:12], one.shuffle_index[:12])  # why the count matters
