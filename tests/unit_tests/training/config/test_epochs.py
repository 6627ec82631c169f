"""--num-epochs: training samples and schedules from the size of the training data."""

import re

import numpy as np
import pytest

from megatron.core.config.cli import ConfigError
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.data.blend import Split
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.settings_file import write_settings
from tests.test_utils import masked_runs

LENGTHS = [40, 7, 1, 90, 33, 64, 12, 5, 88, 21]
"""Tokens of 10 documents; the first 8 are the training data of --split 80,20,0: 252 tokens."""
SIZES = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 --lr 1e-3"
    " --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 64 --split 80,20,0 --eval-iters 0"
)


def write(prefix, lengths=LENGTHS):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for length in lengths:
            builder.add_document(np.arange(length) % 60, [length])
        builder.finalize(f"{prefix}.idx")
    return prefix


def resolved(text, world_size=1, family="gpt"):
    return validate_args(parse_args(f"{SIZES} {text}".split(), model_family=family), world_size, announce=False)


def error_text(text):
    with pytest.raises(ConfigError) as error:
        resolved(text)
    return str(error.value)


@pytest.mark.parametrize("epochs, samples", [(1, 15), (2, 31), (3, 47), (20, 314)])
def test_training_samples_equal_complete_passes(epochs, samples, tmp_path):
    """A pass has 252 tokens; samples of 16 share one token with the next: (252 epochs - 1) // 16."""
    data = write(tmp_path / "data")
    flags = f"--data-path {data} --num-epochs {epochs} --global-batch-size 4 --lr-decay-style cosine"
    cfg = resolved(f"{flags} --lr-warmup-fraction 0.1")
    assert cfg.training.train_samples == samples == (sum(LENGTHS[:8]) * epochs - 1) // 16
    assert (cfg.training.train_iters, cfg.schedule.lr_decay_samples) == (samples // 4, samples)
    assert resolved(f"{flags} --global-batch-size 2", 2).training.train_iters == samples // 2
    config = GPTDatasetConfig(random_seed=1, sequence_length=16, blend=([str(data)], None), split="80,20,0",
                              path_to_cache=str(tmp_path), tokenizer=None, reset_position_ids=False,
                              reset_attention_mask=False, eod_mask_loss=False)  # fmt: skip
    dataset = GPTDataset(IndexedDataset(str(data)), str(data), np.arange(8), samples, Split.train, config)
    assert (dataset.num_epochs, len(dataset)) == (epochs, samples), "no pass is begun that is not finished"


def test_a_ramp_of_batch_sizes_and_settings_files_use_the_same_samples(tmp_path):
    flags = f"--data-path {write(tmp_path / 'data')} --num-epochs 2"
    cfg = resolved(f"{flags} --global-batch-size 4 --rampup-batch-size 2 2 8")
    assert (cfg.training.train_samples, cfg.training.train_iters) == (31, 4 + 5)  # 8 samples in steps of 2, 23 of 4
    write_settings(cfg.flat, str(tmp_path))
    repeated = validate_args(parse_args(["--yaml-cfg", str(tmp_path / "settings.yaml")]), 1, announce=False)
    assert repeated.training == cfg.training


def test_documents_of_different_lengths_give_the_samples_of_each(tmp_path):
    """A document of n tokens has n - 1 predictions, in samples of up to 16."""
    flags = f"--data-path {write(tmp_path / 'data')} --num-epochs 3 --use-varlen-dataset"
    assert resolved(flags).training.train_samples == 3 * sum(-(-(length - 1) // 16) for length in LENGTHS[:8])


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--data-path 1 {data} 1 {other}",
            "--num-epochs 2: needs one training data set, whose size is one epoch; join",
        ),
        ("--data-path {data} {other}", "--num-epochs 2: needs one training data set"),
        ("--data-path {data} --train-iters 3", "--num-epochs 2: contradicts --train-iters; give one of them"),
        ("--data-path {data} --train-samples 3", "--num-epochs 2: contradicts --train-samples; give one of them"),
        ("--data-path {data} --lr-warmup-iters 2", "--lr-warmup-iters 2: does not go with --num-epochs; use"),
        ("--data-path {data} --global-batch-size 32", "--num-epochs 2: is less than one global batch of 32"),
        ("--mock-data", "--num-epochs 2: needs data files, whose size is one epoch; use --train-iters"),
        ("--data-path {tmp}/missing", "missing"),
        ("--data-path {data} --num-epochs 0", "--num-epochs 0: must be at least 1"),
        ("--data-path {tiny}", "--num-epochs 2: a full pass of train asked of"),
    ],
)
def test_lengths_that_cannot_be_computed_are_named(flags, message, tmp_path):
    places = {name: write(tmp_path / name) for name in ("data", "other")} | {"tmp": tmp_path}
    places["tiny"] = write(tmp_path / "tiny", [3, 2])
    assert message in re.sub(r"\s+", " ", error_text(f"--num-epochs 2 {flags.format(**places)}"))


def test_masked_samples_of_a_pass_are_repeated(tmp_path):
    masked_runs.write_corpora(tmp_path)
    tokenizer = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {tmp_path / 'vocab.txt'}"
    flags = f"--data-path {tmp_path / 'a'} {tokenizer} --num-epochs"
    once, thrice = (resolved(f"{flags} {epochs}", family="bert").training.train_samples for epochs in (1, 3))
    assert once >= 56 and thrice == 3 * once, "56 documents of the training split, of one sample or more"
