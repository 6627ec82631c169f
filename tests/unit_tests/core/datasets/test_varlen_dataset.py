"""Samples of different lengths: every label of every document once per epoch, lengths without reading, mock lengths."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.megatron_dataset import EmptySplitError
from megatron.core.datasets.varlen_dataset import (
    LengthStatistics,
    LogNormalLengths,
    MockVarlenDataset,
    VarlenDataset,
    VarlenDatasetConfig,
    parse_mock_lengths,
)
from megatron.data.blend import Split
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

LENGTH = 16
DOCUMENTS = [[*range(1, n), 0] for n in (1, 2, 17, 18, 33, 34, 5, 70, 1)]


def config(prefix=None, **options):
    tokenizer = SimpleNamespace(vocab_size=1000, eod=0)
    source = {"blend": (prefix, None)} if prefix else {}
    return VarlenDatasetConfig(random_seed=1, sequence_length=LENGTH, split="1,0,0", tokenizer=tokenizer, **source,
                               **options)  # fmt: skip


def write(prefix, documents):
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for document in documents:
            builder.add_document(np.asarray(document, dtype=np.uint16), [len(document)])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def dataset(prefix, num_samples=None, documents=None, **options):
    source = IndexedDataset(prefix)
    chosen = np.arange(len(source), dtype=np.int32) if documents is None else documents
    return VarlenDataset(source, prefix, chosen, num_samples, Split.train, config([prefix], **options))


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "documents", DOCUMENTS)


def pieces(documents):
    """(tokens, labels) of all samples, in document order."""
    results = []
    for document in documents:
        for start in range(0, len(document) - 1, LENGTH):
            stop = min(start + LENGTH, len(document) - 1)
            results.append((document[start:stop], document[start + 1 : stop + 1]))
    return results


def test_an_epoch_holds_every_label_once(prefix):
    data = dataset(prefix)
    results = [(item["tokens"].tolist(), item["labels"].tolist()) for item in map(data.__getitem__, range(len(data)))]
    assert sorted(results) == sorted(pieces(DOCUMENTS))
    assert all(data[i]["position_ids"].tolist() == list(range(len(data[i]["tokens"]))) for i in range(len(data)))


def test_lengths_are_known_without_reading(prefix):
    data = dataset(prefix, 30)
    lengths = data.sample_lengths(np.arange(len(data)))
    assert lengths.tolist() == [len(data[i]["tokens"]) for i in range(len(data))]


def test_epochs_are_shuffled_separately_and_a_prefix_does_not_depend_on_the_count(prefix):
    one, three = dataset(prefix), dataset(prefix, 3 * len(dataset(prefix)))
    per_epoch = len(one)
    assert three.num_epochs == 3 and three.order[:per_epoch].tolist() == one.order.tolist()
    epochs = three.order.reshape(3, per_epoch)
    assert (np.sort(epochs) == np.arange(per_epoch)).all() and len({tuple(value) for value in epochs.tolist()}) == 3


def test_a_part_of_the_documents_is_a_split(prefix):
    data = dataset(prefix, documents=np.arange(2, 5, dtype=np.int32))
    results = [data[i]["tokens"].tolist() for i in range(len(data))]
    assert sorted(results) == sorted(tokens for tokens, _ in pieces(DOCUMENTS[2:5]))


def test_the_loss_at_an_end_of_document_inside_is_masked(tmp_path):
    data = dataset(write(tmp_path / "inside", [[5, 0, 6, 0]]), eod_mask_loss=True)
    assert data[0]["tokens"].tolist() == [5, 0, 6] and data[0]["loss_mask"].tolist() == [1, 0, 1]


def test_documents_without_a_label_are_rejected(tmp_path):
    with pytest.raises(EmptySplitError, match="none of them with two tokens"):
        dataset(write(tmp_path / "empty", [[0], [0]]))


def test_a_blend_knows_the_lengths(tmp_path):
    prefixes = [write(tmp_path / name, DOCUMENTS[at:]) for name, at in (("a", 0), ("b", 3))]
    options = {"blend": (prefixes, [0.7, 0.3])}
    tokenizer = SimpleNamespace(vocab_size=1000, eod=0)
    settings = VarlenDatasetConfig(
        random_seed=1, sequence_length=LENGTH, split="1,0,0", tokenizer=tokenizer, path_to_cache=str(tmp_path),
        **options,
    )  # fmt: skip
    data = BlendedMegatronDatasetBuilder(VarlenDataset, [20, 0, 0], lambda: True, settings).build()[0]
    lengths = data.sample_lengths(np.arange(len(data)))
    assert lengths.tolist() == [len(data[i]["tokens"]) for i in range(len(data))]


def test_mock_lengths_have_their_percentiles():
    lengths = LogNormalLengths.of_percentiles(700, 9000, 131_072).draw(100_000, 0)
    result = LengthStatistics(lengths)
    assert result.p50 == pytest.approx(700, rel=0.03) and result.p95 == pytest.approx(9000, rel=0.03)
    assert result.maximum == 131_072 and 0.1 < result.tail_share < 0.5
    assert str(result).startswith(f"p50 {result.p50}, p95 {result.p95}, maximum 131072 tokens; the longest 1 % hold")


def test_mock_data_has_the_given_lengths():
    lengths = parse_mock_lengths('{"mean_seq_len": 20, "lognormal_sigma": 0.5, "min_seq_len": 4, "max_seq_len": 40}')
    data = MockVarlenDataset(
        MockVarlenDataset.build_low_level_dataset(None, config(mock_lengths=lengths)), None,
        np.arange(1000, dtype=np.int32), None, Split.train, config(mock_lengths=lengths),
    )  # fmt: skip
    assert lengths.median == pytest.approx(20 * np.exp(-0.125))
    assert data.dataset.sequence_lengths.min() >= 4 and data.dataset.sequence_lengths.max() == 40
    assert data.sample_lengths(np.arange(len(data))).max() == LENGTH


@pytest.mark.parametrize("text, expected", [
    ("{", "is not JSON"),
    ("[]", "must be a JSON object"),
    ('{"type": "normal", "max_seq_len": 9}', "has no lengths for type normal"),
    ('{"p50": 5, "max_seq_len": 9}', "has p50 for type lognormal"),
    ('{"p50": 5, "p95": 8}', "lengths must be positive numbers"),
    ('{"p50": 5, "p95": 4, "max_seq_len": 9}', "p95 4 is below p50 5"),
    ('{"p50": 5, "p95": 6, "max_seq_len": 9, "min_seq_len": 10}', "2 <= min_seq_len <= max_seq_len"),
])  # fmt: skip
def test_bad_mock_lengths_are_named(text, expected):
    with pytest.raises(UserError, match="--varlen-mock-dataset-config-json: ") as caught:
        parse_mock_lengths(text)
    assert expected in str(caught.value)
