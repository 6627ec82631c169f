"""Text of a stream of tokens equals the text of all of them, without half characters and stop strings."""

import random

import pytest

from megatron.core.inference.text import TextStream
from megatron.core.tokenizers.simple import ByteLevelTokenizer, NullTokenizer
from tests.test_utils.tiny_tokenizers import (
    TEXTS,
    byte_fallback_bpe,
    byte_level_bpe,
    flags,
    llama_model,
    sentence_piece_model,
)

BYTES = ByteLevelTokenizer()


def pieces(tokenizer, ids, prompt=(), stops=()):
    stream = TextStream(tokenizer, prompt, stops)
    return [*(stream.push(token) for token in ids), stream.finish()], stream


@pytest.fixture(scope="module", params=["bytes", "bpe", "fallback", "sentencepiece", "llama", "null"])
def tokenizer(request, tmp_path_factory):
    from megatron.core.tokenizers import build_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    return {
        "bytes": lambda: BYTES,
        "bpe": lambda: build_tokenizer(
            flags("HuggingFaceTokenizer", tokenizer_model=byte_level_bpe(folder / "tokenizer.json"))
        ),
        "fallback": lambda: build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=byte_fallback_bpe(folder))),
        "sentencepiece": lambda: build_tokenizer(
            flags("GPTSentencePieceTokenizer", tokenizer_model=sentence_piece_model(folder / "m"))
        ),
        "llama": lambda: build_tokenizer(flags("Llama2Tokenizer", tokenizer_model=llama_model(folder / "llama"))),
        "null": lambda: NullTokenizer(100),
    }[request.param]()


def test_pieces_add_up_to_the_text_after_any_prompt(tokenizer):
    text = " ".join(map(str, range(40))) if isinstance(tokenizer, NullTokenizer) else "".join(TEXTS[:4])
    ids = tokenizer.tokenize(text)
    full = tokenizer.detokenize(ids)
    for cut in range(0, min(len(ids), 120), 7):
        before = tokenizer.detokenize(ids[:cut])
        if "\ufffd" not in before[-1:]:
            results, _ = pieces(tokenizer, ids[cut:], ids[:cut])
            assert before + "".join(results) == full
            assert not any("\ufffd" in piece for piece in results)


def test_random_bytes_are_passed_on_soon_and_decoded_once():
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.choice((0x41, 0x80, 0xC3, 0xA9, 0xE4, 0xB8, 0xAD, 0xF0)) for _ in range(30)]
        result, _ = pieces(BYTES, ids)
        assert "".join(result) == bytes(ids).decode(errors="replace")
        assert len("".join(result[:-1])) >= len("".join(result)) - 3


@pytest.mark.parametrize("stops", [("lo w",), ("xyz", "o"), ("lo wx", "world"), ("hello world",), ("h",), ("dé",)])
def test_text_ends_before_the_first_stop_string_of_any_split(stops):
    text = "hello worldé and more"
    result, stream = pieces(BYTES, text.encode(), stops=stops)
    ends = [text.find(stop) for stop in stops if stop in text]
    assert "".join(result) == text[: min(ends)] and stream.stopped


def test_a_beginning_of_a_stop_string_is_held_back_and_released():
    result, stream = pieces(BYTES, b"ab--c--", stops=("--->",))
    assert result == ["a", "b", "", "", "--c", "", "", "--"] and not stream.stopped


def test_text_ends_at_the_first_of_two_stop_strings_in_one_piece(tmp_path):
    result, stream = pieces(NullTokenizer(1000), [17, 952, 3], stops=("5", "9"))
    assert "".join(result) == "17 " and stream.stopped
    result, stream = pieces(BYTES, "x\u00e9y".encode(), stops=("y", "\u00e9y"))  # one begins before the piece
    assert "".join(result) == "x" and stream.stopped
    result, stream = pieces(BYTES, b"xyz\xf0", stops=("z\ufffd", "yz\ufffd"))  # the end completes the character
    assert result == ["x", "", "", "", ""] and stream.stopped and stream.num_released == 1


@pytest.mark.parametrize("text", ["a😀😀b", "中😀é", "😀", "é中 é"])
def test_characters_of_byte_fallback_are_passed_on_at_once(text, tmp_path):
    from megatron.core.tokenizers.huggingface import build_huggingface

    tokenizer = build_huggingface(byte_fallback_bpe(tmp_path))
    ids = [token for token in tokenizer.tokenize(text) if token != tokenizer.bos]
    prompt = tokenizer.tokenize("the")
    results, _ = pieces(tokenizer, ids, prompt)
    assert "".join(results) == " " + text and not any("\ufffd" in piece for piece in results)
    # every character comes with the token that completes it
    assert [piece for piece in results if piece] == list(" " + text)


@pytest.mark.parametrize("end", ["😀", "中", "é", "the"])
def test_a_space_after_the_last_character_of_a_prompt_is_kept(end, tmp_path):
    """A character has up to four tokens of one byte, and the context needs all of them."""
    from megatron.core.tokenizers.huggingface import build_huggingface

    tokenizer = build_huggingface(byte_fallback_bpe(tmp_path))
    prompt, ids = tokenizer.tokenize("a" + end), tokenizer.tokenize(f"a{end} cat")
    assert ids[: len(prompt)] == prompt
    result, _ = pieces(tokenizer, ids[len(prompt) :], prompt)
    assert "".join(result) == " cat"


def test_random_texts_of_bytes_and_pieces_stream_as_they_are_decoded(tmp_path):
    """Characters of up to 4 bytes whose bytes are tokens, after any prompt, with a space before the text."""
    from megatron.core.tokenizers import build_tokenizer

    tokenizer = build_tokenizer(flags("Llama2Tokenizer", tokenizer_model=llama_model(tmp_path / "llama")))
    rng, split = random.Random(6), 0
    for number in range(300):
        words = [rng.choice(["the ", "c", "é", "中", "😀", "👩‍👩‍👧", " ", "\n"]) for _ in range(12)]
        ids = tokenizer.tokenize("".join(words))
        if number % 3 == 0:  # text of a model: any tokens, with invalid bytes
            ids = [rng.choice(ids) for _ in ids]
        cut = rng.randrange(len(ids))
        prompt, written = ids[:cut], ids[cut:]
        before, full = tokenizer.detokenize(prompt), tokenizer.detokenize(ids)
        if "\ufffd" in before[-1:]:
            split += 1
            continue
        results, _ = pieces(tokenizer, written, prompt)
        assert before + "".join(results) == full
        if "\ufffd" not in full:
            assert not any("\ufffd" in piece for piece in results)
            assert all(len(piece) <= 4 for piece in results), "characters are passed on when they are complete"
    assert 20 < split < 200


def test_streamed_text_is_a_prefix_of_the_decoded_bytes_of_random_stops(tmp_path):
    rng = random.Random(4)
    for _ in range(300):
        text = "".join(rng.choice("abé中😀") for _ in range(20))
        stops = ["".join(rng.choice("abé中😀") for _ in range(rng.choice((1, 2, 3)))) for _ in range(3)]
        actual, stream = pieces(BYTES, text.encode(), stops=stops)
        ends = [text.find(stop) for stop in stops if stop in text]
        expected = text[: min(ends)] if ends else text
        assert "".join(actual) == expected and stream.stopped == bool(ends) and stream.num_released == len(expected)
