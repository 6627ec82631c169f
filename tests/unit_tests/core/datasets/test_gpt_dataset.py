"""Samples of GPTDataset: contents, masks, positions, boundaries, refusals."""

import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.megatron_dataset import EmptySplitError
from megatron.data.blend import Split
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

EOD = 0


def tokenizer(vocab_size=1000, eod=EOD, **more):
    return SimpleNamespace(vocab_size=vocab_size, eod=eod, **more)


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in documents:
            builder.add_document(np.asarray(document, dtype=dtype), [len(document)])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def corpus(seed=0, count=60, max_length=20):
    """Return documents of random tokens that end in EOD."""
    generator = np.random.default_rng(seed)
    return [[*generator.integers(1, 1000, generator.integers(0, max_length)).tolist(), EOD] for _ in range(count)]


def dataset(prefix, num_samples=None, split=Split.train, sequence_length=16, documents=None, **options):
    options.setdefault("tokenizer", tokenizer())
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=sequence_length, blend=([prefix], None), split="1,0,0", **options
    )
    source = IndexedDataset(prefix, mmap=config.mmap_bin_files)
    chosen = np.arange(len(source), dtype=np.int32) if documents is None else documents
    return GPTDataset(source, prefix, chosen, num_samples, split, config)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gpt") / "corpus", corpus())


def shuffled_text(data, documents):
    """Return the concatenated tokens of all epochs."""
    return np.concatenate([documents[number] for number in data.document_index.tolist()])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("num_samples", [None, 5, 200])
def test_samples_are_slices_of_the_shuffled_text(prefix, num_samples, mmap):
    data = dataset(prefix, num_samples, mmap_bin_files=mmap)
    text = shuffled_text(data, corpus())
    assert len(data) >= (num_samples or 1) and len(data) == (len(text) - 1) // 16
    for number, start in enumerate(data.shuffle_index.tolist()):
        sample = data[number]
        np.testing.assert_array_equal(sample["tokens"], text[start * 16 : start * 16 + 16])
        np.testing.assert_array_equal(sample["labels"], text[start * 16 + 1 : start * 16 + 17])
        np.testing.assert_array_equal(sample["loss_mask"], np.ones(16))
        np.testing.assert_array_equal(sample["position_ids"], np.arange(16))
    types = {name: array.dtype.name for name, array in data[0].items()}
    assert types == {"tokens": "int64", "labels": "int64", "loss_mask": "float32", "position_ids": "int64"}
    with pytest.raises(IndexError):
        data[len(data)]


def boundaries_one_by_one(tokens):
    """Loss mask, positions and cumulative lengths, walking over the tokens."""
    mask, positions, bounds, position = [], [], [0], 0
    for at, token in enumerate(tokens):
        mask.append(0.0 if token == EOD else 1.0)
        positions.append(position)
        position += 1
        if token == EOD:
            position = 0
            if at + 1 < len(tokens):
                bounds.append(at + 1)
    return mask, positions, [*bounds, len(tokens)]


