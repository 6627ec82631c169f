"""Tokenizers in the `tokenizers` format: tokenizer.json files, GPT-2's vocabulary and merges, BERT's WordPiece.

Only files on disk are read, only by the `tokenizers` library: nothing is downloaded, and Python code that comes with a
tokenizer is never run."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.safe_files import MAX_TEXT_BYTES, parse_json, read_file
from megatron.core.tokenizers.added_tokens import (
    CONFIG,
    ROLES,
    add_folder_tokens,
    describe_added,
    read_folder_tokens,
    token_text,
)
from megatron.core.tokenizers.base import (
    UNKNOWN,
    Tokenizer,
    check_text,
    compute_hash,
    read_tokenizer_file,
    sentinel_names,
)
from megatron.core.tokenizers.chat import ChatTemplates, read_chat_templates
from megatron.core.tokenizers.end_tokens import read_end_ids
from megatron.core.tokenizers.fast_bpe import FastByteLevelBPE, build_fast_bpe, character_bytes
from megatron.core.tokenizers.libraries import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HFTokenizer

logger = logging.getLogger(__name__)

# tried in this order when the files next to tokenizer.json do not name an end-of-sequence token
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eod>", "<|eod|>", "<eos>", "<|end▁of▁sentence|>", "[EOD]")
CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
MAX_IDS = 2**24
"""A larger id is no vocabulary's; libraries walk all ids up to the largest."""
CLEANED = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
           (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip
"""Replacements of ``clean_up_tokenization_spaces``."""


class BackendTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer`, with tiktoken in front of it where equal ids are certain."""

    cleans_spaces = False
    """Whether texts lose the blanks before punctuation (``clean_up_tokenization_spaces``)."""

    def __init__(
        self,
        tokenizer_type: str,
        backend: HFTokenizer,
        special_ids: dict[str, int],
        fingerprint: str,
        include_special_tokens: bool = False,
    ):
        """Wrap ``backend``; tiktoken is used only after :meth:`accelerate`. ``include_special_tokens``: texts get the
        tokens that the backend's post-processor adds. Raises UserError for shared or impossible ids."""
        self._backend = backend
        self._include_special_tokens = include_special_tokens
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self._fast: FastByteLevelBPE | None = None
        self._around = _ids_around_text(backend) if include_special_tokens else None
        _refuse_shared_ids(f"the {tokenizer_type}", self._vocab)
        super().__init__(tokenizer_type, max(self._vocab.values()) + 1, special_ids, fingerprint)

    @property
    def vocab(self) -> dict[str, int]:
        return self._vocab

    @property
    def definition(self) -> str:
        """The content of its tokenizer.json."""
        return self._backend.to_str()

    @property
    def is_fast(self) -> bool:
        """Whether tiktoken encodes most texts."""
        return self._fast is not None

    def accelerate(self, definition: dict[str, object]) -> None:
        """Put tiktoken in front, if ``definition`` (the parsed tokenizer.json) allows it."""
        try:
            self._fast = build_fast_bpe(definition, self._backend)
        except (AttributeError, KeyError, TypeError, ValueError):  # the library reads more forms than its own
            logger.info("encoding with tokenizers, not tiktoken: tokenizer.json has an unusual form")

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0].tolist()

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self.tokenize_sentences(texts, self._include_special_tokens)

    def tokenize_sentences(self, texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        """Use tiktoken where possible, else one batch of `tokenizers`. Raises UserError for a lone surrogate."""
        if special_tokens and self._around is None:
            self._around = _ids_around_text(self._backend)
            if self._around == ([], []):
                return super().tokenize_sentences(texts, special_tokens)  # raises
        arrays: list[np.ndarray | None] = [None] * len(texts)
        if self._fast is not None:
            arrays = [self._fast.encode(text) for text in texts]
            if special_tokens:
                assert self._around is not None
                before, after = self._around
                around = (None if ids is None else np.concatenate([before, ids, after]) for ids in arrays)
                arrays = [None if ids is None else ids.astype(np.uint32) for ids in around]
        rest = [index for index, array in enumerate(arrays) if array is None]
        if rest:
            for index in rest:
                check_text(texts[index])
            encode = self._backend.encode_batch_fast
            with _library_errors():
                encodings = encode([texts[index] for index in rest], add_special_tokens=special_tokens)
            for index, encoding in zip(rest, encodings):
                arrays[index] = np.asarray(encoding.ids, dtype=np.uint32)
        return [array for array in arrays if array is not None]

    def detokenize(self, ids: Sequence[int]) -> str:
        with _library_errors():
            text = self._backend.decode([int(index) for index in ids], skip_special_tokens=False)
        for old, new in CLEANED if self.cleans_spaces else ():
            text = text.replace(old, new)
        return text

    def token_offsets(self, text: str) -> np.ndarray:
        with _library_errors():
            encoding = self._backend.encode(text, add_special_tokens=False)
        return np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def _read_token_bytes(self, token: int) -> bytes:
        text = super()._read_token_bytes(token)
        piece = self._backend.id_to_token(token) or ""
        if UNKNOWN not in text.decode() or token in self._backend.get_added_tokens_decoder():
            return text
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):  # byte fallback, as in LLaMA's and Mistral's SentencePiece
            return bytes([int(piece[1:-1], 16)])
        alphabet = character_bytes()
        return bytes(alphabet[character] for character in piece) if set(piece) <= alphabet.keys() else text

    @property
    def all_special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder().items()
        return super().all_special_ids | {index for index, token in added if token.special}


@contextmanager
def _library_errors() -> Iterator[None]:
    """Turn Rust panics into UserErrors: a file may name tokens that its vocabulary lacks."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer's file names a token that its vocabulary lacks: {error!s:.200}") from error


def build_huggingface(
    path: str | None,
    special_tokens: Sequence[str] | None = None,
    include_special_tokens: bool = True,
    extra_ids: int = 0,
) -> BackendTokenizer:
    """Build a HuggingFaceTokenizer from a tokenizer.json, or from a folder that holds one. Adds ``special_tokens`` and
    ``extra_ids`` sentinels, unless the file has them. Truncation and padding of the file are switched off. Raises
    UserError for a folder or file that cannot be used, or without an end-of-document token."""
    file = _locate(path)
    raw = read_tokenizer_file("--tokenizer-model", str(file), "HuggingFaceTokenizer", "a tokenizer.json")
    definition = _parse(raw, file)
    library = require("tokenizers", "--tokenizer-type HuggingFaceTokenizer")
    try:
        backend = library.Tokenizer.from_str(raw.decode())
    except Exception as error:  # the library raises bare Exception
        reason = f"{error!s:.300}"
        raise UserError(f"--tokenizer-model {file} is not a tokenizer that `tokenizers` can read: {reason}") from error
    backend.no_truncation()
    backend.no_padding()
    for added in definition.get("added_tokens") or []:
        if backend.token_to_id(added["content"]) != added["id"]:
            raise UserError(
                f"--tokenizer-model {file}: the added token {added['content']!r} claims id {added['id']}, which is not "
                f"the id it gets ({backend.token_to_id(added['content'])}); repair the file's added_tokens"
            )
    before = describe_added(backend)
    folder_tokens = read_folder_tokens(file.parent, _optional_json)
    add_folder_tokens(backend, folder_tokens, file)
    config, added = _optional_json(file.parent / CONFIG), describe_added(backend)
    changed = [token | {"id": index} for index, token in sorted(added.items()) if before.get(index) != token]
    backend.encode_special_tokens = split_special = bool(config.get("split_special_tokens"))
    lacking = [name for name in sentinel_names(extra_ids) if backend.token_to_id(name) is None]
    if special_tokens or lacking:
        backend.add_special_tokens([*(special_tokens or []), *lacking])
    if special_tokens or lacking or changed:
        definition = json.loads(backend.to_str())
    roles = {key: token_text(token) for key, token in folder_tokens.roles.items()}
    special_ids = _special_ids(roles, backend)
    if "eod" not in special_ids:
        raise UserError(
            f"--tokenizer-model {file} names no end-of-document token (looked in tokenizer_config.json and "
            f"special_tokens_map.json for eos_token, then for {', '.join(EOD_NAMES)}); put a tokenizer_config.json "
            'next to it with {"eos_token": "..."}, or name one of those with --tokenizer-special-tokens'
        )
    options = {"type": "huggingface", "special_tokens": list(special_tokens or []), "include": include_special_tokens}
    options |= {"added": changed} if changed else {}
    options |= {"split_special_tokens": True} if split_special else {}
    fingerprint = compute_hash([raw], options)
    tokenizer = BackendTokenizer("HuggingFaceTokenizer", backend, special_ids, fingerprint, include_special_tokens)
    if not split_special:
        tokenizer.accelerate(definition)
    tokenizer.cleans_spaces = bool(config.get("clean_up_tokenization_spaces")) and (
        not isinstance(backend.model, library.models.BPE) or bool(config.get(CLEANS_BPE))
    )
    tokenizer.model_end_ids, tokenizer.names_bos = read_end_ids(file.parent), "bos_token" in roles
    if templates := read_chat_templates(file.parent, config):
        tokenizer.chat = ChatTemplates(templates, roles)
    return tokenizer


def build_gpt2_bpe(
    vocab_file: str | None, merge_file: str | None, special_tokens: Sequence[str] | None = None, extra_ids: int = 0
) -> BackendTokenizer:
    """Build a GPT2BPETokenizer from vocab.json and merges.txt, plus ``special_tokens`` and ``extra_ids`` sentinels at
    the end. The end-of-document token (the first of ``EOD_NAMES`` in the vocabulary or ``special_tokens``) is also eos
    and bos. Raises UserError: a file is missing or malformed, ids are shared, or there is no end-of-document token."""
    kind = "GPT2BPETokenizer"
    vocab_raw = read_tokenizer_file("--vocab-file", vocab_file, kind, "vocab.json, a map from token to id")
    merges_raw = read_tokenizer_file("--merge-file", merge_file, kind, "merges.txt, two tokens a line")
    vocab = _parse(vocab_raw, Path(str(vocab_file)))
    if not vocab or not all(isinstance(index, int) for index in vocab.values()):
        raise UserError(f"--vocab-file {vocab_file} is not a map from token to id; it must be GPT-2's vocab.json")
    merges = [tuple(line.split(" ")) for line in _lines(merges_raw, merge_file) if line and not line.startswith("#v")]
    if not all(len(pair) == 2 for pair in merges):
        raise UserError(f"--merge-file {merge_file} has lines that are not two tokens; it must be GPT-2's merges.txt")
    _refuse_shared_ids(f"--vocab-file {vocab_file}", vocab)
    library = require("tokenizers", f"--tokenizer-type {kind}")
    try:
        backend = library.Tokenizer(library.models.BPE(vocab=vocab, merges=merges))
    except Exception as error:
        reason = f"{error!s:.300}"
        raise UserError(f"--vocab-file {vocab_file} and --merge-file {merge_file} do not fit: {reason}") from error
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    end = next((name for name in EOD_NAMES if name in vocab or name in (special_tokens or ())), None)
    if end is None:
        raise UserError(f"--vocab-file {vocab_file} has no <|endoftext|>, which ends documents; add it to the file")
    backend.add_special_tokens([end, *(special_tokens or []), *sentinel_names(extra_ids)])
    eod = backend.token_to_id(end)
    options = {"type": "gpt2", "special_tokens": list(special_tokens or [])}
    fingerprint = compute_hash([vocab_raw, merges_raw], options)
    tokenizer = BackendTokenizer(kind, backend, {"eod": eod, "eos": eod, "bos": eod}, fingerprint)
    tokenizer.accelerate(json.loads(backend.to_str()))
    return tokenizer


def build_bert_wordpiece(
    vocab_file: str | None, lower_case: bool, extra_ids: int | None = None, special_tokens: Sequence[str] | None = None
) -> BackendTokenizer:
    """Build a BertWordPieceLowerCase or BertWordPieceCase tokenizer from vocab.txt.

    ``special_tokens`` and ``extra_ids`` sentinels (--vocab-extra-ids; None: Megatron-LM's number, 100 with case and
    none without) follow the file's own tokens. Where these have no [BOS] and [EOS], [CLS] and [SEP] stand for them.
    Raises UserError: the file is missing, repeats a token, or lacks [CLS], [SEP], [PAD], [MASK] or [UNK]."""
    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    raw = read_tokenizer_file("--vocab-file", vocab_file, kind, "vocab.txt, one token a line")
    lines = _lines(raw, vocab_file)
    while lines and not lines[-1]:
        lines.pop()
    vocab = {token: index for index, token in enumerate(lines)}
    repeated = [token for token, count in Counter(lines).items() if count > 1]
    if repeated:
        raise UserError(f"--vocab-file {vocab_file} lists {repeated[0]!r:.80} twice; every line must differ")
    missing = [token for token in ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]") if token not in vocab]
    if missing:
        raise UserError(f"--vocab-file {vocab_file} lacks {', '.join(missing)}; it must be a BERT vocab.txt")
    library = require("tokenizers", f"--tokenizer-type {kind}")
    backend = library.Tokenizer(library.models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
    backend.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    backend.decoder = library.decoders.WordPiece()
    if extra_ids is None:
        extra_ids = 0 if lower_case else 100
    added = [*(special_tokens or []), *sentinel_names(extra_ids)]
    special_ids = {role: vocab[f"[{role.upper()}]"] for role in ("cls", "sep", "pad", "mask", "unk")}
    backend.add_special_tokens([*(f"[{role.upper()}]" for role in special_ids), *added])
    special_ids |= {"bos": vocab.get("[BOS]", vocab["[CLS]"]), "eos": vocab.get("[EOS]", vocab["[SEP]"])}
    special_ids["eod"] = special_ids["eos"]
    around = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = library.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    options = {"type": kind, "special_tokens": list(special_tokens or [])}
    plain = "\n".join([*lines, ""]).encode()  # however its lines end
    return BackendTokenizer(kind, backend, special_ids, compute_hash([plain], options))


def _locate(path: str | None) -> Path:
    """Raises UserError for a hub name (never downloaded), or a folder that requests custom Python code."""
    if not path:
        raise UserError(
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: a tokenizer.json or a folder holding one"
        )
    location = Path(path)
    if not os.path.exists(location):  # Path.exists raises where a name is too long
        raise UserError(
            f"--tokenizer-model {path}: no such file or folder. Names on a model hub are not downloaded; "
            "save the tokenizer to a folder first and give that folder"
        )
    if not location.is_dir():
        return location
    config = _optional_json(location / "tokenizer_config.json")
    if "AutoTokenizer" in (config.get("auto_map") or {}):
        raise UserError(
            f"--tokenizer-model {path}: its tokenizer_config.json requests custom Python code (auto_map), which is "
            "never run; if its tokenizer.json is complete without that code, give the path of tokenizer.json itself"
        )
    if not (location / "tokenizer.json").is_file():
        holds = ", ".join(sorted(os.listdir(location))[:8]) or "nothing"
        raise UserError(
            f"--tokenizer-model {path} holds no tokenizer.json (it holds {holds}); a SentencePiece .model goes with "
            "--tokenizer-type GPTSentencePieceTokenizer, vocab.json and merges.txt with GPT2BPETokenizer"
        )
    return location / "tokenizer.json"


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        parsed = parse_json(raw.decode())
    except ValueError as error:
        raise UserError(f"{path} is not a JSON file ({error}); is it the right kind of tokenizer file?") from error
    if not isinstance(parsed, dict):
        raise UserError(f"{path} holds a JSON {type(parsed).__name__}, not an object; is it the right kind of file?")
    return parsed


def _lines(raw: bytes, path: str | None) -> list[str]:
    try:
        # only line feeds end a line: some tokens are other kinds of line break
        return [line.rstrip("\r") for line in raw.decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); is it the right kind of tokenizer file?") from error


def _optional_json(path: Path) -> dict[str, Any]:
    return _parse(read_file(path, MAX_TEXT_BYTES), path) if path.is_file() else {}


def _special_ids(roles: Mapping[str, str], backend: HFTokenizer) -> dict[str, int]:
    """BERT's cls and sep serve as bos and eos if these are missing; eod is eos."""
    named = {key.removesuffix("_token"): backend.token_to_id(roles[key]) for key in ROLES if key in roles}
    by_role = {role: index for role, index in named.items() if index is not None}  # all: they were added
    usual_names = {
        "eos": EOD_NAMES,
        "bos": ("<s>", "<|begin_of_text|>", "<bos>"),
        "pad": ("<pad>", "[PAD]", "<|pad|>"),
        "cls": ("[CLS]",),
        "sep": ("[SEP]",),
        "mask": ("[MASK]", "<mask>"),
        "unk": ("<unk>", "[UNK]"),
    }
    for role, names in usual_names.items():
        indices = [index for index in map(backend.token_to_id, names) if index is not None]
        if indices:
            by_role.setdefault(role, indices[0])
    if "sep" in by_role:  # of BERT
        by_role.setdefault("bos", by_role["cls"] if "cls" in by_role else by_role["sep"])
        by_role.setdefault("eos", by_role["sep"])
    if "eos" in by_role:
        by_role["eod"] = by_role["eos"]
    return by_role


def _refuse_shared_ids(where: str, vocab: dict[str, int]) -> None:
    """Also rejects an empty vocabulary, and ids that are negative or at least ``MAX_IDS``."""
    if not vocab:
        raise UserError(f"{where}: the vocabulary is empty")
    if odd := [token for token, index in vocab.items() if not 0 <= index < MAX_IDS]:
        raise UserError(f"{where}: the token {odd[0]!r:.80} has the id {vocab[odd[0]]}, expected 0 to {MAX_IDS - 1}")
    if len(set(vocab.values())) < len(vocab):
        owners: dict[int, str] = {}
        for token, index in vocab.items():
            if index in owners:
                raise UserError(
                    f"{where}: the tokens {owners[index]!r:.80} and {token!r:.80} share the id {index}; "
                    "every token needs its own"
                )
            owners[index] = token


def _ids_around_text(backend: HFTokenizer) -> tuple[list[int], list[int]]:
    """Return the ids (before, after) that the post-processor adds, found with the text "a"."""
    with _library_errors():
        bare = backend.encode("a", add_special_tokens=False).ids
        full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise UserError("the tokenizer's post-processor changes the ids of the text itself, which is not supported")
