"""Byte-level BPE at tiktoken's speed, with the ids of `tokenizers`.

`tokenizers` merges a piece by the rank of each listed pair; tiktoken merges any two neighbours whose concatenation is a
token, by that token's rank, and looks a whole piece up first. The two agree on every input if each token is
*reachable*: encoding the token's own bytes with the merge list gives that one token. Proof: say neighbours x, y with
xy = t appear while a piece is merged. Nothing has crossed the edges of t's span so far, so the merges inside the span
are a prefix of the merges of t's bytes in isolation; there, the only state of two parts is the last one before t, the
pair that forms t. Hence (x, y) is that pair, both libraries see it, and both give it the same rank. Tokens that are not
reachable never appear, in either, unless ``ignore_merges`` looks whole pieces up; then a token is also safe if its
bytes without context end in three parts or more.

What cannot be shown equal is left to `tokenizers`: other pre-tokenizers or normalizers as a whole, and single texts
that contain an added token or are not in the form the normalizer makes. A self-test at load compares both on awkward
strings."""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.core.tokenizers import libraries

if TYPE_CHECKING:
    from tiktoken._tiktoken import CoreBPE
    from tokenizers import Tokenizer as HFTokenizer

logger = logging.getLogger(__name__)

_TAIL = r"\s+(?!\S)|\s+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_TAIL}"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_TAIL}"

# The same language, quicker in tiktoken's engine: what needs no look-ahead is one group, so that one pass of the linear
# matcher decides it (+35 to +60 %), and words come first. Letters, digits and other signs exclude each other as first
# characters, so only the contractions' place before the other signs matters. Where ``\s+(?!\S)`` fails, one blank is
# left.
FAST_PATTERNS = {
    _GPT2: r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)| ?[^\s\p{L}\p{N}]+| ?\p{N}+)|\s+(?!\S)|\s",
    _LLAMA3: _LLAMA3.replace(f"|{_TAIL}", r")|\s+(?!\S)|\s").replace(_CONTRACTION, f"(?:{_CONTRACTION}"),
    _QWEN2: _QWEN2.replace(f"|{_TAIL}", r")|\s+(?!\S)|\s").replace(_CONTRACTION, f"(?:{_CONTRACTION}"),
}

# Characters new in Unicode 12 to 17, letters, digits and marks: libraries built on different tables split these apart.
_TABLE_PROBES = [
    0x1E100, 0x1E140, 0x32FF, 0x10FB0, 0x11900, 0x11950, 0x30000, 0x12F90, 0x10570, 0x1DF00, 0xA7C0, 0x1E030, 0x11F02,
    0x11F50, 0x1E4D0, 0x1E4F0, 0x31350, 0x2EBF0, 0x105C0, 0x10D40, 0x10D4A, 0x16D70, 0x1C89, 0xA7CB, 0x1E5F1, 0x11DB0,
    0x11DE0, 0x16EA0, 0x10940, 0x323B0, 0xA7CE, 0x88F, 0xC5C, 0x85, 0x180E, 0x200B, 0x2028, 0x3000, 0x17F, 0x212A,
    0x130,
]  # fmt: skip

_SELF_TEST = [
    "", " ", "  ", "\n", " \n  \n\n x", "a  b   c \t d\r\n\r\n", "trailing   ", "\u00a0\u2003x\u3000 y\u200b",
    "it's I'LL we'Ve 'S''t", "1234567 12 3.14159e-10 ½ ٣٤٥ Ⅻ", "def f(x):\n    return x**2  # ok\n\n\n\tif x: pass",
    "naïve café Ελληνικά Русский 中文字符 हिन्दी", "👩‍👩‍👧‍👦🇫🇷 e\u0301 \u0000 \ufeff \ufffd \U0010ffff", "aaaaaaa" * 40,
    "=" * 300 + "\n" + " " * 300 + "x", "<|endoftext", "'ſ 'K ß\u017f", "\r\n \r\r \n\t\x0b\x0c\x1c\x85 end",
]  # fmt: skip


