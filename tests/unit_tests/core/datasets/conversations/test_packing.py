"""Packing of sequences into rows, and the data set of packed conversations."""

import json
from itertools import pairwise

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.conversations.packing import best_fit_decreasing, pack_epochs
from megatron.core.datasets.megatron_dataset import EmptySplitError
from megatron.core.datasets.sft_dataset import SFTDataset, SFTDatasetConfig
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.chats import assistant, sums, tokenizer_folder, user, write_lines


def definition(lengths, capacity):
    """Best fit decreasing as in textbooks, O(n^2): the fullest row with room takes the next sequence."""
    rows, room = [], []
    for index, length in enumerate(lengths):
        fits = [row for row in range(len(rows)) if room[row] >= length]
        if not fits:
            rows.append([]), room.append(capacity)
            fits = [len(rows) - 1]
        row = min(fits, key=lambda row: room[row])
        rows[row].append(index)
        room[row] -= length
    return rows, room


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_decreasing_equals_its_definition(seed):
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 60))
    lengths = np.sort(generator.integers(1, capacity + 1, size=int(generator.integers(1, 120))))[::-1].tolist()
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    expected, room = definition(lengths, capacity)
    loads = sorted(tuple(sorted(lengths[index] for index in row)) for row in rows)
    # rows of equal room are interchangeable: equal numbers of rows, and equal room
    assert len(rows) == len(expected)
    assert sorted(capacity - sum(load) for load in loads) == sorted(room)


def test_rows_of_chats_are_98_percent_full():
    generator = np.random.default_rng(0)
    lengths = np.clip(np.exp(generator.normal(5.8, 1.0, 20_000)), 2, 4096).astype(int)
    rows = best_fit_decreasing(np.sort(lengths)[::-1].tolist(), 4096)
    assert lengths.sum() / (4096 * len(rows)) > 0.98


