"""The comparison of token ids with AutoTokenizer on random folders: its verdict, the part it names, and its remedy."""

import json
import random

import pytest

from megatron.core.tokenizers.huggingface import build_huggingface
from megatron.tools.checkpoint.compare_ids import PARTS, compare_ids
from tests.test_utils.scripted_model import byte_tokenizer
from tests.test_utils.tiny_tokenizers import byte_fallback_bpe, byte_level_bpe

transformers = pytest.importorskip("transformers")
WORDS = ["the", " cat", "12", "  3", " ", "  ", "\n", "'s", "é", "中", "😀", "i\u0308", "ﬁ", ".", "<s>", "</s>", "A"]
BYTES = ["GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "RobertaTokenizer", "CohereTokenizer"]
BYTES += ["PreTrainedTokenizerFast"] * 3
BYTE_FALLBACK = ["LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "PreTrainedTokenizerFast"]


def write_folder(rng, folder):
    """A tokenizer of a random class with random parts."""
    from tokenizers import Regex, pre_tokenizers

    config = {"add_prefix_space": rng.random() < 0.5} if rng.random() < 0.5 else {}
    config |= {"bos_token": "<s>", "eos_token": "</s>"}
    if rng.random() < 0.3:
        return byte_fallback_bpe(folder, tokenizer_class=rng.choice(BYTE_FALLBACK), **config)
    config |= {"tokenizer_class": rng.choice(BYTES)}
    if rng.random() < 0.4:
        return byte_tokenizer(folder, post=rng.choice((None, "<s> $A", "$A </s>")), **config)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    pieces = [pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.3, use_regex=rng.random() < 0.8)]
    if rng.random() < 0.5:
        pieces.insert(0, rng.choice((pre_tokenizers.Digits(True), pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated"))))
    return byte_level_bpe(folder / "tokenizer.json", 500, pre_tokenizers.Sequence(pieces), special=("<s>", "</s>"))


def ids_are_equal(folder, texts):
    foreign, local = transformers.AutoTokenizer.from_pretrained(folder), build_huggingface(str(folder))
    return all(
        local.tokenize(text) == foreign.encode(text)
        and local.tokenize_chat(text) == foreign.encode(text, add_special_tokens=False)
        for text in texts
    )


def test_ids_that_differ_from_autotokenizer_are_reported_with_a_remedy(tmp_path):
    rng, named = random.Random(2), {True: [], False: []}
    texts = ["".join(rng.choices(WORDS, k=rng.randrange(12))) for _ in range(60)]
    for number in range(40):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_folder(rng, folder)
        line = compare_ids(str(folder))
        is_equal = line == f"token ids against transformers {transformers.__version__}: equal"
        assert is_equal == ids_are_equal(folder, texts), line
        named[is_equal].append(line)
        if not is_equal:
            assert "DIFFERENT" in line and any(f"{part} of tokenizer.json" in line for part in PARTS), line
            path = folder / "tokenizer_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
            assert ids_are_equal(folder, texts), line
    assert min(map(len, named.values())) > 10


@pytest.mark.parametrize(("kind", "config", "parts"), [
    ("RobertaTokenizer", {}, "post_processor"),  # differs only in the tokens around a text
    ("GPT2Tokenizer", {"add_prefix_space": True}, "pre_tokenizer"), ("GPT2Tokenizer", {}, ""),
])  # fmt: skip
def test_the_replaced_parts_are_named(tmp_path, kind, config, parts):
    byte_tokenizer(tmp_path, post="<s> $A", specials=("<s>", "</s>", "<unk>", "<pad>"), tokenizer_class=kind, **config)
    line = compare_ids(str(tmp_path))
    assert line.endswith("equal") if not parts else f"its {kind} replaces {parts} of tokenizer.json" in line, line


def test_folders_that_cannot_be_compared_are_no_error(tmp_path):
    assert compare_ids(str(tmp_path)) == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "not compared (UserError: " in compare_ids(str(tmp_path))
