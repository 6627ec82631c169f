"""Every kind of tokenizer: ids, special ids, and clear errors for broken files."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.core.tokenizers import MegatronTokenizer, build_tokenizer
from megatron.core.tokenizers.libraries import require
from megatron.core.tokenizers.training import train_byte_level_bpe, train_wordpiece
from tests.test_utils.tiny_tokenizers import (
    bert_vocab,
    byte_level_bpe,
    flags,
    gpt2_files,
    sentence_piece_model,
    tiktoken_json,
)

SAMPLE = "the quick fox, the end.\nnaïve 中文"


def every_kind(folder):
    vocab, merges = gpt2_files(folder)
    spm = sentence_piece_model(folder / "spm.model")
    return {
        "HuggingFaceTokenizer": flags(
            "HuggingFaceTokenizer", tokenizer_model=byte_level_bpe(folder / "tokenizer.json")
        ),
        "GPT2BPETokenizer": flags("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges),
        "GPTSentencePieceTokenizer": flags("GPTSentencePieceTokenizer", tokenizer_model=spm),
        "Llama2Tokenizer": flags("Llama2Tokenizer", tokenizer_model=spm),
        "SentencePieceTokenizer": flags("SentencePieceTokenizer", tokenizer_model=spm, vocab_extra_ids=5),
        "TikTokenizer": flags("TikTokenizer", tokenizer_model=tiktoken_json(folder / "tik.json")),
        "BertWordPieceLowerCase": flags("BertWordPieceLowerCase", vocab_file=bert_vocab(folder / "vocab.txt")),
        "BertWordPieceCase": flags("BertWordPieceCase", vocab_file=bert_vocab(folder / "vocab.txt"), vocab_extra_ids=3),
        "NullTokenizer": flags("NullTokenizer", vocab_size=100),
        "ByteLevelTokenizer": flags("ByteLevelTokenizer"),
    }


KINDS = (
    "HuggingFaceTokenizer", "GPT2BPETokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer",
    "SentencePieceTokenizer", "TikTokenizer", "BertWordPieceLowerCase", "BertWordPieceCase", "NullTokenizer",
    "ByteLevelTokenizer",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    kinds = every_kind(tmp_path_factory.mktemp("kinds"))
    return {kind: (build_tokenizer(cfg), build_tokenizer(cfg)) for kind, cfg in kinds.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_the_protocol(tokenizers, kind):
    tokenizer, repeated = tokenizers[kind]
    text = "3 1 41 5" if kind == "NullTokenizer" else SAMPLE
    ids = tokenizer.tokenize(text)
    assert ids and all(0 <= index < tokenizer.vocab_size for index in ids)
    batch = tokenizer.tokenize_batch([text, "", text])
    assert [array.tolist() for array in batch] == [ids, tokenizer.tokenize(""), ids]
    assert all(isinstance(array, np.ndarray) for array in batch)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.tokenizer_type == kind
    assert tokenizer.fingerprint == repeated.fingerprint and len(tokenizer.fingerprint) == 2 * 64 + 1
    if not kind.startswith("Bert"):
        assert (
            tokenizer.detokenize(ids).replace("⁇", "?") in (text, text.replace("\n", " "))
            or "Piece" in kind
            or kind == "Llama2Tokenizer"
        )
    if kind != "NullTokenizer":
        assert max(tokenizer.vocab.values()) + 1 == tokenizer.vocab_size
        assert tokenizer.inv_vocab[tokenizer.eod] is not None


def test_fingerprints_tell_tokenizers_apart(tokenizers):
    prints = {kind: pair[0].fingerprint for kind, pair in tokenizers.items()}
    del prints["Llama2Tokenizer"]  # the same model and ids as GPTSentencePieceTokenizer
    assert len(set(prints.values())) == len(prints)


def test_a_missing_role_is_named(tokenizers):
    with pytest.raises(ValueError, match="no 'mask' token"):
        tokenizers["ByteLevelTokenizer"][0].mask  # noqa: B018


def test_null_tokenizer_is_megatrons():
    tokenizer = build_tokenizer(flags("NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (100, 99, -1)
    assert tokenizer.tokenize("5 17 3") == [5, 17, 3]
    with pytest.raises(ValueError, match="outside --vocab-size"):
        tokenizer.tokenize("100")


def test_bert_ids_and_extra_ids(tokenizers):
    lower, cased = tokenizers["BertWordPieceLowerCase"][0], tokenizers["BertWordPieceCase"][0]
    assert lower.tokenize("The quick foxes jumps.") == [5, 6, 7, 8, 9, 10, 12]
    assert cased.tokenize("The quick")[0] == 11
    assert (lower.cls, lower.sep, lower.mask, lower.pad, lower.eod, lower.vocab_size) == (2, 3, 4, 0, 3, 14)
    assert cased.additional_special_tokens_ids == [14, 15, 16] and lower.additional_special_tokens_ids == []
    for tokenizer in (lower, cased):
        assert (tokenizer.bos, tokenizer.eos, tokenizer.eod) == (tokenizer.cls, tokenizer.sep, tokenizer.sep)


def test_sentinels_of_word_piece(tmp_path):
    """Like Megatron-LM, the cased kind has 100 by default, lower case only requested ones; special tokens first."""
    file = bert_vocab(tmp_path / "vocab.txt")
    sizes = {None: 114, 0: 14, 7: 21}
    for passed, size in sizes.items():
        assert build_tokenizer(flags("BertWordPieceCase", vocab_file=file, vocab_extra_ids=passed)).vocab_size == size
    lower = build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=file, vocab_extra_ids=2,
                                  tokenizer_special_tokens=["<S>"]))  # fmt: skip
    assert lower.tokenize("the <S> <extra_id_1> <extra_id_2>")[:3] == [5, 14, 16]
    assert lower.additional_special_tokens_ids == [15, 16]
    plain = build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=file, vocab_extra_ids=2))
    assert lower.fingerprint != plain.fingerprint
    without = build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=file))
    assert without.fingerprint == plain.fingerprint  # one data set for BERT and for T5
    raw = Path(file).read_bytes()
    for text in (raw.replace(b"\n", b"\r\n"), raw.removesuffix(b"\n")):
        Path(file).write_bytes(text)
        assert build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=file)).fingerprint == plain.fingerprint
    ends = write(tmp_path / "ends.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n[BOS]\n[EOS]\n")
    tokenizer = build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=ends))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod) == (5, 6, 6)


def test_sentinels_that_a_tokenizer_has_keep_their_ids(tmp_path):
    """T5's sentinels are the last ids of its vocabulary, in reverse order."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = ["<pad>", "</s>", "<unk>", "a", "<extra_id_1>", "<extra_id_0>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<extra_id_0>", "<extra_id_1>"])
    path = write(tmp_path / "tokenizer.json", json.loads(backend.to_str()))
    prints = set()
    for extra, expected in ((None, [5, 4]), (2, [5, 4]), (4, [5, 4, 6, 7])):
        tokenizer = build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=path, vocab_extra_ids=extra))
        assert tokenizer.additional_special_tokens_ids == expected
        assert (tokenizer.pad, tokenizer.eos, tokenizer.eod) == (0, 1, 1)
        prints.add(tokenizer.fingerprint)
    assert len(prints) == 1


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "GPTSentencePieceTokenizer"])
def test_sentinels_of_other_kinds_follow_their_vocabulary(tmp_path, tokenizers, kind):
    cfg = every_kind(tmp_path)[kind]
    cfg.vocab_extra_ids = 2
    tokenizer, size = build_tokenizer(cfg), tokenizers[kind][0].vocab_size
    assert tokenizer.additional_special_tokens_ids == [size, size + 1]
    assert size + 1 in tokenizer.tokenize("the <extra_id_1> fox")
    assert tokenizer.fingerprint == tokenizers[kind][0].fingerprint


