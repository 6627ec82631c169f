"""Bytes of single tokens add up to the text, for every kind of tokenizer, parts of characters included."""

import random

import pytest

from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.simple import ByteLevelTokenizer, NullTokenizer
from tests.test_utils.tiny_tokenizers import (
    TEXTS,
    byte_fallback_bpe,
    byte_level_bpe,
    flags,
    sentence_piece_model,
    tiktoken_json,
)

BUILDERS = {
    "bytes": lambda folder: ByteLevelTokenizer(),
    "bpe": lambda folder: build_tokenizer(
        flags("HuggingFaceTokenizer", tokenizer_model=byte_level_bpe(folder / "tokenizer.json"))
    ),
    "byte fallback": lambda folder: build_tokenizer(
        flags("HuggingFaceTokenizer", tokenizer_model=byte_fallback_bpe(folder))
    ),
    "sentencepiece": lambda folder: build_tokenizer(
        flags("GPTSentencePieceTokenizer", tokenizer_model=sentence_piece_model(folder / "m", byte_fallback=True,
                                                                                vocab_size=400))
    ),
    "tiktoken": lambda folder: build_tokenizer(
        flags("TikTokenizer", tokenizer_model=tiktoken_json(folder / "t.json"), tiktoken_num_special_tokens=10,
              vocab_size=270)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BUILDERS)
def test_bytes_of_tokens_add_up_to_the_text(kind, tmp_path):
    tokenizer, rng = BUILDERS[kind](tmp_path), random.Random(1)
    specials = tokenizer.all_special_ids
    parts = 0
    for _ in range(30):
        text = "the cat " + "".join(rng.choice(" abñé中😀👩\u200d\n\ufffd") for _ in range(12)) + "x"
        if kind == "sentencepiece":
            text = " ".join(text.replace("\ufffd", "").split())  # its normalizer changes these
        ids = [token for token in tokenizer.tokenize(text) if token not in specials]
        pieces = [tokenizer.token_bytes(token) for token in ids]
        before = b" " if kind in ("byte fallback", "sentencepiece") else b""
        assert b"".join(pieces) == before + text.encode()
        parts += sum(b"\xef\xbf\xbd" not in x and "\ufffd" in x.decode(errors="replace") for x in pieces)
    assert parts > 20 or kind == "sentencepiece" and parts


def test_special_tokens_are_their_names(tmp_path):
    tokenizer = BUILDERS["byte fallback"](tmp_path)
    assert tokenizer.all_special_ids == {0, 1, 2}
    assert [tokenizer.token_bytes(index) for index in (1, 2)] == [b"<s>", b"</s>"]
    assert NullTokenizer(50).token_bytes(17) == b" 17" and NullTokenizer(50).all_special_ids == {49}


def test_trained_merges_of_partial_characters_are_bytes(tmp_path):
    path = byte_level_bpe(tmp_path / "tokenizer.json", 600)
    tokenizer = build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=path))
    text = "".join(TEXTS[:4])
    assert b"".join(map(tokenizer.token_bytes, tokenizer.tokenize(text))) == text.encode()
