"""Characters whose bytes are tokens, by tokenizers of LLaMA's kind: streams equal complete answers and have no half."""

import json

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron.core.tokenizers import build_tokenizer  # noqa: E402
from megatron.core.tokenizers.huggingface import build_huggingface  # noqa: E402
from megatron.training.trained_model import load_trained_model  # noqa: E402
from tests.test_utils.model_server import LENGTH, running_server  # noqa: E402
from tests.test_utils.scripted_model import write_scripted_model  # noqa: E402
from tests.test_utils.tiny_tokenizers import byte_fallback_bpe, flags, llama_model  # noqa: E402

TEXT = "😀é中 the"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{{ messages[0].content }}"


@pytest.fixture(scope="module", params=["sentencepiece", "tokenizer.json"])
def url(request, tmp_path_factory):
    """A server whose model writes TEXT, then the end token, after ``c``."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "sentencepiece":
        tokenizer = build_tokenizer(flags("Llama2Tokenizer", tokenizer_model=llama_model(folder / "llama")))
    else:
        tokenizer = build_huggingface(byte_fallback_bpe(folder, chat_template=TEMPLATE))
    ids = [index for index in tokenizer.tokenize("c" + TEXT) if index != tokenizer.bos]
    assert tokenizer.detokenize(ids) == "c" + TEXT and len(ids) > len(TEXT)
    write_scripted_model(folder, [*ids, tokenizer.eod], tokenizer.vocab_size, max_position_embeddings=LENGTH)
    byte_fallback_bpe(folder)  # the folder needs a tokenizer to be loaded
    model = load_trained_model(str(folder), None, "tools/generate.py").model
    with running_server(tokenizer, model=model) as (url, _):
        yield url


def bodies(url, path):
    """Requests with each option that reads the text."""
    options = [{}, {"n": 2}, {"stop": ["é"]}, {"stop": ["中", "the"]}, {"max_tokens": 3}, {"max_tokens": 5}]
    if path == COMPLETIONS:
        options += [{"echo": True}, {"echo": True, "logprobs": 2}, {"logprobs": 0, "stop": " "}]
    else:
        options += [{"logprobs": True, "top_logprobs": 1}]
    prompt = {"prompt": "c"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "c"}]}
    return [{"max_tokens": 40, "temperature": 0, **prompt, **option} for option in options]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_equal_complete_answers_and_have_no_half_characters(url, path):
    for body in bodies(url, path):
        full = httpx.post(url + path, json=body, timeout=30)
        if path == CHAT and full.status_code == 400:
            assert "no chat template" in full.text
            return
        lines = httpx.post(url + path, json={**body, "stream": True}, timeout=30).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
        for choice in full.json()["choices"]:
            local = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
            parts = [chunk["text"] if path == COMPLETIONS else chunk["delta"].get("content", "") for chunk in local]
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert "".join(parts) == text and local[-1]["finish_reason"] == choice["finish_reason"]
            stops = body.get("stop", [])
            complete = TEXT[: min((TEXT.find(stop) for stop in stops), default=len(TEXT))]
            if body["max_tokens"] == 40:
                assert text == ("c" if body.get("echo") else "") + complete
                assert "\ufffd" not in "".join(parts) and choice["finish_reason"] == "stop"
            else:  # the text ends within a character
                beginning = text.rstrip("\ufffd")
                assert choice["finish_reason"] == "length" and TEXT.startswith(beginning)
                assert bool(beginning) == (body["max_tokens"] > 3), "the first character has four bytes"
                assert not any("\ufffd" in part for part in parts[:-1])