def test_a_bert_of_hugging_faces_ends_with_its_separator(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.BertTokenizerFast(bert_vocab(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    foreign = build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "bert")))
    local = build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt")))
    roles = ("cls", "sep", "mask", "pad", "bos", "eos", "eod")
    assert [getattr(foreign, role) for role in roles] == [getattr(local, role) for role in roles]
    for special_tokens in (False, True):
        pair = [tokenizer.tokenize_sentences(["The fox", ""], special_tokens) for tokenizer in (local, foreign)]
        assert [ids.tolist() for ids in pair[0]] == [ids.tolist() for ids in pair[1]]
        assert (pair[0][0][0] == 2) == special_tokens


def test_special_tokens_around_sentences_need_a_tokenizer_that_puts_some(tokenizers):
    for kind in ("GPT2BPETokenizer", "SentencePieceTokenizer", "ByteLevelTokenizer"):
        with pytest.raises(ValueError, match=f"--sentence-special-tokens: {kind} adds no tokens around a text"):
            tokenizers[kind][0].tokenize_sentences(["a"], True)


@pytest.mark.parametrize("lower_case", [True, False])
def test_a_trained_word_piece_vocabulary_is_berts(tmp_path, lower_case):
    path, text = str(tmp_path / "vocab.txt"), ["The quick fox jumps over the lazy Dog", "é 中"] * 9
    size = train_wordpiece(text, 90, path, lower_case=lower_case, asked_by="a test")
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    assert len(lines) == size <= 90 and lines[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert ("T" in lines) != lower_case and ("##e" in lines)
    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    tokenizer = build_tokenizer(flags(kind, vocab_file=path))
    ids = tokenizer.tokenize("The fox")
    assert tokenizer.detokenize(ids) == ("the fox" if lower_case else "The fox")
    with pytest.raises(ValueError, match="at least 64"):
        train_wordpiece(text, 63, path, asked_by="a test")


def test_sentence_piece_layouts(tokenizers):
    plain, t5 = tokenizers["GPTSentencePieceTokenizer"][0], tokenizers["SentencePieceTokenizer"][0]
    assert plain.eod == plain.eos and tokenizers["Llama2Tokenizer"][0].tokenize(SAMPLE) == plain.tokenize(SAMPLE)
    size = plain.vocab_size
    assert [t5.cls, t5.sep, t5.eod, t5.mask] == [size, size + 1, size + 2, size + 3]
    assert len(t5.additional_special_tokens_ids) == 5
    ids = t5.tokenize("the <extra_id_1> fox")
    assert t5.additional_special_tokens_ids[1] in ids


def test_tik_tokenizer_puts_special_tokens_first(tokenizers):
    tokenizer = tokenizers["TikTokenizer"][0]
    assert (tokenizer.eod, tokenizer.bos, tokenizer.vocab_size) == (2, 1, 1260)
    assert tokenizer.tokenize("the</s>") == [1257, 2]
    assert tokenizer.detokenize(tokenizer.tokenize(SAMPLE)) == SAMPLE


def test_gpt2_files_equal_the_same_tokenizer_json(tokenizers):
    one, other = tokenizers["HuggingFaceTokenizer"][0], tokenizers["GPT2BPETokenizer"][0]
    assert one.is_fast and other.is_fast
    assert one.tokenize(SAMPLE) == other.tokenize(SAMPLE)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"eos_token": "</s>", "bos_token": "<s>"}, "</s>"),
        ({"eos_token": {"content": "</s>"}}, "</s>"),
        ({}, "<|endoftext|>"),
    ],
)
def test_end_of_document_comes_from_the_neighbouring_files(tmp_path, content, expected):
    byte_level_bpe(tmp_path / "tokenizer.json", special=("<|endoftext|>", "<s>", "</s>"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    tokenizer = build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    assert tokenizer.inv_vocab[tokenizer.eod] == expected
    assert tokenizer.inv_vocab[tokenizer.bos] == "<s>"


def test_special_tokens_can_be_added(tmp_path):
    path = byte_level_bpe(tmp_path / "tokenizer.json", special=("<unk>",))
    tokenizer = build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=path, tokenizer_special_tokens=["<eod>"]))
    assert tokenizer.eod == tokenizer.vocab_size - 1 and tokenizer.tokenize("a<eod>")[-1] == tokenizer.eod


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def make_folder(path, **files):
    path.mkdir()
    for name, content in files.items():
        write(path / name.replace("__", "."), content)
    return str(path)


