"""``pretrain_bert.py`` and ``pretrain_t5.py`` against the independent definition of BERT and T5 (``tests/reference``),
as ``test_reference.py`` does it for GPT; and hand-made cases of that definition's samples."""

from itertools import islice

import numpy as np
import pytest

from tests.reference.masked_samples import Masking, bert_samples, masked, mersenne_twister_64, sample_map, t5_samples
from tests.test_utils import masked_runs
from tests.test_utils.masked_table import ROWS

VOCABULARY = masked_runs.VOCABULARIES["t5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    masked_runs.write_corpora(folder)
    return folder


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, rows in ROWS.items() for name in rows])
def test_the_program_is_the_reference(gloo_pool, folder, tmp_path, kind, name):
    differences = masked_runs.differences(gloo_pool, kind, ROWS[kind][name], folder, tmp_path)
    assert not differences, "\n".join(differences[:8])


def documents():
    """Documents of 1 to 7 sentences of 1 to 9 words; the third has a sentence that is too long."""
    generator = np.random.default_rng(5)
    result = [[generator.integers(5, 61, generator.integers(1, 10)) for _ in range(generator.integers(1, 8))]
              for _ in range(40)]  # fmt: skip
    return result[:2] + [[result[0][0], np.arange(513) % 56 + 5]] + result[2:]


def test_the_64_bit_mersenne_twister_gives_the_number_of_the_cpp_standard():
    assert next(islice(mersenne_twister_64(5489), 9999, None)) == 9981545732273789042


@pytest.mark.parametrize("sizes, least, length, expected", [
    ([[3, 4, 5, 2]], 2, 6, {(0, 0, 2), (0, 2, 4)}),
    ([[7, 7, 7]], 1, 6, {(0, 0, 1), (0, 1, 3)}),  # the last two stay together
    ([[7, 7, 7]], 2, 6, {(0, 0, 3)}),
    ([[1, 513], [513], [512, 512], []], 1, 600, {(1, 0, 1), (2, 0, 2)}),
])  # fmt: skip
def test_sentences_are_taken_until_the_target_is_reached(sizes, least, length, expected):
    rows = sample_map(sizes, None, length, 0.0, 7, least)
    assert len(rows) == len(expected) and {row[:3] for row in rows} == expected and {row[3] for row in rows} == {length}


def test_map_holds_full_epochs_and_short_targets():
    sizes = [[len(sentence) for sentence in document] for document in documents()]
    one, more = (sample_map(sizes, expected, 61, 0.1, 3, 2) for expected in (None, 50))
    assert len(one) < 50 <= len(more) and len(more) % len(one) < 10  # epochs differ by their short targets
    short = {target for *_, target in sample_map(sizes, 2000, 61, 0.1, 3, 2)} - {61}
    assert short and all(target % 10 == 2 for target in short)  # multiples of gcd(10, 60), and 2


@pytest.mark.parametrize("pair", [True, False])
def test_bert_predicts_masked_tokens(pair):
    samples = bert_samples(documents(), 300, 32, 0.1, 3, VOCABULARY, Masking(), pair)
    swapped = [sample["is_random"] for sample in samples]
    assert 0.4 < np.mean(swapped) < 0.6 if pair else not any(swapped)
    rates = []
    for sample in samples:
        length = int(sample["padding_mask"].nonzero()[0].max()) + 1
        restored = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])
        ends = np.flatnonzero(restored == VOCABULARY.sep)
        assert restored[0] == VOCABULARY.cls and len(ends) == 1 + pair and ends[-1] == length - 1
        assert not restored[length:].any() and not sample["types"][length:].any()
        assert sample["types"].sum() == (ends[1] - ends[0] if pair else 0)
        rates.append(sample["loss_mask"].sum() / length)
    assert 0.1 < np.mean(rates) < 0.17


def test_t5_input_and_targets_reconstruct_the_text():
    texts = documents()
    rows = sample_map([[len(sentence) for sentence in document] for document in texts], 300, 30, 0.1, 3, 1)
    samples = t5_samples(texts, 300, (32, 20), 0.1, 3, VOCABULARY, Masking(0.15, 10, geometric=True))
    for (row, first, end, target), sample in zip(rows, samples, strict=True):
        written = list(sample["text_dec"][: sample["dec_mask"].sum()])
        count = sample["loss_mask"].sum()
        assert list(sample["labels"][:count]) == [*written[1:], VOCABULARY.eos] and written[0] == VOCABULARY.bos
        assert (sample["labels"][count:] == -1).all()
        starts = [place for place, token in enumerate(written) if token in VOCABULARY.sentinels]
        assert [written[start] for start in starts] == list(VOCABULARY.sentinels[: len(starts)])
        spans = {written[start]: written[start + 1 : stop] for start, stop in zip(starts, [*starts[1:], None])}
        read = sample["text_enc"][: sample["enc_mask"].sum()]
        joined = [token for item in read for token in spans.get(item, [item])]
        assert joined == list(np.concatenate(texts[row][first:end])[:target])


def test_all_pieces_of_a_word_are_masked_and_specials_never():
    tokens = [2, 5, 8, 12, 16, 3, 20, 7, 3]  # 8, 12, 16 and 20 belong to the word before them, the last across a sep
    for seed in range(50):
        random, text = np.random.RandomState(seed), tokens.copy()
        spans = masked(text, 9, random, VOCABULARY, Masking(0.5, 1), lambda token: 4)
        assert all(set(span) in ({1, 2, 3, 4, 6}, {7}) for span in spans)
        assert [4 if any(place in span for span in spans) else token for place, token in enumerate(tokens)] == text
