"""The C++ builders, their numpy twins and slow transcriptions of the rules agree byte for byte."""

import importlib.util
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import helpers

needs_extension = pytest.mark.skipif(not helpers.has_extension(), reason="the C++ extension is not built")
quick = settings(max_examples=150, deadline=None)


@needs_extension
def test_the_extension_is_built_from_this_source_with_assertions():
    """pybind11's assertions abort where Python objects are touched without the interpreter lock."""
    source = Path(helpers.__file__).with_name("helpers.cpp")
    result = helpers.compiled("source_sha256")
    assert result == sha256(source.read_bytes()).hexdigest(), "build it again: python setup.py build_ext --inplace"
    assert helpers.compiled("has_assertions") is True


@needs_extension
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 63, 64, 65, 66, 129, 1000, 70001])
def test_shuffle_is_numpys_permutation_and_leaves_its_state(size, dtype):
    native, foreign = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
    left, right = np.random.RandomState(1234), np.random.RandomState(1234)
    for _ in range(3):
        helpers.shuffle(native, left)
        right.shuffle(foreign)
    np.testing.assert_array_equal(native, foreign)
    assert left.randint(2**31, size=5).tolist() == right.randint(2**31, size=5).tolist()


def test_shuffle_of_a_view_or_another_dtype_falls_back_to_numpy():
    for values in (np.arange(40)[::2], np.arange(20, dtype=np.int16)):
        expected = values.copy()
        np.random.RandomState(3).shuffle(expected)
        helpers.shuffle(values, np.random.RandomState(3))
        np.testing.assert_array_equal(values, expected)


def sample_starts_token_by_token(sizes, documents, sequence_length, num_samples, extra):
    """Walk over every token, one at a time. An entry marks where the sample before it stopped reading."""
    tokens = [(place, offset) for place, document in enumerate(documents) for offset in range(sizes[document])]
    rows = [(0, 0)]
    for sample in range(1, num_samples + 1):
        last_read = min(sample * sequence_length + extra, len(tokens)) - 1
        partial = sample * sequence_length + extra > len(tokens)
        if partial:  # everything is read: the entry closes the last document
            rows.append((len(documents) - 1, sizes[documents[-1]] - extra))
        else:
            place, offset = tokens[last_read]
            rows.append((place, offset + 1 - extra))
    return np.array(rows).reshape(-1, 2)


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0)


@quick
@given(lengths, st.integers(1, 7), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 99))
def test_sample_index_equals_a_walk_over_every_token(sizes, sequence_length, epochs, drop, extra, seed):
    sizes = np.array(sizes, dtype=np.int32)
    documents = np.random.RandomState(seed).permutation(np.tile(np.arange(len(sizes), dtype=np.int32), epochs))
    total = int(sizes.sum())
    if epochs * total - extra < 0:
        return
    num_samples = helpers.count_samples(epochs * total, sequence_length, drop, int(extra))
    result = helpers.build_sample_idx(sizes, documents, sequence_length, epochs, total, drop, extra)
    twin = helpers.build_sample_idx_numpy(sizes, documents, sequence_length, num_samples, int(extra))
    assert result.dtype == twin.dtype == np.int32
    assert result.tobytes() == twin.tobytes()
    expected = sample_starts_token_by_token(sizes, documents, sequence_length, num_samples, int(extra))
    np.testing.assert_array_equal(result, expected)


def test_wide_document_numbers_give_the_same_values_in_64_bits():
    sizes = np.array([5, 3, 8], dtype=np.int32)
    narrow = helpers.build_sample_idx(sizes, np.array([2, 0, 1], dtype=np.int32), 4, 1, 16)
    wide = helpers.build_sample_idx(sizes, np.array([2, 0, 1], dtype=np.int64), 4, 1, 16)
    assert wide.dtype == np.int64
    np.testing.assert_array_equal(narrow, wide)


def test_token_positions_beyond_32_bits_are_exact():
    max_length = 2**31 - 1
    sizes = np.array([max_length] * 5, dtype=np.int32)
    documents = np.arange(5, dtype=np.int32)
    step = 2**30
    result = helpers.build_sample_idx(sizes, documents, step, 1, 5 * max_length)
    twin = helpers.build_sample_idx_numpy(sizes, documents, step, len(result) - 1, 1)
    positions = [int(place) * max_length + int(offset) for place, offset in result]
    assert positions == [step * sample for sample in range(len(result))]
    np.testing.assert_array_equal(result, twin)


