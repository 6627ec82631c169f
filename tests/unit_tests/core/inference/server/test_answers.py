"""Values of answers: bytes and offsets of tokens, for byte-level and byte-fallback tokenizers, in every mode."""

import json
import random
from itertools import pairwise

import pytest

from megatron.core.inference.requests import Request, TokenScore
from megatron.core.inference.server.answers import Answer
from megatron.core.inference.server.protocol import Job, Model
from megatron.core.inference.server.service import Event
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.tiny_tokenizers import byte_fallback_bpe, byte_level_bpe


def build(kind, folder):
    if kind == "byte level":
        byte_level_bpe(folder / "tokenizer.json", 260)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
        return build_huggingface(str(folder))
    return build_huggingface(byte_fallback_bpe(folder))


def answers(tokenizer, prompt, written, stop_token=None, streamed=False, **options):
    """The chunks (or the full answer) for a prompt (text or ids) after which ``written`` tokens are sampled."""
    ids = tokenizer.tokenize(prompt) if isinstance(prompt, str) else prompt
    text = prompt if isinstance(prompt, str) else tokenizer.detokenize(prompt)
    job = Job([ids], [text], Request(prompt=()), logprobs=True, **options)
    answer = Answer(job, Model("tiny", tokenizer, 96, 8))
    [choice] = answer.choices
    scores = [TokenScore(token, -1.0 - n, ((token, -1.0 - n), (5, -9.0))) for n, token in enumerate(written)]
    prompt_scores = [None, *(TokenScore(token, -0.5) for token in ids[1:])]
    chunks, full = [], ""
    for index, (token, score) in enumerate(zip(written, scores)):
        if choice.finish_reason is not None:
            break
        is_last = index == len(written) - 1
        reason = None if not is_last else "length" if stop_token is None else "stop"
        piece = choice.advance(Event(None if is_last and stop_token else token, score, prompt_scores, reason))
        full += piece
        if streamed and (piece or choice.finish_reason):
            chunks.append(answer.chunk(choice, piece)["choices"][0])
    return chunks if streamed else json.loads(answer.full([answer.encode(choice, full)]))["choices"][0]


