"""Fill-in-the-middle samples against the text that they rearrange: the definition of Bavarian et al. 2022."""

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.core.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.tokenizers.simple import ByteLevelTokenizer
from megatron.data.blend import Split
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

PREFIX, MIDDLE, SUFFIX, PAD, EOD, FILE = 0xF0, 0xF1, 0xF2, 0xF3, 0x01, 0x02
NAMES = {"prefix": "<0xF0>", "middle": "<0xF1>", "suffix": "<0xF2>", "pad": "<0xF3>", "eod": "<0x01>"}
LENGTH = 40


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of letters, some of several files, of 5 to 60 characters."""
    prefix, draw = str(tmp_path_factory.mktemp("fim") / "corpus"), np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(80):
        ids = draw.integers(ord("a"), ord("z") + 1, draw.integers(5, 60))
        ids[draw.random(len(ids)) < 0.05] = FILE
        builder.add_document(np.append(ids, EOD), [len(ids) + 1])
    builder.finalize(f"{prefix}.idx")
    return prefix


def datasets(prefix, **options):
    """The rearranged data set and the plain one, of the same samples."""
    settings = {"fim_rate": 1.0, "fim_extra_tokens": NAMES, **options}
    config = GPTFIMDatasetConfig(
        random_seed=1234, sequence_length=LENGTH, blend=([prefix], None), split="1,0,0", tokenizer=ByteLevelTokenizer(),
        **settings,
    )  # fmt: skip
    source = IndexedDataset(prefix, mmap=True)
    arguments = source, prefix, np.arange(len(source), dtype=np.int32), 60, Split.train, config
    return GPTFIMDataset(*arguments), GPTDataset(*arguments)


def full_text(data, index):
    """All tokens of a sample, with the last label; without the padding."""
    sample = data[index]
    length = int(sample["loss_mask"].sum())
    return [*sample["tokens"][:1].tolist(), *sample["labels"][:length].tolist()]


def restored(ids):
    """The text of one rearranged segment, and whether it is in the order SPM; None if its end was cut off."""
    if ids[0] != PREFIX:
        return ids, None
    if MIDDLE not in ids or SUFFIX not in ids:
        return None, None
    if ids[1] == SUFFIX:
        middle = ids.index(MIDDLE)
        return [*ids[middle + 1 :], *ids[2:middle]], True
    prefix, suffix = ids[1 : ids.index(SUFFIX)], ids[ids.index(SUFFIX) + 1 : ids.index(MIDDLE)]
    return [*prefix, *ids[ids.index(MIDDLE) + 1 :], *suffix], False


def segments(ids, separator):
    """Lists between separators."""
    parts = [[]]
    for token in ids:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def test_every_segment_is_its_text_in_another_order(corpus):
    rearranged, plain = datasets(corpus)
    orders, compared = [], 0
    for index in range(len(plain)):
        before, after = (segments(full_text(data, index), EOD) for data in (plain, rearranged))
        assert len(full_text(rearranged, index)) == LENGTH + 1  # three marks per segment: always cut, never padded
        for text, segment in zip(before, after[:-1]):  # the last may be cut
            text_again, spm = restored(segment) if segment else ([], None)
            assert text_again == text
            compared += bool(segment)
            orders += [spm] if segment else []
    assert compared > 40 and 0.3 < np.mean(orders) < 0.75  # an empty prefix counts as SPM


@pytest.mark.parametrize("rate, spm", [(0.25, 1.0), (0.75, 0.0)])
def test_rates_are_shares_of_the_segments(corpus, rate, spm):
    rearranged, _ = datasets(corpus, fim_rate=rate, fim_spm_rate=spm)
    results = [part for index in range(60) for part in segments(full_text(rearranged, index), EOD)[:-1] if part]
    marked = [part for part in results if part[0] == PREFIX]
    assert abs(len(marked) / len(results) - rate) < 3 * (rate * (1 - rate) / len(results)) ** 0.5
    suffix_first = np.mean([part[1] == SUFFIX for part in marked])  # also PSM with an empty prefix
    assert suffix_first == 1 if spm else suffix_first < 0.4


def test_sample_does_not_depend_on_earlier_reads(corpus):
    first, _ = datasets(corpus, fim_rate=0.5)
    second, _ = datasets(corpus, fim_rate=0.5)
    backwards = {index: second[index] for index in reversed(range(60))}
    for index in range(60):
        assert all(np.array_equal(value, backwards[index][name]) for name, value in first[index].items())


def test_another_seed_rearranges_the_same_samples_differently(corpus):
    first, second = datasets(corpus)[0], datasets(corpus)[0]
    second.config.random_seed += 1  # after the samples were chosen
    assert sum(full_text(first, index) != full_text(second, index) for index in range(60)) > 50


def test_fragments_are_rearranged_separately(corpus):
    rearranged, plain = datasets(corpus, fim_split_sample="<0x02>", fim_fragment_rate=1.0)
    compared = 0
    for index in range(60):
        before, after = (segments(full_text(data, index), EOD) for data in (plain, rearranged))
        for text, segment in zip(before, after[:-1]):
            pairs = [*zip(segments(text, FILE), segments(segment, FILE))]
            assert len(segments(text, FILE)) == len(pairs)
            assert all(restored(new)[0] == old for old, new in pairs if old)
            compared += len(pairs) > 1
    assert compared > 10
    untouched, plain = datasets(corpus, fim_split_sample="<0x02>", fim_fragment_rate=0.0)
    split = [part for index in range(60) for part in segments(full_text(untouched, index), EOD) if FILE in part]
    assert split and not any(PREFIX in part for part in split)


def test_texts_with_the_prefix_are_unchanged(corpus):
    letters = {part[0] for index in range(60) for part in segments(full_text(datasets(corpus)[1], index), EOD) if part}
    letter = min(letters - {FILE})
    rearranged, plain = datasets(corpus, fim_no_prefix=chr(letter))
    for index in range(60):
        for text, segment in zip(*(segments(full_text(data, index), EOD) for data in (plain, rearranged))):
            if text and segment:
                assert (segment[0] == PREFIX) == (text[0] != letter)


def test_shorter_fim_sample_is_padded_without_loss(corpus):
    """Two bytes that are no character become one of three bytes; control tokens of the text are left out."""
    rearranged, plain = datasets(corpus)

    class Shorter(ByteLevelTokenizer):
        def tokenize_sentences(self, texts, special_tokens):
            return [np.array([ord(letter) for letter in text[::2]], dtype=np.int64) for text in texts]

    rearranged.config.tokenizer = Shorter()
    sizes = {int(rearranged[index]["loss_mask"].sum()) for index in range(20)}
    assert min(sizes) < LENGTH
    sample = next(rearranged[index] for index in range(20) if rearranged[index]["loss_mask"].sum() < LENGTH)
    assert not sample["loss_mask"][int(sample["loss_mask"].sum()) :].any() and sample["tokens"][-1] == 0


def test_missing_tokens_are_named(corpus):
    with pytest.raises(UserError, match=r"--fim-pad-token <fim_pad>: is not a token of the tokenizer"):
        datasets(corpus, fim_extra_tokens={**NAMES, "pad": "<fim_pad>"})
    with pytest.raises(UserError, match="fim_extra_tokens: has no eod, pad"):
        datasets(corpus, fim_extra_tokens={name: NAMES[name] for name in ("prefix", "middle", "suffix")})
    with pytest.raises(UserError, match="requires fim_fragment_rate"):
        datasets(corpus, fim_split_sample="<0x02>")
