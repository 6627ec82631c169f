"""BERT's and T5's data sets: samples equal an independent rewrite, bad input is rejected, files are cached."""

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import EmptySplitError
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.data import helpers, index_cache
from megatron.data.blend import Split
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.data.word_masking import expected_masks
from tests.reference import masked_samples as reference

WORDS = 60


class WordPieces:
    """``pad`` first or, with ``pad=None``, none; every third token continues a word; sentinels last."""

    def __init__(self, pad=0, sentinels=20, **roles):
        self.cls, self.sep, self.mask, self.bos, self.eos = 1, 2, 3, 4, 5
        if pad is not None:
            self.pad = pad
        self.__dict__.update(roles)
        self.inv_vocab = {i: ("##" if i % 3 == 0 and i > 8 else "") + f"w{i}" for i in range(WORDS)}
        self.inv_vocab |= {WORDS + i: f"<extra_id_{i}>" for i in range(sentinels)}
        self.additional_special_tokens_ids = list(range(WORDS, WORDS + sentinels))
        self.vocab_size = len(self.inv_vocab)

    def as_reference(self):
        return reference.Vocabulary(
            self.inv_vocab, self.cls, self.sep, self.mask, self.pad, self.bos, self.eos,
            tuple(self.additional_special_tokens_ids),
        )  # fmt: skip


def corpus(documents=30, longest=12, most=7, seed=0):
    random = np.random.RandomState(seed)
    return [
        [random.randint(8, WORDS, random.randint(1, longest + 1)) for _ in range(random.randint(1, most + 1))]
        for _ in range(documents)
    ]