@settings(max_examples=100, deadline=None)
@given(content=st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_boundaries_equal_a_walk_over_the_tokens(tmp_path_factory, content):
    path = write(tmp_path_factory.mktemp("eod") / "x", [content])
    sample = dataset(
        path, 1, sequence_length=8, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )[0]
    mask, positions, bounds = boundaries_one_by_one(content[:8])
    assert sample["loss_mask"].tolist() == mask
    assert sample["position_ids"].tolist() == positions
    assert sample["cu_seqlens"].tolist() == bounds and sample["cu_seqlens"].dtype == np.int32


def test_each_reset_flag_acts_without_the_others(prefix):
    plain = dataset(prefix, 10)
    for flag, changed in (
        ("reset_position_ids", "position_ids"),
        ("eod_mask_loss", "loss_mask"),
        ("reset_attention_mask", "cu_seqlens"),
    ):
        other = dataset(prefix, 10, **{flag: True})
        for number in range(len(plain)):
            left, right = plain[number], other[number]
            assert set(right) - set(left) == ({"cu_seqlens"} if changed == "cu_seqlens" else set())
            for name in left:
                assert name == changed or left[name].tobytes() == right[name].tobytes()


def test_samples_never_change_and_share_no_memory(prefix):
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    for options in ({}, flags, {"add_extra_token_to_sequence": False}):
        data = dataset(prefix, 20, **options)
        before = [{name: array.tobytes() for name, array in data[i].items()} for i in range(len(data))]
        for i in range(len(data)):
            arrays = list(data[i].values())
            for place, array in enumerate(arrays):
                assert not any(np.shares_memory(array, other) for other in arrays[place + 1 :])
                array[:] = 7
        assert before == [{name: array.tobytes() for name, array in data[i].items()} for i in range(len(data))]


def test_without_the_extra_token_the_last_label_has_no_loss(prefix):
    data = dataset(prefix, None, add_extra_token_to_sequence=False)
    text = shuffled_text(data, corpus())
    assert len(data) == len(text) // 16
    for number, start in enumerate(data.shuffle_index.tolist()):
        sample = data[number]
        np.testing.assert_array_equal(sample["tokens"], text[start * 16 : start * 16 + 16])
        np.testing.assert_array_equal(sample["labels"][:-1], text[start * 16 + 1 : start * 16 + 16])
        assert sample["labels"][-1] == 0 and sample["loss_mask"].tolist() == [1.0] * 15 + [0.0]


@pytest.mark.parametrize("extra", [True, False])
def test_the_last_partial_sample_of_a_full_validation_is_padded(prefix, extra):
    options = {"drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": extra}
    data = dataset(prefix, None, Split.valid, 15, **options)
    text = shuffled_text(data, corpus())
    assert len(data) == -(-(len(text) - extra) // 15)
    sample = data[int(np.argmax(data.shuffle_index))]
    rest = text[(len(data) - 1) * 15 :]
    assert 0 < len(rest) - 1 < 15
    np.testing.assert_array_equal(sample["tokens"][: len(rest)], rest)
    assert sample["loss_mask"].sum() == len(rest) - 1
    assert not sample["tokens"][len(rest) :].any() and not sample["labels"][len(rest) - 1 :].any()
    counted = sum(data[i]["loss_mask"].sum() for i in range(len(data)))
    assert counted == (len(text) - 1 if extra else len(text) - len(data))
    assert len(dataset(prefix, None, Split.train, 15, **options)) == (len(text) - extra) // 15


def test_padding_ids(prefix):
    """Padding that the data holds is masked; an id shared with end-of-document is not, unless asked."""
    text = shuffled_text(dataset(prefix, 5), corpus())
    common = int(np.bincount(text)[1:].argmax()) + 1
    for options, masked in (
        ({"tokenizer": tokenizer(pad=common)}, common),
        ({"tokenizer": tokenizer(pad=EOD)}, None),
        ({"tokenizer": tokenizer(pad=None)}, None),
        ({"tokenizer": tokenizer(pad=EOD), "allow_ambiguous_pad_tokens": True}, EOD),
    ):
        data, plain = dataset(prefix, 5, **options), dataset(prefix, 5)
        for number in range(len(data)):
            sample, labels = data[number], plain[number]["labels"]
            np.testing.assert_array_equal(sample["loss_mask"], np.where(labels == masked, 0.0, 1.0))


def test_a_sample_without_loss_fills_a_batch(prefix):
    sample = dataset(prefix, 5)[None]
    assert not sample["loss_mask"].any() and sample["tokens"].shape == (16,)


@pytest.mark.parametrize("place", [0, 4])
@pytest.mark.parametrize("bad, dtype", [(1000, np.uint16), (-5, np.int32), (10**9, np.int32)])
def test_a_token_outside_the_vocabulary_is_rejected_by_document_and_offset(tmp_path, bad, dtype, place):
    documents = corpus(count=10)
    documents[5] = [1, 2, 3, 4, 5]
    documents[5].insert(place, bad)
    path = write(tmp_path / "bad", documents, dtype)
    data = dataset(path, None, sequence_length=4)
    caught = []
    for number in range(len(data)):
        try:
            data[number]
        except ValueError as error:
            caught.append(str(error))
    assert caught and all(f"token id {bad} in document 5 at token {place} is not below" in text for text in caught)
    assert all(path in text for text in caught)
    if bad == 1000:
        wider = dataset(path, None, sequence_length=4, vocab_size=1001)
        assert [wider[number] for number in range(len(wider))]


@pytest.mark.parametrize("documents", [[], [[]], [[], []], [[1, 2]]])
def test_a_split_without_a_sample_is_rejected(tmp_path, documents):
    path = write(tmp_path / "short", documents)
    with pytest.raises(EmptySplitError, match=r"a full pass of train asked of .*--split .*--eval-iters 0"):
        dataset(path, None)


def test_a_corpus_shorter_than_a_sample_is_repeated(tmp_path):
    data = dataset(write(tmp_path / "tiny", [[1, 2], [3, EOD]]), 7)
    assert len(data) >= 7 and set(data[6]["tokens"].tolist()) == {0, 1, 2, 3}


def test_indices_are_cached_by_every_setting_that_they_depend_on(tmp_path, monkeypatch):
    path = write(tmp_path / "data", corpus())
    first = dataset(path, 5)
    partly = dataset(path, 45)  # a small part of the second epoch, which is shuffled separately
    assert partly.num_epochs == 2 and partly.plan.samples_before_final_epoch == len(first)
    folder = f"{path}/cache/GPTDataset_indices"
    names = {name.split("-", 1)[1] for name in os.listdir(folder)}
    ends = ["description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy"]
    assert {f"GPTDataset-train-{end}" for end in ends} <= names
    monkeypatch.setattr(
        "megatron.core.datasets.gpt_dataset.build_gpt_indices", lambda *_: pytest.fail("built although cached")
    )
    for num_samples in (5, 1, None):  # all need one epoch
        repeated = dataset(path, num_samples)
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert getattr(first, name).tobytes() == getattr(repeated, name).tobytes()
    for options in ({"num_samples": 500}, {"num_samples": 75}, {"sequence_length": 8}, {"split": Split.test}):
        with pytest.raises(pytest.fail.Exception):
            dataset(path, **({"num_samples": 5} | options))


def test_indices_with_and_without_a_partial_sample_are_taken_from_the_cache(tmp_path, monkeypatch):
    path = write(tmp_path / "data", corpus())

    def lengths():
        options = ({"drop_last_partial_validation_sequence": drop} for drop in (True, False))
        return [len(dataset(path, None, Split.valid, 15, **option)) for option in options]

    full, padded = lengths()
    assert padded == full + 1
    monkeypatch.setattr(
        "megatron.core.datasets.gpt_dataset.build_gpt_indices", lambda *_: pytest.fail("built although cached")
    )
    assert lengths() == [full, padded]


@pytest.mark.parametrize("change", ["documents of other lengths", "tokens only", "an older file"])
def test_samples_after_a_replaced_data_file_equal_those_without_a_cache(tmp_path, change):
    """The files keep their sizes: document lengths or tokens differ."""
    documents = corpus(seed=0)
    path = write(tmp_path / "data", documents)
    dataset(path, 50)
    if change == "tokens only":
        documents = [[*(token % 999 + 1 for token in document[:-1]), EOD] for document in documents]
    else:
        documents[0], documents[1] = documents[1], documents[0]
    sizes = [os.path.getsize(f"{path}.{end}") for end in ("bin", "idx")]
    write(path, documents)
    assert [os.path.getsize(f"{path}.{end}") for end in ("bin", "idx")] == sizes
    if change == "an older file":  # as a copy with --preserve or an unpacked archive
        for end in ("bin", "idx"):
            os.utime(f"{path}.{end}", (1e9, 1e9))
    data, uncached = dataset(path, 50), dataset(write(tmp_path / "other", documents), 50)
    assert len(data) == len(uncached) >= 41
    for index in range(len(data)):
        np.testing.assert_array_equal(data[index]["tokens"], uncached[index]["tokens"], f"sample {index}")
    text = shuffled_text(data, documents)
    starts = data.shuffle_index.astype(np.int64) * 16
    assert all(data[i]["tokens"].tolist() == text[start : start + 16].tolist() for i, start in enumerate(starts))


def test_an_unwritable_cache_folder_only_costs_time(tmp_path, caplog):
    path = write(tmp_path / "data", corpus())
    (tmp_path / "file").write_text("")
    data = dataset(path, 5, path_to_cache=str(tmp_path / "file" / "cache"))
    assert data[0]["tokens"].tolist() == dataset(path, 5)[0]["tokens"].tolist()
    assert caplog.text.count("building in memory") == 1


def test_a_data_set_can_be_sent_to_a_worker(prefix):
    data = dataset(prefix, 20)
    copy = pickle.loads(pickle.dumps(data))
    assert all(data[i]["tokens"].tobytes() == copy[i]["tokens"].tobytes() for i in range(len(data)))


def build_mock(sizes=(50, 20, 10), vocab_size=8192, **options):
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=1024, tokenizer=tokenizer(vocab_size, eod=vocab_size - 1), **options
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


def test_mock_data_is_deterministic_and_differs_between_splits():
    first, second = build_mock(), build_mock()
    for left, right in zip(first, second):
        assert all(left[i]["tokens"].tobytes() == right[i]["tokens"].tobytes() for i in range(5))
    assert len({data[0]["tokens"].tobytes() for data in first}) == 3
    assert sum(len(data.indices) for data in first) == 100_000


@pytest.mark.parametrize("vocab_size", [16, 300, 8192])
def test_mock_data_can_be_learnt_and_stays_in_the_vocabulary(vocab_size):
    """The next token follows from the current one, except at document starts and ends."""
    sample = build_mock((5, 0, 0), vocab_size)[0][0]
    tokens, labels, eod = sample["tokens"], sample["labels"], vocab_size - 1
    predictable = (labels == tokens + 1) | (labels == 1)
    assert tokens.max() < vocab_size and (predictable | (labels == eod)).all()
    assert np.mean(labels == tokens + 1) > 0.8


def test_mock_data_in_a_vocabulary_of_one_token_names_the_flags():
    with pytest.raises(UserError, match="^--mock-data: token id 1 is not below the vocabulary size 1; use a larger"):
        build_mock((5, 0, 0), vocab_size=1)[0][0]


def test_mock_data_equals_megatron_lms():
    """Document i of length n is 1 .. n-1 and end-of-document; lengths from default_rng(0)."""
    data = build_mock((5, 0, 0))[0]
    expected = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)
    np.testing.assert_array_equal(data.dataset.sequence_lengths, expected)
    for number in (0, 99_999):
        assert data.dataset[number].tolist() == [*range(1, expected[number]), 8191]


def test_missing_pieces_are_named(prefix):
    with pytest.raises(ValueError, match="--reset-attention-mask.* need a tokenizer with an end-of-document"):
        dataset(prefix, 5, tokenizer=tokenizer(eod=None), reset_attention_mask=True)
    config = GPTDatasetConfig(random_seed=1, sequence_length=8, tokenizer=tokenizer())
    with pytest.raises(ValueError, match="--data-path .*--mock-data"):
        BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: True, config).build()