def character_bytes() -> dict[str, int]:
    """GPT-2's table of printable stand-ins: character to the byte it stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(unprintable)})
    return table


@dataclass(frozen=True)
class FastByteLevelBPE:
    """Encodes the texts for which equality with `tokenizers` is certain; ``encode`` gives None for the others."""

    core: CoreBPE
    id_of_rank: np.ndarray | None  # uint32; None where ranks are the ids
    added_token_starts: tuple[str, ...]
    added_tokens: re.Pattern[str] | None
    normal_form_c: bool

    def encode(self, text: str) -> np.ndarray | None:
        """Return the ids of ``text``, uint32. None if `tokenizers` must encode it: text that needs Unicode
        normalization, contains added tokens or lone surrogates, or makes tiktoken fail."""
        if self.normal_form_c and not (text.isascii() or unicodedata.is_normalized("NFC", text)):
            return None
        if (
            self.added_tokens
            and any(start in text for start in self.added_token_starts)
            and self.added_tokens.search(text)
        ):
            return None
        try:
            ranks = np.frombuffer(self.core.encode_to_tiktoken_buffer(text, _NOTHING_SPECIAL), dtype=np.uint32)
        except UnicodeEncodeError:
            return None
        except BaseException as error:
            # the regular-expression engine gives up on, e.g., a megabyte of blanks by a Rust panic
            if type(error).__name__ != "PanicException":
                raise
            return None
        return ranks if self.id_of_rank is None else self.id_of_rank[ranks]


_NOTHING_SPECIAL: frozenset[str] = frozenset()

Definition = Mapping[str, Any]
"""Parsed tokenizer.json, or a part of it."""


def build_fast_bpe(definition: Definition, hf_tokenizer: HFTokenizer) -> FastByteLevelBPE | None:
    """Return a fast encoder with the ids of ``hf_tokenizer``, or None, with the reason in the log: tiktoken is not
    installed, equality cannot be shown, or the self-test differs (a warning). Encodes every token of the vocabulary
    once.

    Args:
        definition: the parsed tokenizer.json.
        hf_tokenizer: the `tokenizers.Tokenizer` made from it."""
    if not libraries.is_installed("tiktoken"):
        logger.info("tiktoken is not installed: encoding with tokenizers (pip install tiktoken: about 6x faster)")
        return None
    pattern, why = _fast_pattern(definition)
    normal_form_c = False
    if pattern is not None:
        normalizers = _members(definition.get("normalizer"), "normalizers")
        normal_form_c = bool(normalizers)
        if any(step.get("type") != "NFC" for step in normalizers):
            pattern, why = None, "its normalizer changes text"
    if pattern is None:
        logger.info("encoding with tokenizers, not tiktoken: %s", why)
        return None
    ranked = _ranked_vocabulary(definition["model"], hf_tokenizer)
    if isinstance(ranked, str):
        logger.info("encoding with tokenizers, not tiktoken: %s", ranked)
        return None
    encoder, id_of_rank = ranked
    core_module = libraries.require("tiktoken._tiktoken", "--tokenizer-type")
    contents = [token["content"] for token in definition.get("added_tokens") or []]
    contents = sorted({form for content in contents for form in (content, unicodedata.normalize("NFC", content))})
    fast = FastByteLevelBPE(
        core=core_module.CoreBPE(encoder, {"<|endoftext|>": 2**31}, pattern),
        id_of_rank=id_of_rank,
        added_token_starts=tuple(sorted({content[:2] for content in contents})),
        added_tokens=re.compile("|".join(map(re.escape, contents))) if contents else None,
        normal_form_c=normal_form_c,
    )
    if not _same_character_tables(core_module) or not _same_ids(fast, hf_tokenizer):
        logger.warning("tiktoken and tokenizers disagree in the self-test: encoding with tokenizers (about 6x slower)")
        return None
    return fast


def _members(part: Definition | None, key: str) -> list[Definition]:
    if part is None:
        return []
    return list(part[key]) if part.get("type") == "Sequence" else [part]


def _fast_pattern(definition: Definition) -> tuple[str | None, str]:
    """Return (tiktoken's pattern, ""), or (None, the reason why no pattern is known to be equal)."""
    steps = _members(definition.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None, "its pre-tokenizer is not byte-level"
    last = steps[-1]
    if last.get("add_prefix_space"):
        return None, "it adds a space before the text"
    if len(steps) == 1 and last.get("use_regex", True):
        return FAST_PATTERNS[_GPT2], ""
    if len(steps) == 2 and steps[0].get("type") == "Split" and not last.get("use_regex", True):
        split = steps[0]
        pattern = split["pattern"].get("Regex")
        if split.get("behavior") == "Isolated" and not split.get("invert") and pattern in FAST_PATTERNS:
            return FAST_PATTERNS[pattern], ""
    return None, "its pre-tokenizer's pattern is not one of those known to be equal"


def _ranked_vocabulary(
    model: Definition, hf_tokenizer: HFTokenizer
) -> tuple[dict[bytes, int], np.ndarray | None] | str:
    """Return (tiktoken's table {bytes: rank or id}, id of each rank; None if ranks are ids), or the reason why tiktoken
    could give other ids. Encodes every token once with its merges."""
    plain = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
    if model.get("type", "BPE") != "BPE" or any(model.get(option) for option in plain):
        return "its model is not plain BPE"
    vocab: dict[str, int] = model["vocab"]
    alphabet = character_bytes()
    if not all(character in vocab for character in alphabet):
        return "its vocabulary lacks some of the 256 bytes"
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    first_rank: dict[str, int] = {}
    last_formed = ""
    for rank, (left, right) in enumerate(pairs):
        token = left + right
        if token in first_rank and token != last_formed:
            return "it forms one token by merges of separate ranks"
        first_rank.setdefault(token, 256 + rank)
        last_formed = token
    ignore_merges = bool(model.get("ignore_merges"))
    merger = hf_tokenizer.model
    if ignore_merges:
        merger = libraries.require("tokenizers", "--tokenizer-type").models.BPE(vocab=vocab, merges=pairs)
    ranks: dict[bytes, int] = {bytes([byte]): byte for byte in alphabet.values()}
    characters = {byte: character for character, byte in alphabet.items()}
    ordered: list[str] = [characters[byte] for byte in range(256)]
    candidates = sorted((token for token in vocab if len(token) > 1), key=lambda token: first_rank.get(token, 2**31))
    for token in candidates:
        if not all(character in alphabet for character in token):
            continue
        parts = len(merger.tokenize(token))
        if parts > 1 and not ignore_merges:
            continue
        if parts == 2:
            return "looking whole pieces up gives a token that its merges stop short of"
        ranks[bytes(alphabet[character] for character in token)] = len(ordered)
        ordered.append(token)
    ids = np.fromiter((vocab[token] for token in ordered), dtype=np.uint32, count=len(ordered))
    if np.all(np.diff(ids[256:].astype(np.int64)) > 0):  # ids already rise with the ranks
        return {piece: int(ids[rank]) for piece, rank in ranks.items()}, None
    return ranks, ids


def _same_character_tables(core_module: ModuleType) -> bool:
    """Whether both regular-expression engines assign the probe characters to equal classes."""
    hf = libraries.require("tokenizers", "--tokenizer-type")
    bytes_only = {bytes([byte]): byte for byte in range(256)}
    for pattern in (r"\p{L}", r"\p{N}", r"\s", r"(?i:s|t|r|e|v|m|l|d)"):
        core = core_module.CoreBPE(bytes_only, {"<|endoftext|>": 2**31}, pattern)
        splitter = hf.pre_tokenizers.Split(hf.Regex(pattern), "removed")
        for probe in map(chr, _TABLE_PROBES):
            if bool(core.encode_ordinary(probe)) == bool(splitter.pre_tokenize_str(probe)):
                return False
    return True


def _same_ids(fast: FastByteLevelBPE, hf_tokenizer: HFTokenizer) -> bool:
    """Texts that the fast one declines (None) count as equal."""
    texts = [*_SELF_TEST, json.dumps(_SELF_TEST), "".join(map(chr, _TABLE_PROBES))]
    for text in texts:
        ids = fast.encode(text)
        if ids is not None and ids.tolist() != hf_tokenizer.encode(text, add_special_tokens=False).ids:
            return False
    return True