BROKEN = {
    "hub name": (lambda t: flags("HuggingFaceTokenizer", tokenizer_model="meta-llama/Llama-3-8B"), "not downloaded"),
    "no path": (lambda t: flags("HuggingFaceTokenizer"), "needs --tokenizer-model"),
    "empty folder": (
        lambda t: flags("HuggingFaceTokenizer", tokenizer_model=make_folder(t / "f")),
        "no tokenizer.json",
    ),
    "not json": (lambda t: flags("HuggingFaceTokenizer", tokenizer_model=write(t / "a", "hello")), "not a JSON file"),
    "a list": (lambda t: flags("HuggingFaceTokenizer", tokenizer_model=write(t / "a", [1])), "JSON list"),
    "other json": (
        lambda t: flags("HuggingFaceTokenizer", tokenizer_model=write(t / "a", {"x": 1})),
        "cannot|not a tokenizer",
    ),
    "no end": (
        lambda t: flags("HuggingFaceTokenizer", tokenizer_model=byte_level_bpe(t / "a.json", special=("<x>",))),
        "no end-of-document token",
    ),
    "shared id": (
        lambda t: flags(
            "HuggingFaceTokenizer",
            tokenizer_model=byte_level_bpe(t / "a.json", edit=lambda d: d["model"]["vocab"].update({"zzz": 300})),
        ),
        "share the id 300",
    ),
    "added id": (
        lambda t: flags(
            "HuggingFaceTokenizer",
            tokenizer_model=byte_level_bpe(t / "a.json", edit=lambda d: d["added_tokens"][0].update(id=77)),
        ),
        "claims id 77",
    ),
    "own code": (
        lambda t: flags(
            "HuggingFaceTokenizer",
            tokenizer_model=make_folder(
                t / "f", tokenizer__json={}, tokenizer_config__json={"auto_map": {"AutoTokenizer": ["x.Y", None]}}
            ),
        ),
        "never run",
    ),
    "no merges": (lambda t: flags("GPT2BPETokenizer", vocab_file=gpt2_files(t)[0]), "needs --merge-file"),
    "merges are vocab": (
        lambda t: flags("GPT2BPETokenizer", vocab_file=gpt2_files(t)[0], merge_file=write(t / "m", "a b c\n")),
        "not two tokens",
    ),
    "vocab is text": (
        lambda t: flags("GPT2BPETokenizer", vocab_file=bert_vocab(t / "v"), merge_file=gpt2_files(t)[1]),
        "not a JSON file",
    ),
    "spm is text": (
        lambda t: flags("Llama2Tokenizer", tokenizer_model=bert_vocab(t / "v")),
        "not a SentencePiece model",
    ),
    "spm is empty": (
        lambda t: flags("Llama2Tokenizer", tokenizer_model=write(t / "v", "")),
        "not a SentencePiece model",
    ),
    "spm without end": (
        lambda t: flags("GPTSentencePieceTokenizer", tokenizer_model=sentence_piece_model(t / "m", eos_id=-1)),
        "no end-of-sequence piece",
    ),
    "spm folder": (lambda t: flags("Llama2Tokenizer", tokenizer_model=str(t)), "is a folder"),
    "bert twice": (lambda t: flags("BertWordPieceCase", vocab_file=write(t / "v", "[PAD]\na\na\n")), "'a' twice"),
    "bert lacks": (lambda t: flags("BertWordPieceCase", vocab_file=write(t / "v", "[PAD]\na\n")), r"lacks \[CLS\]"),
    "bert missing": (lambda t: flags("BertWordPieceCase", vocab_file=str(t / "none")), "cannot be read"),
    "tik object": (lambda t: flags("TikTokenizer", tokenizer_model=write(t / "v", {"a": 1})), "not a list"),
    "tik bytes": (
        lambda t: flags(
            "TikTokenizer", tokenizer_model=write(t / "v", [{"rank": 0, "token_bytes": "YQ==", "token_str": "a"}])
        ),
        "not the byte 0",
    ),
    "tik size": (
        lambda t: flags("TikTokenizer", tokenizer_model=tiktoken_json(t / "v"), vocab_size=4000),
        "use --vocab-size 1260",
    ),
    "tik specials": (
        lambda t: flags("TikTokenizer", tokenizer_model=tiktoken_json(t / "v"), tokenizer_special_tokens=["<s>"]),
        "missing: <unk>",
    ),
    "sentinels": (
        lambda t: flags("TikTokenizer", tokenizer_model=tiktoken_json(t / "v"), vocab_extra_ids=3),
        "--vocab-extra-ids 3: --tokenizer-type TikTokenizer does not support sentinels",
    ),
    "null size": (lambda t: flags("NullTokenizer"), "needs --vocab-size"),
    "not yet": (lambda t: flags("MultimodalTokenizer"), "not available yet"),
    "unknown": (lambda t: flags("YTTMTokenizer"), "unknown; choose one of"),
    "none": (lambda t: flags(None), "not set"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_rejected_with_the_reason(tmp_path, case):
    make, reason = BROKEN[case]
    cfg = make(tmp_path)
    with pytest.raises(ValueError, match=reason):
        build_tokenizer(cfg)


def test_lone_surrogates_are_rejected(tokenizers):
    for kind in KINDS:
        if kind != "NullTokenizer":
            with pytest.raises((ValueError, UnicodeEncodeError)):
                tokenizers[kind][0].tokenize("a\ud800b")


def test_a_name_too_long_for_a_file_is_no_file():
    with pytest.raises(ValueError, match="no such file or folder"):
        build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model="x" * 5000))


