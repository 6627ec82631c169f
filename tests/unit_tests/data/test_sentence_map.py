"""The order of BERT's and T5's samples: hand-made cases, and C++ equal to its twin row for row."""

import itertools

import numpy as np
import pytest

from megatron.data import helpers
from megatron.data.sentence_map import NoSamplesError, build_blocks_mapping, build_mapping, mt19937_64

FOREVER = 2**31 - 2
BUILDERS = [pytest.param(False, id="twin"), pytest.param(True, id="cpp")]


@pytest.fixture(params=BUILDERS)
def either_builder(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(helpers, "_cpp", None)
    elif helpers.compiled("build_mapping_uint32") is None:
        pytest.skip("the C++ extension is not built")


def mapping(documents, length, epochs=1, samples=None, short=0.0, seed=1234, least=2):
    """Rows of documents given as lists of sentence lengths, sorted."""
    bounds = np.cumsum([0] + [len(sentences) for sentences in documents])
    sizes = np.array([size for sentences in documents for size in sentences], dtype=np.int32)
    rows = build_mapping(bounds, sizes, epochs, samples, length, short, seed, least)
    return rows


def in_order(rows):
    return sorted(map(tuple, rows.tolist()))


def test_the_64_bit_twister_is_that_of_the_cpp_standard():
    # [rand.predef]: the 10000th word of the default seed
    assert next(itertools.islice(mt19937_64(5489), 9999, None)) == 9981545732273789042


@pytest.mark.parametrize(
    "sentences, length, least, expected",
    [
        ([5, 5, 5, 5, 5], 10, 2, [(0, 2), (2, 5)]),  # one sentence may not remain: the last sample takes it
        ([5, 5, 5, 5], 10, 2, [(0, 2), (2, 4)]),
        ([5, 5, 5], 10, 2, [(0, 3)]),
        ([20, 1, 1, 1], 10, 2, [(0, 2), (2, 4)]),  # the first is long enough, but a sample needs two
        ([20, 1, 1, 1], 10, 1, [(0, 1), (1, 4)]),
        ([20, 20, 20], 10, 1, [(0, 1), (1, 3)]),  # also with one sentence a sample, the last two stay together
        ([3, 3], 100, 2, [(0, 2)]),
        ([7], 5, 1, [(0, 1)]),
        ([600], 5, 1, [(0, 1)]),  # a document of one sentence is never too long
        ([512, 512], 5, 2, [(0, 2)]),
    ],
)
def test_how_one_document_is_cut(either_builder, sentences, length, least, expected):
    rows = mapping([sentences], length, least=least)
    assert rows.dtype == np.uint32
    assert in_order(rows) == [(*row, length) for row in expected]


def test_documents_that_give_nothing_are_passed_over_without_a_draw(either_builder):
    good = [4] * 9
    single = mapping([good], 12, short=0.5)
    between = mapping([[4], [513, 4, 4], good, []], 12, short=0.5)
    assert in_order(between) == [(first + 4, end + 4, target) for first, end, target in in_order(single)]


@pytest.mark.parametrize("samples, epochs", [(1, 1), (2, 1), (3, 2), (5, 3), (None, 1)])
def test_epochs_repeat_until_samples_suffice(either_builder, samples, epochs):
    rows = mapping([[5] * 4], 10, FOREVER if samples else 1, samples)
    assert len(rows) == 2 * epochs


def test_targets_are_drawn_by_the_rule(either_builder):
    """The random word that selects a short target also gives its length; one draw is discarded after each document."""
    words = iter(np.random.RandomState(7).randint(0, 2**32, 1000, dtype=np.uint32).tolist())
    expected = []
    for document in range(40):
        for _ in range(2):
            word = next(words)
            target = 2 + word % 9 if word % 2 == 0 else 10
            expected.append((document * 4 + 2 * (len(expected) % 2), target))
        next(words)
    rows = mapping([[10] * 4] * 40, 10, short=0.6, seed=7)  # 1 / 0.6 rounds to 2
    assert [(first, target) for first, _, target in in_order(rows)] == expected


@pytest.mark.parametrize("probability, all_short", [(0.67, True), (0.66, False), (1.0, True)])
def test_above_two_thirds_every_target_is_drawn(either_builder, probability, all_short):
    targets = mapping([[10] * 2] * 500, 10**6, short=probability)[:, 2]
    assert bool((targets < 10**6).mean() > 0.99) == all_short


def test_rows_are_shuffled_by_the_64_bit_twister(either_builder):
    words, order = mt19937_64(1235), list(range(0, 30, 2))
    for i in range(14, 0, -1):
        j = next(words) % (i + 1)
        order[i], order[j] = order[j], order[i]
    assert mapping([[1, 1]] * 15, 2)[:, 0].tolist() == order


def test_seed_0_is_a_seed(either_builder):
    assert len(mapping([[5] * 6] * 50, 10, short=0.1, seed=0)) == 150


@pytest.mark.parametrize(
    "documents, reason",
    [([[5], [9]], "2 have fewer than 2"), ([[5, 600]], "1 have a sentence of more than 512"), ([[], []], "fewer")],
)
def test_documents_without_a_sample_are_rejected_at_once(either_builder, documents, reason):
    with pytest.raises(NoSamplesError, match=reason):
        mapping(documents, 10, FOREVER, 100)


def test_arguments_out_of_range_are_rejected():
    for options in ({"length": 1}, {"short": 1.5}, {"short": -0.1}, {"epochs": 0}):
        with pytest.raises(ValueError):
            mapping([[5, 5]], **{"length": 10, **options})
    with pytest.raises(ValueError, match="ascend"):
        build_mapping(np.array([0, 4, 2]), np.ones(5, np.int32), 1, None, 10, 0.1, 1)
    with pytest.raises(ValueError, match="ascend"):
        build_mapping(np.array([0, 6]), np.ones(5, np.int32), 1, None, 10, 0.1, 1)


@pytest.mark.parametrize("least, expected", [(False, [(1, 3, 1, 0), (3, 6, 1, 1)]), (True, [(0, 1, 0, 0)])])
def test_blocks_count_the_title_and_their_number_within_the_epoch(either_builder, least, expected):
    sizes, titles = np.array([9, 5, 5, 5, 5, 5], dtype=np.int32), np.array([0, 2], dtype=np.int32)
    rows = build_blocks_mapping(np.array([0, 1, 6]), sizes, titles, 2, None, 12, 5, least)
    assert in_order(rows)[:2] == [row for row in expected for _ in range(2)][:2]
    assert in_order(rows)[::2] == in_order(rows)[1::2]  # two equal epochs


def test_a_block_of_one_long_sentence_is_rejected(either_builder):
    with pytest.raises(NoSamplesError):
        build_blocks_mapping(np.array([0, 1]), np.array([513]), np.array([1]), 1, None, 12, 5, True)


@pytest.mark.skipif(helpers.compiled("build_mapping_uint32") is None, reason="the C++ extension is not built")
def test_cpp_equals_its_twin_on_random_documents(monkeypatch):
    random = np.random.RandomState(11)
    for trial in range(120):
        bounds = np.concatenate([[0], np.cumsum(random.randint(0, 9, random.randint(1, 40)))])
        sizes = random.randint(0, (40, 600, 30)[trial % 3], bounds[-1] + 3).astype(np.int32)
        titles = random.randint(0, 5, len(bounds) - 1).astype(np.int32)
        samples = (None, 1, 7, 300)[trial % 4]
        epochs, length, seed = FOREVER if samples else 3, random.randint(2, 80), random.randint(2**31)
        short, least = random.choice([0, 0.1, 0.3, 0.6, 1]), random.randint(1, 3)
        calls = [
            (build_mapping, bounds, sizes, epochs, samples, length, short, seed, least),
            (build_blocks_mapping, bounds, sizes, titles, epochs, samples, length, seed, least == 1),
        ]
        compiled = [outcome(*call) for call in calls]
        with monkeypatch.context() as patch:
            patch.setattr(helpers, "_cpp", None)
            assert [outcome(*call) for call in calls] == compiled


def outcome(build, *arguments):
    try:
        rows = build(*arguments)
    except NoSamplesError as error:
        return str(error)
    return rows.dtype, rows.tolist()
