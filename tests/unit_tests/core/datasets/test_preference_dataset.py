"""Rows of preference pairs: every pair complete in one row, once per epoch."""

from collections import Counter

import numpy as np
import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.conversations.preferences import PREFERENCES
from megatron.core.datasets.conversations.prepare import prepared
from megatron.core.datasets.preference_dataset import PreferenceDataset
from megatron.core.datasets.sft_dataset import SFTDatasetConfig
from megatron.core.rl.preference_losses import sum_completions
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.chats import assistant, tokenizer_folder, user, write_lines

LONG = 7  # index of the line that no row can have


def pair(number):
    answer = f"{number} of them." * (200 if number == LONG else 1 + number % 3)
    return {"prompt": [user(f"How many? {number}")], "chosen": [assistant(answer)], "rejected": [assistant("None.")]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Path of the pairs and their tokenizer."""
    folder = tmp_path_factory.mktemp("pairs")
    path = write_lines(folder / "pairs.jsonl", [pair(number) for number in range(30)])
    return path, build_huggingface(tokenizer_folder(folder / "tokenizer"))


def build(data, samples=None, **options):
    path, tokenizer = data
    config = SFTDatasetConfig(
        random_seed=5, sequence_length=options.pop("length", 256), blend=([path], None), split="1", tokenizer=tokenizer,
        **options,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(PreferenceDataset, [samples, 0, 0], lambda: True, config).build()[0]


@pytest.mark.parametrize("packing", [True, False])
def test_rows_have_complete_pairs_once_per_epoch(data, packing):
    arrays, *_ = prepared(*data, None, PREFERENCES)
    starts, lines = np.cumsum(arrays["lengths"]) - arrays["lengths"], Counter()
    rows = build(data, packing=packing)
    rows.reference_losses = np.arange(len(arrays["tokens"]), dtype=np.float32)
    for index in range(len(rows)):
        row, numbers = rows[index], rows.row_sequences(index)
        bounds = row["cu_seqlens"]
        if not packing:
            assert len(numbers) == 2
        for place, number in enumerate(numbers):
            stored = arrays["tokens"][starts[number] : starts[number] + arrays["lengths"][number]].astype(int)
            span = slice(bounds[place], bounds[place] + len(stored) - 1)
            assert row["labels"][span].tolist() == np.where(stored < 0, -1 - stored, stored)[1:].tolist()
            assert row["completions"][span].tolist() == np.where(stored[1:] < 0, -1, place).tolist()
            assert row["reference"][span].tolist() == list(range(starts[number] + 1, starts[number] + len(stored)))
            assert number % 2 == place % 2 and numbers[place - place % 2] == number - number % 2
        assert (row["completions"][bounds[len(numbers)] :] == -1).all()
        assert not row["reference"][bounds[len(numbers)] :].any()
        lines.update(arrays["lines"][numbers[::2]].tolist())
        lengths = np.diff(bounds)[: len(numbers)]
        assert rows.attention_costs(np.array([index])).tolist() == [int((lengths.astype(int) ** 2).sum())]
    assert lines == Counter({line: 1 for line in range(1, 31) if line != LONG + 1})


def test_sums_of_a_row_are_those_of_its_completions(data):
    row = build(data)[0]
    values = -np.arange(256, dtype=np.float32)
    count = row["completions"].max() + 1
    sums = sum_completions(torch.from_numpy(values)[None], torch.from_numpy(row["completions"])[None], int(count))
    for place, (start, stop) in enumerate(zip(row["cu_seqlens"], row["cu_seqlens"][1 : count + 1])):
        mask = row["loss_mask"][start:stop]
        assert sums.log_probs_bn[0, place].item() == (values[start:stop] * mask).sum()
        assert sums.lengths_bn[0, place].item() == mask.sum() > 0


def test_pairs_longer_than_a_row_are_counted(data, caplog):
    with caplog.at_level("INFO"):
        rows = build(data)
    assert len(rows.sequences) == 58 and rows.lost.tolist() == [14, 15]
    assert "2 left out because the two sequences of their pair are longer than a row (first: line 8)" in caplog.text


def test_pair_that_fills_a_row_stays(data):
    arrays, *_ = prepared(*data, None, PREFERENCES)
    positions = arrays["lengths"].reshape(-1, 2).sum(1) - 2
    length = int(np.sort(positions)[10])
    lost = build(data, length=length).lost
    assert sorted({*(lost // 2).tolist()}) == np.flatnonzero(positions > length).tolist()


def test_length_without_a_pair_is_named(data):
    with pytest.raises(UserError, match="train has no pair to train on in 30 lines of 30; 30 pairs longer than"):
        build(data, length=8)
