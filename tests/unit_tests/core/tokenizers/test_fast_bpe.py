"""The tiktoken path gives the ids of `tokenizers`, on everything, or is not taken."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from megatron.core.tokenizers import fast_bpe
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.tiny_tokenizers import TEXTS, byte_level_bpe

PATTERNS = {"gpt2": fast_bpe._GPT2, "llama3": fast_bpe._LLAMA3, "qwen2": fast_bpe._QWEN2}
BITS = [
    "'s",
    "'LL",
    "'",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u2003",
    "the",
    "Fox",
    "12",
    "3456789",
    "½",
    "é",
    "e\u0301",
    "中文",
    "👩‍👩‍👧",
    "<|endoftext|>",
    "<|endof",
    "!!!",
    "...",
    "a" * 40,
    "\u017f",
    "\u0000",
    "_x",
    "\u0130",
    "=",
    "\x1c",
]
TEXT = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(BITS), max_size=25).map("".join))


def split_by(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def list_all_merges(definition):
    """Return merges in the order of tiktoken converters: every split of every token, by token; whole pieces first."""
    model = definition["model"]
    vocab, expected_names = model["vocab"], set(model["vocab"])
    tokens = sorted((token for token in vocab if len(token) > 1 and token != "<|endoftext|>"), key=vocab.get)
    model["merges"] = [
        [t[:i], t[i:]] for t in tokens for i in range(1, len(t)) if t[:i] in expected_names and t[i:] in expected_names
    ]
    model["ignore_merges"] = True


def permute_ids(definition):
    """Ids that do not rise with the merge ranks."""
    vocab = definition["model"]["vocab"]
    names = [name for name in vocab if name != "<|endoftext|>"]
    for name, index in zip(names, np.random.default_rng(0).permutation([vocab[name] for name in names])):
        vocab[name] = int(index)


@pytest.fixture(scope="module", params=["gpt2", "llama3", "qwen2", "nfc", "every split", "permuted", "many specials"])
def pair(request, tmp_path_factory):
    """A tokenizer with the fast path, and plain `tokenizers` from the same file."""
    options = {
        "gpt2": {},
        "llama3": {"pre_tokenizer": split_by(PATTERNS["llama3"])},
        "qwen2": {"pre_tokenizer": split_by(PATTERNS["qwen2"])},
        "nfc": {"normalizer": normalizers.NFC()},
        "every split": {"pre_tokenizer": split_by(PATTERNS["llama3"]), "edit": list_all_merges},
        "permuted": {"edit": permute_ids},
        "many specials": {"special": ("<|endoftext|>", "the", "  ", "e\u0301")},
    }[request.param]
    path = byte_level_bpe(tmp_path_factory.mktemp("bpe") / "tokenizer.json", **options)
    tokenizer = build_huggingface(path)
    assert tokenizer.is_fast
    return tokenizer, Tokenizer.from_file(path)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=6))
def test_ids_equal_those_of_tokenizers(pair, texts):
    tokenizer, reference = pair
    for text, ids in zip(texts, tokenizer.tokenize_batch(texts)):
        assert ids.dtype == np.uint32 and ids.tolist() == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.tokenize(text) == ids.tolist()


def test_real_text_takes_the_fast_path(pair):
    tokenizer, _ = pair
    assert sum(tokenizer._fast.encode(text) is not None for text in TEXTS) >= len(TEXTS) / 2 or "the" in tokenizer.vocab


def test_text_with_an_added_token_is_left_to_tokenizers(pair):
    tokenizer, _ = pair
    assert tokenizer._fast.encode("a <|endoftext|> b") is None
    assert tokenizer.eod in tokenizer.tokenize("a <|endoftext|> b")


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
        lambda d: d["model"].update(dropout=0.1),
        lambda d: d["model"]["merges"].append(d["model"]["merges"][0]),
        lambda d: d["model"]["vocab"].pop("Ā") and None,
        lambda d: d.update(normalizer={"type": "Lowercase"}),
        lambda d: d.update(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, d["pre_tokenizer"]],
            }
        ),
    ],
    ids=["prefix space", "dropout", "merge twice", "byte missing", "lower case", "digits"],
)
def test_fast_bpe_declines_definitions_without_proven_equality(tmp_path, edit):
    assert not build_huggingface(byte_level_bpe(tmp_path / "tokenizer.json", edit=edit)).is_fast


def test_tokens_that_merges_never_reach_do_not_appear(tmp_path):
    def add_orphans(definition):
        vocab = definition["model"]["vocab"]
        for name in ("abcd", "foxjumps", "zz"):
            vocab.setdefault(name, len(vocab))

    path = byte_level_bpe(tmp_path / "tokenizer.json", edit=add_orphans)
    tokenizer, reference = build_huggingface(path), Tokenizer.from_file(path)
    assert tokenizer.is_fast
    for text in ("abcd", "xabcdz foxjumps zz zzz", "foxjumps"):
        assert tokenizer.tokenize(text) == reference.encode(text).ids


def test_lookup_of_a_half_merged_token_as_a_full_piece_is_rejected(tmp_path):
    def orphan(definition):
        list_all_merges(definition)
        model = definition["model"]
        model["vocab"]["qz"] = len(model["vocab"])  # two bytes without a merge: a token as a word, not inside one

    path = byte_level_bpe(tmp_path / "tokenizer.json", pre_tokenizer=split_by(PATTERNS["llama3"]), edit=orphan)
    tokenizer, reference = build_huggingface(path), Tokenizer.from_file(path)
    assert not tokenizer.is_fast
    assert tokenizer.tokenize("qz aqzb") == reference.encode("qz aqzb").ids


def test_both_engines_class_every_character_equally():
    """All assigned planes, the classes the patterns use: libraries on different Unicode tables would show here."""
    import tiktoken._tiktoken as tiktoken

    points = [*range(0xD800), *range(0xE000, 0x33500), *range(0xE0000, 0xE0200)]
    characters = list(map(chr, points))
    for pattern in (r"\p{L}", r"\p{N}", r"\s"):
        core = tiktoken.CoreBPE({bytes([byte]): byte for byte in range(256)}, {"<|endoftext|>": 999}, pattern)
        splitter = pre_tokenizers.Split(Regex(pattern), "removed")
        fast = {c for c in characters if core.encode_ordinary(c)}
        text = "".join(characters)
        slow = set(text) - {c for piece, _ in splitter.pre_tokenize_str(text) for c in piece}
        assert fast == slow


def test_long_runs_do_not_break_it(tmp_path):
    path = byte_level_bpe(tmp_path / "tokenizer.json")
    tokenizer, reference = build_huggingface(path), Tokenizer.from_file(path)
    for text in (" " * 200_000 + "x", "\n" * 100_000, "a" * 100_000, "=" * 100_000):
        assert tokenizer.tokenize(text) == reference.encode(text).ids


def test_pre_and_post_tokens_of_the_template_are_kept(tmp_path):
    def add_template(definition):
        definition["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        }

    path = byte_level_bpe(tmp_path / "tokenizer.json", special=("<|endoftext|>", "<s>"), edit=add_template)
    reference = Tokenizer.from_file(path)
    tokenizer, bare = build_huggingface(path), build_huggingface(path, include_special_tokens=False)
    assert tokenizer.is_fast
    for text in ("", "the fox", "a<|endoftext|>b"):
        assert tokenizer.tokenize(text) == reference.encode(text).ids
        assert bare.tokenize(text) == reference.encode(text, add_special_tokens=False).ids
    assert json.loads(reference.to_str())["post_processor"]