def test_a_missing_library_names_the_flag_and_the_fix():
    with pytest.raises(ValueError, match=r"--tokenizer-type X needs the package 'no_such_library'.*pip install"):
        require("no_such_library", "--tokenizer-type X")


def test_a_tiktoken_file_has_the_ids_of_the_same_ranks_in_json(tmp_path):
    """Its bytes need not come in order."""
    rows = json.loads(Path(tiktoken_json(tmp_path / "t.json")).read_text())
    lines = [f"{row['token_bytes']} {row['rank']}\n" for row in rows]
    (tmp_path / "t.tiktoken").write_text("".join(lines))
    ids = [MegatronTokenizer.from_pretrained(str(file)).tokenize("in the end") for file in tmp_path.iterdir()]
    assert len(ids) == 2 and ids[0] == ids[1]
    swapped = [f"{rows[1 - i]['token_bytes']} {i}\n" for i in (0, 1)]
    (tmp_path / "t.tiktoken").write_text("".join(swapped + lines[2:]))
    tokenizer = build_tokenizer(flags("TikTokenizer", tokenizer_model=str(tmp_path / "t.tiktoken")))
    assert tokenizer.tokenize("\0\1") == [1001, 1000]
    (tmp_path / "t.tiktoken").write_text("".join([*lines[:97], "YWE= 97\n", *lines[98:]]))
    with pytest.raises(ValueError, match="no token for the byte 97"):
        MegatronTokenizer.from_pretrained(str(tmp_path / "t.tiktoken"))