def write(prefix, documents):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for sentences in documents:
        builder.add_document(np.concatenate(sentences), [len(sentence) for sentence in sentences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


COMMON = {"random_seed": 1234, "sequence_length": 48, "masking_probability": 0.15, "short_sequence_probability": 0.1}
BERT = {**COMMON, "masking_max_ngram": 3, "masking_do_full_word": True, "classification_head": True}
T5 = {**COMMON, "masking_max_ngram": 10, "masking_do_full_word": True, "masking_use_geometric_distribution": True,
      "sequence_length_decoder": 32}  # fmt: skip


def config(kind, prefix, tokenizer=None, **options):
    settings = {"blend": ([prefix], None), "split": "1,0,0", **(BERT if kind == "bert" else T5), **options}
    classes = {"bert": BERTMaskedWordPieceDatasetConfig, "t5": T5MaskedWordPieceDatasetConfig}
    return classes[kind](tokenizer=tokenizer or WordPieces(), **settings)


def build(kind, prefix, sizes=(None, 0, 0), **options):
    classes = {"bert": BERTMaskedWordPieceDataset, "t5": T5MaskedWordPieceDataset}
    builder = BlendedMegatronDatasetBuilder(classes[kind], sizes, lambda: True, config(kind, prefix, **options))
    refusal = None
    try:
        builder.check()
    except EmptySplitError as error:
        refusal = str(error)
    try:
        return builder.build()
    except EmptySplitError as error:
        refusal, result = None, refusal
        assert result == str(error), "check() says what build() says, without an index"
        raise
    finally:
        assert refusal is None


def train(kind, prefix, size=None, **options):
    return build(kind, prefix, (size, 0, 0), **options)[0]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sentences") / "data", corpus())


MASKINGS = {
    "bert": {},
    "t5": {"masking_max_ngram": 10, "masking_use_geometric_distribution": True},
    "pieces": {"masking_do_full_word": False, "masking_max_ngram": 1},
    "longer": {"masking_use_longer_ngrams": True, "masking_max_ngram": 4},
    "many": {"masking_probability": 0.4, "short_sequence_probability": 0.5},
    "few": {"masking_probability": 0.05, "short_sequence_probability": 0.0},
}


def rule_of(settings):
    return reference.Masking(
        settings["masking_probability"], settings["masking_max_ngram"], settings["masking_do_full_word"],
        settings.get("masking_use_longer_ngrams", False), settings.get("masking_use_geometric_distribution", False),
    )  # fmt: skip


@pytest.mark.parametrize("name, head", itertools.product(MASKINGS, [True, False]))
@pytest.mark.parametrize("pad, seed", [(0, 1234), (1, 0)])
def test_berts_samples_equal_the_reference(prefix, name, head, pad, seed):
    """Except for padding whose id is not 0 or was drawn as a replacement: it is known by length here."""
    options = {"masking_max_ngram": 3, "random_seed": seed, "classification_head": head, **MASKINGS[name]}
    tokenizer, settings = WordPieces(pad, cls=6), {**BERT, **options}
    local = train("bert", prefix, 100, tokenizer=tokenizer, **options)
    documents = [list(sentences) for sentences in corpus()]
    short = settings["short_sequence_probability"]
    vocabulary, rule = tokenizer.as_reference(), rule_of(settings)
    expected = reference.bert_samples(documents, 100, 48, short, seed, vocabulary, rule, head)
    assert len(local) == len(expected) > 100
    for sample, foreign in zip((local[i] for i in range(len(local))), expected):
        assert list(sample) == list(foreign)
        assert {value.dtype for value in sample.values() if not isinstance(value, int)} == {np.dtype(np.int64)}
        real = sample["padding_mask"] == 1
        assert real[: real.sum()].all() and not sample["text"][~real].any() and not sample["types"][~real].any()
        for key in ("text", "labels", "loss_mask"):
            np.testing.assert_array_equal(sample[key], foreign[key], key)
        np.testing.assert_array_equal(sample["types"][real], foreign["types"][real])
        hidden = foreign["padding_mask"][real] != 1
        assert not sample["text"][real][hidden].any() and (sample["loss_mask"][real][hidden] == 1).all()
        assert (sample["is_random"], sample["truncated"]) == (foreign["is_random"], foreign["truncated"])


@pytest.mark.parametrize("name", MASKINGS)
@pytest.mark.parametrize("seed, longest", [(1234, 12), (2**32 - 20, 70)])
def test_t5s_samples_equal_the_reference(tmp_path, name, seed, longest):
    documents = corpus(longest=longest)
    options = {"sequence_length_decoder": 60, "random_seed": seed, **MASKINGS[name]}
    tokenizer, settings = WordPieces(sentinels=40), {**T5, **options}
    local = train("t5", write(tmp_path / "data", documents), 100, tokenizer=tokenizer, **options)
    short = settings["short_sequence_probability"]
    vocabulary, rule = tokenizer.as_reference(), rule_of(settings)
    expected = reference.t5_samples(documents, 100, (48, 60), short, seed, vocabulary, rule)
    assert len(local) == len(expected) >= 100
    assert any(sample["truncated"] for sample in expected)
    for index, foreign in enumerate(expected):
        assert set(local[index]) == set(foreign) and local[index]["enc_mask"].dtype == np.int64
        for key, value in local[index].items():
            np.testing.assert_array_equal(value, foreign[key], key)


def test_special_tokens_inside_sentences_are_not_masked_and_join_no_words(tmp_path):
    """Megatron-LM's current preprocessing writes [CLS] ... [SEP] around every sentence."""
    documents = [[np.concatenate([[1], sentence, [2]]) for sentence in document] for document in corpus()]
    prefix, tokenizer = write(tmp_path / "data", documents), WordPieces(sentinels=40)
    vocabulary = tokenizer.as_reference()
    bert = reference.bert_samples(documents, 60, 48, 0.1, 1234, vocabulary, rule_of(BERT), True)
    t5 = reference.t5_samples(documents, 60, (48, 32), 0.1, 1234, vocabulary, rule_of(T5))
    for kind, expected, keys in (("bert", bert, ("text", "labels")), ("t5", t5, ("text_enc", "text_dec", "labels"))):
        local = train(kind, prefix, 60, tokenizer=tokenizer)
        for index, foreign in enumerate(expected):
            for key in keys:
                np.testing.assert_array_equal(local[index][key], foreign[key], key)


def test_a_sample_depends_only_on_seed_and_number(prefix):
    first, repeated = train("bert", prefix, 100), pickle.loads(pickle.dumps(train("bert", prefix, 100)))
    other = train("bert", prefix, 100, random_seed=1235)
    backwards = [repeated[i] for i in reversed(range(50))][::-1]
    for index, sample in enumerate(backwards):
        for key, value in first[index].items():
            np.testing.assert_array_equal(value, sample[key])
        sample["text"][:] = -5  # the caller's own
        assert (first[index]["text"] >= 0).all()
    assert any((first[i]["text"] != other[i]["text"]).any() for i in range(50))


def test_text_that_holds_the_padding_id_is_labelled_0(tmp_path):
    prefix = write(tmp_path / "data", [[np.full(9, 1), np.full(9, 1)]] * 4)
    sample = train("bert", prefix, 4, tokenizer=WordPieces(1, cls=6))[0]
    assert set(sample["labels"][sample["loss_mask"] == 1]) == {0} and set(sample["labels"]) == {-1, 0}


@pytest.mark.parametrize("tokenizer", [WordPieces(pad=None), WordPieces(pad=2), WordPieces(pad=-1)])
def test_padding_needs_no_separate_id(prefix, tokenizer):
    expected, local = train("bert", prefix, 50), train("bert", prefix, 50, tokenizer=tokenizer)
    for index in range(50):
        for key, value in expected[index].items():
            np.testing.assert_array_equal(local[index][key], value, key)


def test_a_split_divides_documents(prefix):
    sets = build("bert", prefix, (None, None, None), split="80,10,10")
    data, samples = IndexedDataset(prefix), []
    for part, (first, last) in zip(sets, [(0, 24), (24, 27), (27, 30)]):
        bounds = data.document_indices[[first, last]]
        assert bounds[0] <= part.sample_index[:, 0].min() and part.sample_index[:, 1].max() <= bounds[1]
        assert part.num_epochs == 1
        samples.append(len(part))
    assert train("bert", prefix).num_epochs == 1
    longer = train("bert", prefix, 3 * samples[0], split="80,10,10")
    assert longer.num_epochs in (3, 4) and len(longer) >= 3 * samples[0]


def test_epochs_are_counted_past_documents_that_give_nothing(tmp_path):
    prefix = write(tmp_path / "data", [[np.full(3, 9)] * count for count in (1, 2, 1, 2)])
    assert train("bert", prefix, 9).num_epochs == 5 and len(train("bert", prefix, 9)) == 10


def test_a_split_that_rounds_to_no_document_is_rejected(tmp_path):
    prefix = write(tmp_path / "data", corpus(150))
    with pytest.raises(EmptySplitError, match="10 samples of valid asked .* has no documents; .*--split"):
        build("bert", prefix, (10, 10, 0), split="999,1,0")
    train_, valid, test = build("bert", prefix, (10, 10, 10), split="949,50,1")  # 0.15 documents of test
    assert len(valid) >= 10 and test is None


def test_documents_of_one_sentence_are_rejected_by_bert(tmp_path, caplog):
    prefix = write(tmp_path / "data", [[np.concatenate(sentences)] for sentences in corpus()])
    with pytest.raises(EmptySplitError, match="fewer than 2 .*--split-sentences, or give --bert-no-binary-head"):
        train("bert", prefix, 10)
    assert len(train("bert", prefix, 10, classification_head=False)) == 30
    assert "every document of train is one sequence, and a sample takes at most its first 45 tokens" in caplog.text
    caplog.clear()
    assert len(train("t5", prefix, 10)) == 30
    assert "takes at most its first 46 tokens" in caplog.text
    prefix = write(tmp_path / "data_sentence", [[np.full(3, 9)]] * 2)
    with pytest.raises(EmptySplitError, match="each of its documents is one sentence: take longer ones, or give"):
        train("bert", prefix, 10)


def test_gpt_rejects_documents_split_into_sentences(prefix):
    options = {"random_seed": 1, "sequence_length": 8, "blend": ([prefix], None), "tokenizer": WordPieces()}
    with pytest.raises(UserError, match="holds sentences, 92 of 30 documents.*without --split-sentences"):
        BlendedMegatronDatasetBuilder(GPTDataset, (1, 0, 0), lambda: True, GPTDatasetConfig(**options)).build()


def test_documents_with_a_long_sentence_are_counted_in_the_refusal(tmp_path):
    prefix = write(tmp_path / "data", [[np.full(513, 9), np.full(3, 9)], [np.full(3, 9)]])
    expected = "1 have fewer than 2 .* and 1 have a sentence of more than 512 tokens; give that split a larger share"
    with pytest.raises(EmptySplitError, match=expected):
        train("bert", prefix, 10)
    prefix = write(tmp_path / "long", [[np.full(513, 9), np.full(3, 9)]] * 2)
    with pytest.raises(EmptySplitError, match="2 have a sentence of more than 512 tokens; shorten such sentences, or"):
        train("t5", prefix, 10)


NOTHING = np.zeros(0, dtype=np.int64)


@pytest.mark.parametrize(
    "documents",
    [
        [*corpus(6), [NOTHING, NOTHING, NOTHING]],
        [*corpus(6), [np.full(48, 9), NOTHING, NOTHING]],  # its second sample is empty
    ],
)
def test_samples_without_tokens_are_rejected_by_t5_and_reported_by_bert(tmp_path, documents, caplog):
    prefix = write(tmp_path / "data_sentence", documents)
    options = {"short_sequence_probability": 0.0}
    with pytest.raises(UserError, match=rf"{prefix}: 1 sample of \d+ of train hold no token: .*document 6 .*empty"):
        train("t5", prefix, **options)
    data = train("bert", prefix, **options, classification_head=False)
    empty = [sample for sample in data if not sample["loss_mask"].any() and sample["padding_mask"].sum() == 2]
    assert len(empty) == 1 and (empty[0]["labels"] == -1).all()
    assert "document 6" in caplog.text and f"1 sample of {len(data)}" in caplog.text


def test_a_split_of_empty_sentences_is_rejected(tmp_path):
    prefix = write(tmp_path / "data_sentence", [[NOTHING, NOTHING]] * 3)
    for kind in ("bert", "t5"):
        with pytest.raises(UserError, match="hold no token: the sentences of document 0"):
            train(kind, prefix)


def test_empty_sentences_next_to_text_are_accepted(tmp_path, caplog):
    prefix = write(tmp_path / "data_sentence", [[np.full(5, 9), NOTHING, np.full(5, 9)]] * 3)
    for kind in ("bert", "t5"):
        assert len(train(kind, prefix)) and "no token" not in caplog.text


def test_a_split_without_pairs_next_to_one_with_pairs_needs_other_documents(tmp_path):
    prefix = write(tmp_path / "data", [*corpus(8), [np.full(3, 9)], [np.full(3, 9)]])
    with pytest.raises(EmptySplitError, match="4 samples of valid .* of 2 documents 2 have fewer .*; .*larger share"):
        build("bert", prefix, (10, 4, 0), split="8,2,0")


def test_a_configuration_without_data_path_is_rejected(prefix):
    with pytest.raises(UserError, match="--data-path"):
        train("bert", prefix, 10, blend=None)


def test_blends_with_and_without_weights(tmp_path):
    prefixes = [write(tmp_path / name, corpus(seed=seed)) for seed, name in enumerate("ab")]
    full = train("bert", None, blend=(prefixes, None))
    singles = [train("bert", prefix) for prefix in prefixes]
    assert len(full) == sum(map(len, singles))
    weighted = train("bert", None, 100, blend=(prefixes, [0.7, 0.3]))
    assert len(weighted) == 100
    for blend in (full, weighted):
        # masks come from the number within the source
        for index in (0, 1, 40, len(blend) - 1):
            sample, source = blend[index], int(blend.dataset_index[index])
            number = int(blend.dataset_sample_index[index])
            local = blend.datasets[source][number]
            assert next(iter(sample)) == "dataset_id" and sample["dataset_id"] == source
            np.testing.assert_array_equal(sample["text"], local["text"])


def test_sentinels_and_the_decoders_length_end_the_masking(prefix):
    enough = {"masking_probability": 0.4, "tokenizer": WordPieces(sentinels=40), "sequence_length_decoder": 48}
    plenty = train("t5", prefix, 100, **enough)
    for options, most in (({"sequence_length_decoder": 24}, 40), ({"tokenizer": WordPieces(sentinels=5)}, 5)):
        scarce = train("t5", prefix, 100, **{**enough, **options})
        cut = 0
        for index in range(100):
            local, foreign = scarce[index], plenty[index]
            assert (local["text_dec"] >= WORDS).sum() <= most
            if (local["text_enc"] == foreign["text_enc"]).all():
                length = len(local["labels"])
                np.testing.assert_array_equal(local["labels"], foreign["labels"][:length])
            else:
                cut += 1
        assert 0 < cut < 100
        assert most == 5 or max(scarce[index]["dec_mask"].sum() for index in range(100)) == 24  # none is left free


def test_all_problems_of_a_configuration_are_reported_together(prefix):
    bare = WordPieces(sentinels=2)
    del bare.cls, bare.mask
    wrong = {"masking_probability": 1.0, "short_sequence_probability": 1.1, "masking_max_ngram": 0,
             "sequence_length": 4, "masking_do_permutation": True}  # fmt: skip
    with pytest.raises(UserError) as refused:
        config("bert", prefix, bare, **wrong)
    for printed in ("--mask-prob 1.0", "--short-seq-prob 1.1", "masking_max_ngram", "permutation", "at least 5 tokens",
                 "no token for cls, mask"):  # fmt: skip
        assert printed in str(refused.value)
    with pytest.raises(UserError) as refused:
        config("t5", prefix, masking_probability=1.0, sequence_length_decoder=20)
    assert len(str(refused.value).splitlines()) == 1
    assert expected_masks(49, 0.5, 10) == (23, 6)  # two places of the encoder stay free
    with pytest.raises(UserError, match="at least 30"):
        config("t5", prefix, masking_probability=0.5, sequence_length_decoder=29)
    config("t5", prefix, WordPieces(sentinels=6), masking_probability=0.5, sequence_length_decoder=30)
    with pytest.raises(UserError) as refused:
        config("t5", prefix, bare, masking_probability=0.5, sequence_length_decoder=20)
    assert "--decoder-seq-length 20: with --encoder-seq-length 48 and --mask-prob 0.5" in str(refused.value)
    assert "about 23 masked tokens, 6 sentinels and a start token to take; at least 30" in str(refused.value)
    assert "2 sentinels, but a sample has about 6 spans; give --vocab-extra-ids 100" in str(refused.value)


def test_t5_needs_no_tokens_of_berts_and_starts_with_pad_where_there_is_no_bos(prefix):
    tokenizer = WordPieces()
    expected = train("t5", prefix, 20)
    del tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.bos
    local = train("t5", prefix, 20, tokenizer=tokenizer)
    for index in range(20):
        assert local[index]["text_dec"][0] == 0 and local[index]["dec_mask"][0] == 1
        np.testing.assert_array_equal(local[index]["labels"], expected[index]["labels"])
    del tokenizer.pad
    with pytest.raises(UserError, match="neither a bos nor a pad"):
        config("t5", prefix, tokenizer)


def test_a_token_outside_the_vocabulary_is_rejected_with_its_sentence(tmp_path):
    documents = corpus()
    number = next(number for number, document in enumerate(documents) if len(document) > 1)
    documents[number][1][0] = 900
    data = train("t5", write(tmp_path / "data", documents), short_sequence_probability=0.0)
    sentence = sum(map(len, documents[:number])) + 1
    with pytest.raises(UserError, match=rf"id 900 in sentence {sentence} at token 0 is not below the vocabulary size"):
        [data[i] for i in range(len(data))]


def test_the_sentence_map_is_cached_by_every_setting_that_it_depends_on(tmp_path, monkeypatch):
    prefix = write(tmp_path / "data", corpus())
    folder = tmp_path / "data" / "cache" / "BERTMaskedWordPieceDataset_indices"
    first = train("bert", prefix, 100)
    files = set(folder.glob("*.npy"))
    assert len(files) == 1
    monkeypatch.setattr("megatron.core.datasets.masked_dataset.build_mapping", None)  # not built again
    repeated = train("bert", prefix, 100, masking_probability=0.3)  # masks are no part of it
    np.testing.assert_array_equal(repeated.sample_index, first.sample_index)
    assert isinstance(repeated.sample_index.base, np.ndarray)
    monkeypatch.undo()
    for options in ({"random_seed": 5}, {"sequence_length": 40}, {"short_sequence_probability": 0.2},
                    {"classification_head": False}, {"split": "90,10,0"}):  # fmt: skip
        train("bert", prefix, 100, **options)
        grown = set(folder.glob("*.npy"))
        assert len(grown) == len(files) + 1, options
        files = grown


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_masked_samples_after_a_replaced_data_file_equal_those_without_a_cache(tmp_path, kind):
    """The files keep their sizes: documents with equal numbers of sentences change places."""
    documents, options = corpus(), {"sequence_length": 20}  # documents give several samples
    prefix = write(tmp_path / "data", documents)
    train(kind, prefix, 100, **options)
    by_count = {}
    for document in documents:
        by_count.setdefault(len(document), []).append(document)
    documents = [by_count[len(document)].pop() for document in documents]
    sizes = [Path(f"{prefix}.{end}").stat().st_size for end in ("bin", "idx")]
    write(prefix, documents)
    assert [Path(f"{prefix}.{end}").stat().st_size for end in ("bin", "idx")] == sizes
    uncached = train(kind, write(tmp_path / "other", documents), 100, **options)
    data = train(kind, prefix, 100, **options)
    assert len(data) == len(uncached) >= 100
    for index in range(len(data)):
        sample, expected = data[index], uncached[index]
        assert sample.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(sample[key], value, f"{key} of sample {index}")


@pytest.mark.parametrize("damage", ["flip", "cut", "columns", "description"])
def test_a_damaged_map_is_built_again(tmp_path, damage):
    prefix = write(tmp_path / "data", corpus())
    first = train("t5", prefix, 100).sample_index.copy()
    folder = Path(prefix) / "cache" / "T5MaskedWordPieceDataset_indices"
    (path,) = folder.glob("*.npy")
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[-5] ^= 4
    elif damage == "cut":
        raw = raw[:-12]
    elif damage == "columns":
        np.save(path, first[:, :2])
        raw = bytearray(path.read_bytes())
    else:
        (description,) = folder.glob("*.txt")
        description.write_bytes(description.read_bytes()[:-3])
    path.write_bytes(raw)
    np.testing.assert_array_equal(train("t5", prefix, 100).sample_index, first)


def test_the_cache_rejects_rows_outside_their_ranges(tmp_path):
    layout, bounds = {"rows": ((None, 2), "int64")}, {"rows": [(0, 9), (1, 10)]}
    rows = np.array([[0, 1], [9, 10]])
    cache = index_cache.IndexCache(str(tmp_path), "kind", {"a": 1}, layout, bounds)
    np.testing.assert_array_equal(cache.get(lambda: {"rows": rows})["rows"], rows)
    narrower = index_cache.IndexCache(str(tmp_path), "kind", {"a": 1}, layout, {"rows": [(0, 8), (1, 10)]})
    assert narrower.load() is None and "outside 0 to 8" in narrower.damage


def test_both_builders_give_the_same_cache(tmp_path, monkeypatch):
    if not helpers.has_extension():
        pytest.skip("the C++ extension is not built")
    prefix = write(tmp_path / "data", corpus())
    compiled = train("bert", prefix, 100, path_to_cache=str(tmp_path / "one"))
    monkeypatch.setattr(helpers, "_cpp", None)
    twin = train("bert", prefix, 100, path_to_cache=str(tmp_path / "two"))
    np.testing.assert_array_equal(compiled.sample_index, twin.sample_index)
    assert twin.index_split is Split.train
    names = [{path.name for path in (tmp_path / name).glob("*.npy")} for name in ("one", "two")]
    assert names[0] == names[1]
