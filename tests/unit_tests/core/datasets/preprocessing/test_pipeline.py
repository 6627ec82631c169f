"""tools/preprocess_data.py's pipeline: what comes out, however the work is cut."""

import json
import os

import pytest

from megatron.core.datasets.preprocessing import inputs, sentences
from megatron.core.datasets.preprocessing.pipeline import preprocess
from megatron.core.datasets.preprocessing.search import find_optimal_workers
from megatron.core.datasets.preprocessing.sentences import rule_spans
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sidecar import check_sidecar, read_sidecar, sidecar_path
from tests.test_utils.preprocessing import BYTES, DOCUMENTS, jsonl, pair, run, texts
from tests.test_utils.scripted_model import byte_tokenizer
from tests.test_utils.tiny_tokenizers import bert_vocab, flags


def test_documents_come_out_in_order_with_their_end(tmp_path):
    _, prefix = run(tmp_path, jsonl(), append_eod=True)
    dataset = IndexedDataset(prefix + "_text_document")
    assert len(dataset) == len(DOCUMENTS)
    assert dataset.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))
    for index in (0, 1, 150, 299):
        assert dataset[index].tolist() == [*DOCUMENTS[index].encode(), 256]
    assert not os.path.exists(prefix + ".partial")
    assert not os.path.exists(prefix + ".bad_lines.jsonl")


@pytest.mark.parametrize(("workers", "partitions", "sequential"), [(2, 1, False), (3, 3, True)])
def test_bytes_do_not_depend_on_workers_and_partitions(tmp_path, reference, workers, partitions, sequential):
    options = {"workers": workers, "partitions": partitions, "keep_sequential_samples": sequential}
    _, prefix = run(tmp_path, jsonl(), append_eod=True, **options)
    assert pair(prefix) == reference


@pytest.mark.parametrize("size", [500, 1 << 20])
def test_bytes_do_not_depend_on_the_cut(tmp_path, reference, monkeypatch, size):
    monkeypatch.setattr(inputs, "MIN_PART_BYTES", size)
    monkeypatch.setattr(inputs, "MAX_PART_BYTES", size)
    _, prefix = run(tmp_path, jsonl(DOCUMENTS), append_eod=True)
    assert pair(prefix) == reference