def test_epochs_hold_every_sequence_once_in_different_orders():
    lengths = np.random.default_rng(1).integers(1, 30, 100)
    rows = pack_epochs(lengths, 32, seed=5, num_epochs=3)
    epochs = rows.order.reshape(3, 100)
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs.tolist())
    assert not np.array_equal(epochs[0], epochs[1])
    assert all(0 < lengths[rows.order[a:b]].sum() <= 32 for a, b in pairwise(rows.bounds.tolist()))
    groups = [
        {frozenset(rows.order[a:b].tolist()) for a, b in pairwise(part)} for part in np.array_split(rows.bounds, 3)
    ]
    assert groups[0] != groups[1]  # other neighbours, too
    shorter = pack_epochs(lengths, 32, seed=5, num_epochs=2)
    assert np.array_equal(shorter.order, rows.order[:200])  # an epoch does not depend on how many there are
    assert not np.array_equal(pack_epochs(lengths, 32, seed=6, num_epochs=1).order, epochs[0])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_huggingface(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


def build(path, tokenizer, samples=None, length=96, **options):
    """The training data set of a file."""
    options = {"random_seed": 3, "sequence_length": length, "tokenizer": tokenizer, **options}
    config = SFTDatasetConfig(**options)
    if config.blend is None and config.blend_per_split is None:
        config = SFTDatasetConfig(**{"blend": ([path], None), "split": "1", **options})
    return BlendedMegatronDatasetBuilder(SFTDataset, [samples, 0, 0], lambda: True, config).build()[0]


def test_row_holds_its_sequences_apart(tmp_path, tokenizer):
    """Tokens, labels, masks, positions and bounds of each row, from the definition."""
    data = build(write_lines(tmp_path / "chats.jsonl", sums(40)), tokenizer)
    numbers = []
    assert len(data) == data.rows_per_epoch < 40
    for number in range(len(data)):
        sample, place = data[number], 0
        for sequence in data.row_sequences(number).tolist():
            ids, trained = data.dataset.sequence(sequence, 97)
            end = place + len(ids) - 1
            assert sample["tokens"][place:end].tolist() == ids[:-1].tolist()
            assert sample["labels"][place:end].tolist() == ids[1:].tolist()
            assert sample["loss_mask"][place:end].tolist() == trained[1:].astype(float).tolist()
            assert sample["position_ids"][place:end].tolist() == list(range(end - place))
            assert {place, end} <= set(sample["cu_seqlens"].tolist())
            numbers.append(sequence)
            place = end
        assert sample["loss_mask"][place:].sum() == 0 and sample["cu_seqlens"][-1] == 96
        assert len(sample["cu_seqlens"]) == len(data.row_sequences(number)) + 1 + (place < 96)
    assert sorted(numbers) == list(range(40))


def test_loss_covers_the_answers(tmp_path, tokenizer):
    data = build(write_lines(tmp_path / "chats.jsonl", sums(8)), tokenizer, length=160)
    for number in range(len(data)):
        sample = data[number]
        text = tokenizer.detokenize(sample["labels"][sample["loss_mask"] > 0].tolist())
        lines = data.dataset.lines[data.row_sequences(number)]
        answers = [message["content"] for line in lines for message in sums(8)[line - 1]["messages"][1::2]]
        assert text == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_rows_without_packing_hold_one_conversation(tmp_path, tokenizer):
    data = build(write_lines(tmp_path / "chats.jsonl", sums(9)), tokenizer, packing=False)
    assert len(data) == 9 and sorted(int(data.row_sequences(row)[0]) for row in range(9)) == list(range(9))


def test_cut_conversations_are_counted_and_lost_ones_left_out(tmp_path, tokenizer, caplog):
    late = {"messages": [user("x " * 120), assistant("never")]}
    long = {"messages": [user("a"), assistant("y " * 120)]}
    path = write_lines(tmp_path / "chats.jsonl", [*sums(3, turns=1), late, long])
    with caplog.at_level("INFO", logger="megatron"):
        data = build(path, tokenizer)
    assert data.lost.tolist() == [3] and 3 not in data.rows.order[data.sequences[data.rows.order] == 3]
    assert "1 sequences cut at the end" in caplog.text
    assert "1 left out because no answer begins before the cut (first: line 4)" in caplog.text
    assert "⟦" in caplog.text and "first sample" in caplog.text
    with pytest.raises(EmptySplitError, match="no answer to train on in 1 lines of 1; 1 conversation lost .* line 1"):
        build(write_lines(tmp_path / "late.jsonl", [late]), tokenizer)


def test_answer_of_which_only_the_first_token_fits_is_trained(tmp_path, tokenizer):
    """The border of the cut: s + 1 tokens fill a row of s positions."""
    ids, trained = build(write_lines(tmp_path / "a.jsonl", sums(1, turns=1)), tokenizer).dataset.sequence(0, 97)
    first = int(trained.argmax())
    data = build(str(tmp_path / "a.jsonl"), tokenizer, length=first)
    assert data[0]["loss_mask"].tolist() == [0.0] * (first - 1) + [1.0]
    with pytest.raises(EmptySplitError):
        build(str(tmp_path / "a.jsonl"), tokenizer, length=first - 1)


def test_row_without_a_loss_token_names_its_lines(tmp_path, tokenizer):
    data = build(write_lines(tmp_path / "chats.jsonl", sums(1)), tokenizer)
    data.dataset.tokens = -1 - np.abs(data.dataset.tokens)
    with pytest.raises(UserError, match=r"chats.jsonl, line 1: no token has a loss"):
        data[0]


def test_splits_share_no_line(tmp_path, tokenizer):
    path = write_lines(tmp_path / "chats.jsonl", [*sums(10), "\n", *sums(9, seed=1)])
    config = SFTDatasetConfig(
        random_seed=3, sequence_length=96, tokenizer=tokenizer, blend=([path], None), split="80,20,0"
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(SFTDataset, [None, None, 0], lambda: True, config).build()
    lines = [set(data.dataset.lines[data.sequences].tolist()) for data in (train, valid)]
    assert lines[0] == set(range(1, 17)) - {11} and lines[1] == {17, 18, 19, 20}


def test_blend_gives_costs_of_its_rows(tmp_path, tokenizer):
    paths = [write_lines(tmp_path / f"{seed}.jsonl", sums(12, seed=seed)) for seed in range(2)]
    data = build(None, tokenizer, 10, blend=(paths, [0.5, 0.5]), split="1")
    costs = data.attention_costs(np.arange(len(data)))
    for row in range(len(data)):
        sizes = np.diff(data[row]["cu_seqlens"])
        filled = sizes if data[row]["loss_mask"][-sizes[-1] :].any() else sizes[:-1]
        assert costs[row] == (filled**2).sum()


def test_plan_is_stored_by_its_settings_and_the_tokenizer(tmp_path, tokenizer):
    path = write_lines(tmp_path / "chats.jsonl", sums(20))
    plans = lambda: len(list((tmp_path / "chats.jsonl.cache").glob("*rows-train-order.npy")))  # noqa: E731
    first = build(path, tokenizer)
    assert plans() == 1
    repeated = build(path, tokenizer)
    assert plans() == 1 and np.array_equal(first.rows.order, repeated.rows.order)
    for number, options in enumerate(({"length": 128}, {"random_seed": 4}, {"packing": False}), start=2):
        build(path, tokenizer, **options)
        assert plans() == number
    other = build_huggingface(tokenizer_folder(tmp_path / "other", json.loads('"{{ messages[1].content }}"')))
    with pytest.raises(UserError):
        build(path, other)  # answers that no prompt precedes
    assert plans() == 4