def test_transformers_loads_the_trained_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    train_byte_level_bpe(["the end of the beginning"] * 20, 300, str(tmp_path / "tokenizer.json"), asked_by="a test")
    local = MegatronTokenizer.from_pretrained(str(tmp_path))
    foreign = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert foreign("the beginning, ends")["input_ids"] == local.tokenize("the beginning, ends")
    assert foreign.eos_token_id == local.eod == 0 and len(foreign) == local.vocab_size


def test_from_pretrained_reads_megatron_lms_metadata(tmp_path):
    null = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=8)
    assert (null.tokenizer_type, null.vocab_size, null.eod) == ("NullTokenizer", 8, 7)
    (tmp_path / "metadata.json").write_text('{"library": "huggingface"}')
    path = str(byte_level_bpe(tmp_path / "tokenizer.json"))
    named = MegatronTokenizer.from_pretrained(path, metadata_path=str(tmp_path / "metadata.json"))
    assert named.tokenize("the") == MegatronTokenizer.from_pretrained(path).tokenize("the")
    for options, message in (
        ({}, "tokenizer_path: is required"),
        ({"metadata_path": str(tmp_path / "none.json")}, "metadata_path .*none.json: cannot be read"),
        ({"metadata_path": {"library": "byte-level"}}, "the library byte-level is not available here"),
        ({"metadata_path": {"library": "huggingface", "chat_template": "x"}}, "chat_template is not supported"),
    ):
        with pytest.raises(UserError, match=message):
            MegatronTokenizer.from_pretrained(**options)


def test_from_pretrained_tells_the_kind_from_the_files(tmp_path):
    byte_level_bpe(tmp_path / "tokenizer.json")
    assert MegatronTokenizer.from_pretrained(str(tmp_path)).tokenizer_type == "HuggingFaceTokenizer"
    assert MegatronTokenizer.from_pretrained(tiktoken_json(tmp_path / "t.json")).tokenizer_type == "TikTokenizer"
    assert MegatronTokenizer.from_pretrained(bert_vocab(tmp_path / "v.txt")).tokenizer_type == "BertWordPieceLowerCase"
    assert (
        "SentencePiece" in MegatronTokenizer.from_pretrained(sentence_piece_model(tmp_path / "s.model")).tokenizer_type
    )
    other = tmp_path / "gpt2"
    other.mkdir()
    gpt2_files(other)
    assert MegatronTokenizer.from_pretrained(str(other)).tokenizer_type == "GPT2BPETokenizer"
    with pytest.raises(ValueError, match="not downloaded"):
        MegatronTokenizer.from_pretrained("gpt2-medium")


def test_importing_needs_no_torch_and_no_tokenizer_library():
    code = (
        "import sys, megatron.core.tokenizers, megatron.core.datasets.preprocessing.pipeline\n"
        "heavy = {'torch', 'tokenizers', 'tiktoken', 'sentencepiece', 'pyarrow', 'nltk', 'transformers'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