def joined(chunks):
    """The logprobs of streamed chunks, as in a full answer."""
    keys = chunks[0]["logprobs"]
    return {key: [x for chunk in chunks for x in chunk["logprobs"][key] or ()] for key in keys}


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_bytes_of_partial_characters_are_those_of_the_token(kind, tmp_path):
    tokenizer = build(kind, tmp_path)
    written = [x for x in tokenizer.tokenize("😀c") if x not in tokenizer.all_special_ids]
    written = written[kind != "byte level" :]  # without the space before the text
    choice = answers(tokenizer, "a", written, is_chat=True)
    assert choice["message"]["content"] == "😀c"
    content = choice["logprobs"]["content"]
    assert [x["bytes"] for x in content] == [[240], [159], [152], [128], [99]]
    assert [x["token"] for x in content] == ["\\xf0", "\\x9f", "\\x98", "\\x80", "c"]
    assert [x["top_logprobs"][0]["bytes"] for x in content] == [x["bytes"] for x in content]
    chunks = answers(tokenizer, "a", written, is_chat=True, streamed=True)
    assert [x["delta"].get("content", "") for x in chunks] == ["😀", "c"]
    assert [len(x["logprobs"]["content"]) for x in chunks] == [4, 1]
    assert [x for chunk in chunks for x in chunk["logprobs"]["content"]] == content


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_offsets_count_characters_of_prompt_and_text(kind, tmp_path):
    tokenizer = build(kind, tmp_path)
    written = [x for x in tokenizer.tokenize("😀c") if x not in tokenizer.all_special_ids][kind != "byte level" :]
    logprobs = answers(tokenizer, "ab", written)["logprobs"]
    assert logprobs["text_offset"] == [2, 2, 2, 2, 3]
    assert logprobs["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "c"]
    echoed = answers(tokenizer, "ab", written, echo=True)
    assert echoed["text"] == "ab😀c"
    # BOS and the space that the tokenizer puts before the text have no characters in it
    before = [0, 0] if kind == "byte fallback" else []
    assert echoed["logprobs"]["text_offset"] == [*before, 0, 1, 2, 2, 2, 2, 3]
    assert echoed["logprobs"]["token_logprobs"][0] is None and echoed["logprobs"]["top_logprobs"][0] is None


def expected_offsets(tokenizer, prompt_text, written):
    """By definition: complete characters of the bytes before each token; invalid bytes are one character each
    maximal part, as ``bytes.decode`` counts."""
    raw = b""
    offsets = []
    for token in written:
        text = raw.decode(errors="replace")
        tail = next((n for n in (3, 2, 1) if len(raw) >= n and is_beginning(raw[-n:])), 0)
        offsets.append(len(prompt_text) + (len(raw[:-tail].decode(errors="replace")) if tail else len(text)))
        raw += tokenizer.token_bytes(token)
    return offsets


def is_beginning(raw):
    """Whether ``raw`` is a proper beginning of a UTF-8 character."""
    try:
        raw.decode()
        return False
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0


def test_offsets_of_random_tokens_agree_with_the_bytes_and_streams(tmp_path):
    tokenizer, rng = build("byte level", tmp_path), random.Random(3)
    alphabet = [tokenizer.tokenize(x) for x in ("a", "é", "中", "😀", " ", "\n")]
    for number in range(60):
        written = [token for _ in range(6) for token in rng.choice(alphabet)]
        if number % 3 == 0:
            rng.shuffle(written)  # invalid bytes
        prompt = rng.choice(["x", "naïve 中", ""])
        options = {"echo": rng.random() < 0.5, "stop_token": rng.choice((None, True))}
        full = answers(tokenizer, prompt, written, **options)
        chunks = answers(tokenizer, prompt, written, streamed=True, **options)
        assert joined(chunks) == full["logprobs"] and "".join(x["text"] for x in chunks) == full["text"]
        offsets = full["logprobs"]["text_offset"][-len(written) :]
        expected = expected_offsets(tokenizer, prompt, written)
        if options["stop_token"]:  # it follows the text and an incomplete character at its end
            raw = b"".join(map(tokenizer.token_bytes, written[:-1]))
            expected[-1] = len(prompt) + len(raw.decode(errors="replace"))
        assert offsets == expected
        if number % 3 and not options["stop_token"]:
            text = prompt + full["text"][len(prompt) if options["echo"] else 0 :]
            for token, (start, end) in zip(written, pairwise([*offsets, len(text)])):
                piece = tokenizer.token_bytes(token)
                if not is_beginning(piece) and piece[0] < 0x80:
                    assert text[start:end].encode() == piece


def test_offsets_do_not_pass_the_end_before_a_stop_string(tmp_path):
    tokenizer = build("byte level", tmp_path)
    written = tokenizer.tokenize("hello END more")
    assert len(written) > 6
    full = answers(tokenizer, "ab", written, stops=["END"])
    assert (full["text"], full["finish_reason"]) == ("hello ", "stop")
    end = len("ab" + "hello ")
    offsets = full["logprobs"]["text_offset"]
    assert max(offsets) == end and offsets == sorted(offsets)
    chunks = answers(tokenizer, "ab", written, stops=["END"], streamed=True)
    assert joined(chunks) == full["logprobs"] and "".join(x["text"] for x in chunks) == "hello "


def test_a_prompt_of_ids_has_the_offsets_of_its_text(tmp_path):
    tokenizer = build("byte fallback", tmp_path)
    ids = tokenizer.tokenize("the cat 😀")
    text = tokenizer.detokenize(ids)
    assert text.startswith("<s>")
    echoed = answers(tokenizer, ids, [tokenizer.vocab["a"]], echo=True)
    offsets = echoed["logprobs"]["text_offset"]
    assert echoed["text"] == text + "a" and offsets[:2] == [0, 3] and offsets[-2:] == [len(text) - 1, len(text)]


def test_likeliest_tokens_are_before_the_sampled_one(tmp_path):
    tokenizer = build("byte level", tmp_path)
    job = Job([[40]], ["I"], Request(prompt=()), logprobs=True)
    [choice] = Answer(job, Model("tiny", tokenizer, 96, 8)).choices
    choice.advance(Event(41, TokenScore(41, -3.0, ((42, -1.0), (43, -2.0))), [None], "length"))
    [likeliest] = choice.logprobs()["top_logprobs"]
    assert [*likeliest.values()] == [-1.0, -2.0, -3.0]


def test_log_probabilities_of_megatrons_answer_are_those_of_its_tokens(tmp_path):
    """The sampled stop token has a score, but is not in the answer."""
    tokenizer = build("byte level", tmp_path)
    answer = Answer(Job([[40, 41]], ["IJ"], Request(prompt=()), echo=True, logprobs=True), Model("x", tokenizer, 96, 8))
    [choice] = answer.choices
    choice.advance(Event(42, TokenScore(42, -1.0), [None, TokenScore(41, -0.5)], None))
    choice.advance(Event(None, TokenScore(tokenizer.eod, -2.0), (), "stop"))
    result = answer.megatron(["IJK"])
    assert result["logprobs"] == [[-0.5, -1.0]] and len(result["segments"][0]) == 3