@pytest.mark.parametrize("documents", [[0, 7], [0, -1]])
def test_a_document_outside_the_data_set_is_rejected(documents):
    for build in (
        lambda d: helpers.build_sample_idx(np.array([4, 4], dtype=np.int32), d, 2, 1, 8),
        lambda d: helpers.build_sample_idx_numpy(np.array([4, 4], dtype=np.int32), d, 2, 3, 1),
    ):
        with pytest.raises(ValueError, match="outside the data set"):
            build(np.array(documents, dtype=np.int32))


def test_fewer_tokens_than_announced_are_rejected():
    sizes, documents = np.array([4, 4], dtype=np.int32), np.array([0, 1], dtype=np.int32)
    with pytest.raises(ValueError, match="fewer tokens"):
        helpers.build_sample_idx(sizes, documents, 2, 1, 1000)
    with pytest.raises(ValueError, match="fewer tokens"):
        helpers.build_sample_idx_numpy(sizes, documents, 2, 400, 1)


def blend_one_by_one(weights, size):
    """Python floats are IEEE doubles: the same arithmetic, one sample at a time."""
    selected, stream = [0] * len(weights), []
    for step in range(size):
        previous = [weight * float(max(step, 1)) - float(count) for weight, count in zip(weights, selected)]
        winner = previous.index(max(previous))
        stream.append((winner, selected[winner]))
        selected[winner] += 1
    return stream


raw_weights = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12)


@quick
@given(raw_weights, st.integers(0, 300))
def test_blend_equals_the_rule_one_by_one(weights, size):
    weights = np.array(weights) / np.sum(weights)
    source, sample = helpers.build_blending_indices(weights, size)
    twin = helpers.build_blending_indices_numpy(weights, size)
    assert (source.dtype, sample.dtype) == (np.int16, np.int64) == (twin[0].dtype, twin[1].dtype)
    assert source.tobytes() == twin[0].tobytes() and sample.tobytes() == twin[1].tobytes()
    assert list(zip(source.tolist(), sample.tolist())) == blend_one_by_one(weights.tolist(), size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-6.0, 0.0), min_size=1, max_size=40))
def test_every_prefix_of_a_blend_stays_close_to_its_weights(exponents):
    """A rule that serves the largest deficit first lets none grow beyond the harmonic number of the data sets."""
    weights = 10.0 ** np.array(exponents)
    weights /= weights.sum()
    size = 3000
    source, _ = helpers.build_blending_indices(weights, size)
    selected = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    expected = np.arange(1, size + 1)[:, None] * weights
    assert np.abs(selected - expected).max() <= 1 + np.log(len(weights))


@needs_extension
@pytest.mark.parametrize("weights", [[1.0, 1e-6], [1e-6] * 3 + [1.0], [0.5, 0.25, 0.25], [1.0] * 300])
def test_prefix_bound_holds_over_a_million_samples(weights):
    weights = np.array(weights) / np.sum(weights)
    source, sample = helpers.build_blending_indices(weights, 1_000_000)
    for number, weight in enumerate(weights[:10]):
        at = np.flatnonzero(source == number)
        np.testing.assert_array_equal(sample[at], np.arange(len(at)))
        assert len(at) == 0 or np.abs(np.arange(1, len(at) + 1) - (at + 1) * weight).max() <= 2
        assert abs(len(at) - 1_000_000 * weight) <= 2


@quick
@given(st.lists(st.integers(0, 60), min_size=1, max_size=10))
def test_exhaustive_blend_takes_each_sample_once_and_equals_its_twin(sizes):
    sizes = np.array(sizes, dtype=np.int64)
    source, sample = helpers.build_exhaustive_blending_indices(sizes)
    twin = helpers.build_exhaustive_blending_indices_numpy(sizes)
    assert source.tobytes() == twin[0].tobytes() and sample.tobytes() == twin[1].tobytes()
    for number, size in enumerate(sizes):
        np.testing.assert_array_equal(sample[source == number], np.arange(size))


def test_a_known_blend():
    """3:1 starts with the heavier source, which then keeps ahead of the lighter one by its share."""
    source, sample = helpers.build_blending_indices(np.array([0.75, 0.25]), 8)
    assert source.tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert sample.tolist() == [0, 0, 1, 2, 3, 1, 4, 5]


def test_too_many_sources_are_rejected():
    with pytest.raises(ValueError, match="merge_datasets"):
        helpers.build_blending_indices(np.full(32768, 1 / 32768), 4)


def test_a_checkout_uses_the_extension_of_the_installed_package(monkeypatch, tmp_path):
    """A checkout's ``megatron`` comes before the installed one's; the extension must not be looked for inside of it."""
    (tmp_path / "megatron_data_helpers.py").write_text("origin = 'installed'\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "megatron_data_helpers", raising=False)
    spec = importlib.util.spec_from_file_location("helpers_of_a_checkout", helpers.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.has_extension()
    assert module._cpp.origin == "installed"