def test_several_keys_make_one_pair_each(tmp_path):
    data = b"".join(json.dumps({"text": text, "title": text[:12]}).encode() + b"\n" for text in DOCUMENTS)
    _, prefix = run(tmp_path, data, json_keys=["text", "title"], workers=2)
    assert texts(prefix) == DOCUMENTS
    assert texts(prefix, "title") == [text[:12] for text in DOCUMENTS]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("post", "first", "last"), [
    (None, [], [257]), ("$A </s>", [], [257]), ("<s> $A </s>", [256], [257]), ("<s> $A", [256], [257]),
    ("$A <s>", [], [256, 257]),
])  # fmt: skip
def test_a_document_has_one_end_token_whoever_adds_it(tmp_path, post, first, last, split):
    tokenizer = byte_tokenizer(tmp_path / "t", post=post)
    kind = flags("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "t"))
    documents = ["AB. CD", "E</s>", "</s>"]
    options = {"split_sentences": split, "sentence_special_tokens": split and post is not None}
    _, prefix = run(tmp_path, jsonl(documents), tokenizer=kind, append_eod=True, **options)
    dataset = IndexedDataset(f"{prefix}_text_{'sentence' if split else 'document'}")
    parts = [["AB.", "CD"], ["E</s>"], ["</s>"]] if split else [[text] for text in documents]
    added = [[] if post is None else [token for token in last if f"$A {tokenizer.id_to_token(token)}" in post]] * 3
    expected = []
    for part, end in zip(parts, added):
        ids = [[*first, *tokenizer.encode(text, add_special_tokens=False).ids, *end] for text in part]
        expected += [*ids[:-1], ids[-1] if ids[-1][-1] == 257 else ids[-1] + [257]]
    assert [dataset[index].tolist() for index in range(len(dataset))] == expected


def test_sentences_are_sequences(tmp_path):
    documents = ["Dr. Smith met J. Doe at 5 p.m. today! Was it 3.14? Yes.\n\nA new paragraph", "", "One."]
    totals, prefix = run(tmp_path, jsonl(documents), split_sentences=True, append_eod=True)
    dataset = IndexedDataset(prefix + "_text_sentence")
    assert dataset.document_indices.tolist() == [0, len(dataset) - 1, len(dataset)]
    assert dataset[len(dataset) - 2].tolist()[-1] == 256 and 256 not in dataset[0].tolist()
    assert totals.empty_documents == 1 and totals.documents == 2


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_sentences_do_not_depend_on_workers(tmp_path, keep_newlines, monkeypatch):
    monkeypatch.setattr(inputs, "MIN_PART_BYTES", 3000)
    monkeypatch.setattr(inputs, "MAX_PART_BYTES", 3000)
    results = []
    for workers in (1, 3):
        options = {"workers": workers, "keep_newlines": keep_newlines, "split_sentences": True}
        _, prefix = run(tmp_path, jsonl([text.upper() for text in DOCUMENTS]), name=f"out{workers}", **options)
        results.append(pair(prefix, level="sentence"))
        assert not os.path.exists(prefix + ".partial")
    assert results[0] == results[1]
    assert len(IndexedDataset(prefix + "_text_sentence")) == 2 * len(DOCUMENTS)


def test_sentences_have_special_tokens_around_them_on_request(tmp_path):
    """The default is what Megatron-LM wrote before its tokenizers were unified, the flag what it writes since."""
    file = bert_vocab(tmp_path / "vocab.txt")
    tokenizer = flags("BertWordPieceLowerCase", vocab_file=file)
    transformers = pytest.importorskip("transformers")
    transformers.BertTokenizerFast(file).save_pretrained(tmp_path / "bert")
    folder = flags("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "bert"))
    for cfg in (tokenizer, folder):
        results = []
        for around in (False, True):
            name = f"{cfg.tokenizer_type}{around}"
            options = {"split_sentences": True, "sentence_special_tokens": around}
            _, prefix = run(tmp_path, jsonl(["The fox. The quick fox.", "."]), name, cfg, **options)
            data = IndexedDataset(prefix + "_text_sentence")
            results.append([data[index].tolist() for index in range(len(data))])
            check_sidecar(prefix + "_text_sentence", build_tokenizer(cfg))  # training need not know
        assert results[0] == [[5, 7, 12], [5, 6, 7, 12], [12]]
        assert results[1] == [[2, *ids, 3] for ids in results[0]]
    with pytest.raises(ValueError, match="--sentence-special-tokens: ByteLevelTokenizer adds no tokens"):
        run(tmp_path, jsonl(), "none", split_sentences=True, sentence_special_tokens=True)
    with pytest.raises(ValueError, match="--sentence-special-tokens has no effect without --split-sentences"):
        run(tmp_path, jsonl(), "none", tokenizer, sentence_special_tokens=True)


def test_rules_split_sentences():
    text = 'Dr. Smith met J. Doe, e.g. at 5 p.m. today! "Was it 3.14?" Yes... No.\n\nA title\n\n  这是。那是！End'
    results = [text[start:stop] for start, stop in rule_spans(text)]
    assert results == [
        "Dr. Smith met J. Doe, e.g. at 5 p.m. today!", '"Was it 3.14?"', "Yes...", "No.", "A title", "这是。", "那是！",
        "End",
    ]  # fmt: skip


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_punkt_splits_where_its_data_is(monkeypatch, keep_newlines):
    """An untrained Punkt of NLTK stands for one that was read from data."""
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    monkeypatch.setattr(sentences, "_punkt", lambda lang: punkt.PunktSentenceTokenizer())
    split, name = sentences.make_splitter("english", keep_newlines)
    assert name == "NLTK Punkt, english"
    end = "\n\n" if keep_newlines else ""
    assert split("One is here.\n\n Two is here! Three. ") == ["One is here." + end, "Two is here!", "Three."]
    assert split(" \n") == []


def test_without_data_for_punkt_rules_split():
    split, name = sentences.make_splitter("no such language", False)
    assert "built-in rules" in name and split("One is here. Two is.") == ["One is here.", "Two is."]


def test_newlines_between_sentences_can_be_kept(tmp_path):
    _, prefix = run(tmp_path, jsonl(["One is here.\nTwo is here."]), split_sentences=True, keep_newlines=True)
    assert "".join(texts(prefix, level="sentence")) == "One is here.\nTwo is here."


def test_existing_output_is_rejected_unless_overwrite(tmp_path):
    _, prefix = run(tmp_path, jsonl())
    before = pair(prefix)
    with pytest.raises(ValueError, match="exists; choose another --output-prefix, or add --overwrite"):
        run(tmp_path, jsonl(DOCUMENTS[:5]))
    assert pair(prefix) == before
    run(tmp_path, jsonl(DOCUMENTS[:5]), overwrite=True)
    assert texts(prefix) == DOCUMENTS[:5]


def test_the_sidecar_names_the_tokenizer(tmp_path):
    _, prefix = run(tmp_path, jsonl(), append_eod=True)
    data = prefix + "_text_document"
    tokenizer = build_tokenizer(BYTES)
    info = check_sidecar(data, tokenizer)
    assert info == read_sidecar(data)
    assert (info.tokenizer_type, info.vocab_size, info.special_ids, info.append_eod) == (
        "ByteLevelTokenizer",
        257,
        {"eod": 256},
        True,
    )
    with pytest.raises(ValueError, match="made with another tokenizer: ByteLevelTokenizer with 257 ids"):
        check_sidecar(data, build_tokenizer(flags("NullTokenizer", vocab_size=257)))
    with open(sidecar_path(data), "w") as file:
        file.write('{"version": 1')
    with pytest.raises(ValueError, match="cannot be read as a tokenizer sidecar"):
        check_sidecar(data, tokenizer)
    os.unlink(sidecar_path(data))
    assert check_sidecar(data, tokenizer) is None


def test_append_eod_needs_a_tokenizer_that_has_one(tmp_path, monkeypatch):
    tokenizer = build_tokenizer(BYTES)
    tokenizer.special_ids.clear()
    cfg = PreprocessConfig(input=[__file__], output_prefix=str(tmp_path / "out"), append_eod=True)
    with pytest.raises(ValueError, match="no 'eod' token"):
        preprocess(cfg, None, lambda _: tokenizer)


def test_the_fastest_number_of_workers_is_found(tmp_path, caplog):
    (tmp_path / "in.jsonl").write_bytes(jsonl())
    cfg = PreprocessConfig(input=[str(tmp_path / "in.jsonl")], workers_to_check=[1, 2], max_documents=40)
    with caplog.at_level("INFO"):
        assert find_optimal_workers(cfg, BYTES, build_tokenizer) in (1, 2)
    assert "the fastest on 40 documents" in caplog.text
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_spawned_workers_build_separate_tokenizers(tmp_path, reference, monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    _, prefix = run(tmp_path, jsonl(), append_eod=True, workers=2)
    assert pair(prefix) == reference


def test_a_text_that_the_tokenizer_refuses_is_located(tmp_path):
    with pytest.raises(ValueError, match=r"input\.jsonl, at or before line \d+ of the part .* reads ids separated"):
        run(tmp_path, jsonl(), tokenizer=flags("NullTokenizer", vocab_size=50))
