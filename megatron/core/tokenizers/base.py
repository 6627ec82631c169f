"""Base class of tokenizers: text to ids and back, its true vocabulary size, its special ids and its fingerprint.

The padded vocabulary is the model's business: ``vocab_size`` here is the largest id + 1."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.safe_files import MAX_TEXT_BYTES, read_file

if TYPE_CHECKING:
    from megatron.core.tokenizers.chat import ChatTemplates, Message

UNKNOWN = "\ufffd"
"""Character for bytes that are not valid UTF-8."""
PROBE = (
    "The quick brown fox isn't 12 years old, it's 3.14159 or 1234567890!  Two  blanks\t\ttabs\r\n\n  lines \n"
    "naïve cafe\u0301 ÅNGSTRÖM ﬁne ½ Ⅷ ＡＢＣ １２３ Straße İstanbul Ελληνικά Привет שלום مرحبا ١٢٣ हिन्दी १२३ "
    "ไทย 中文字符 かなカナ 한국어 \u1112\u1161\u11ab 👩‍👩‍👧 🇩🇪 \u00a0\u200b\u3000\ufeff "
    "def f(x_1):\n\treturn {'k': [a != 0]}  # AbcDef "
    "<unk> <s> </s> <pad> <mask> [CLS] [SEP] [MASK] <|endoftext|>x <|im_start|>user\n"
)
"""Text whose ids compare tokenizers: scripts, digits, white space, code, and names of special tokens."""


def _role(role: str, what: str) -> property:
    """Reading it raises UserError, with the roles that exist. ``what`` is its docstring."""

    def special_id(self: Tokenizer) -> int:
        if role not in self.special_ids:
            has = ", ".join(f"{name} {index}" for name, index in self.special_ids.items()) or "none"
            raise UserError(
                f"this {self.tokenizer_type} has no {role!r} token (it has: {has}); use a tokenizer that defines one"
            )
        return self.special_ids[role]

    return property(special_id, doc=what)


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        tokenizer_type: the value of --tokenizer-type that builds it.
        vocab_size: largest id + 1.
        special_ids: ids by role: ``eod``, ``bos``, ``eos``, ``pad``, ``cls``, ``sep``, ``mask``, ``unk``; absent roles
            are missing."""

    chat: ChatTemplates | None = None
    """Chat templates, if there are any."""
    model_end_ids: Sequence[int] = ()
    """Ids that end a text of the model, besides the tokenizer's eod and eos."""
    names_bos: bool = True
    """Whether the tokenizer's files name bos. If not, ``special_ids`` may have a token with a usual name."""

    def __init__(self, tokenizer_type: str, vocab_size: int, special_ids: Mapping[str, int], fingerprint: str):
        self.tokenizer_type = tokenizer_type
        self.vocab_size = vocab_size
        self.special_ids = dict(special_ids)
        self._files_hash = fingerprint
        self._token_bytes: dict[int, bytes] = {}

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the tokenizer, for ``same_tokenizer``: a sha256 of its files and options, "+", and a sha256 of
        its vocabulary, eod and ids of ``PROBE`` and of a part of its tokens. Excludes T5's sentinels."""
        try:
            tokens = sorted((index, token) for token, index in self.vocab.items() if not token.startswith("<extra_id_"))
            special_ids = self.all_special_ids
            special = [token for index, token in tokens if index in special_ids]
            sample = [token for _, token in tokens[:: len(tokens) // 4096 + 1]]
            ids = self.tokenize(" ".join([PROBE, *special, *sample]))
        except UserError:  # no vocabulary of strings, or the probe has characters that it cannot represent
            return f"{self._files_hash}+{self._files_hash}"
        return f"{self._files_hash}+{compute_hash([], {'tokens': tokens, 'eod': self.eod, 'ids': ids})}"

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``. No end-of-document id is added."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are not valid UTF-8 become U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that ``token`` adds to a text in UTF-8, which may be a part of a character. Ids of a model
        that the tokenizer does not have add none."""
        if token not in self._token_bytes:
            self._token_bytes[token] = self._read_token_bytes(token) if token < self.vocab_size else b""
        return self._token_bytes[token]

    def _read_token_bytes(self, token: int) -> bytes:
        # decoded after another token: a single token may lose the space before a word
        context = self.tokenize_sentences(["a"], False)[0].tolist()
        before, text = self.detokenize(context), self.detokenize([*context, token])
        return (text[len(before) :] if text.startswith(before) else self.detokenize([token])).encode()

    @property
    def all_special_ids(self) -> frozenset[int]:
        """Ids of control tokens, such as the end of a document."""
        return frozenset(index for index in self.special_ids.values() if index >= 0)

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text as an integer array [tokens]: the fast path of preprocessing."""
        return [np.asarray(self.tokenize(text), dtype=np.uint32) for text in texts]

    def tokenize_sentences(self, texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        """Tokenize each text; with ``special_tokens`` surround it by the tokenizer's tokens, such as [CLS] ... [SEP].
        Raises ValueError: ``special_tokens`` is set, but the tokenizer does not define such tokens."""
        if special_tokens:
            raise UserError(f"--sentence-special-tokens: {self.tokenizer_type} adds no tokens around a text; remove it")
        return self.tokenize_batch(texts)

    @property
    def chat_template(self) -> str | None:
        """Its default chat template, if it has one."""
        return None if self.chat is None else self.chat.templates.get("default")

    def render_chat(self, messages: Sequence[Message], /, **options: Any) -> str:
        """Return the text of ``messages`` by the tokenizer's chat template; ``options`` of ``ChatTemplates.render``.
        :meth:`tokenize_chat` has its ids: :meth:`tokenize` may add a token that the template writes itself. Raises
        UserError without a template."""
        if self.chat is None:
            raise UserError(f"--chat: the {self.tokenizer_type} has no chat template; remove it")
        return self.chat.render(messages, **options)

    def tokenize_chat(self, text: str) -> list[int]:
        """Return the ids of ``text``, a rendered conversation, without tokens that the tokenizer adds around a text."""
        return self.tokenize_sentences([text], False)[0].tolist()

    def token_offsets(self, text: str) -> np.ndarray:
        """Return the first and last + 1 character of each token of :meth:`tokenize_chat`, int64 [tokens, 2]. Raises
        UserError if the tokenizer cannot tell."""
        raise UserError(f"{self.tokenizer_type}: joins characters over the border of an answer; use another tokenizer")

    @property
    def end_ids(self) -> list[int]:
        """Ids that end a generated text: eod, eos and ``model_end_ids``."""
        local = [self.special_ids[role] for role in ("eod", "eos") if role in self.special_ids]
        return list(dict.fromkeys([*local, *self.model_end_ids]))

    @property
    def prefix_id(self) -> int:
        """Token before a text that is scored without a context: bos if the files name it, else eos, else eod."""
        roles = ("bos", "eos", "eod") if self.names_bos else ("eos", "eod")
        return next(self.special_ids[role] for role in roles if role in self.special_ids)

    @property
    def vocab(self) -> dict[str, int]:
        """Token to id."""
        raise UserError(f"--tokenizer-type {self.tokenizer_type} has no vocabulary of strings")

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Id to token."""
        return {index: token for token, index in self.vocab.items()}

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of the T5 sentinels ``<extra_id_N>``, in order; empty without sentinels."""
        vocab = self.vocab
        return [vocab[name] for name in takewhile(vocab.__contains__, sentinel_names(len(vocab)))]

    eod = _role("eod", "End of document.")
    bos = _role("bos", "Beginning of sequence.")
    eos = _role("eos", "End of sequence.")
    pad = _role("pad", "Padding.")
    cls = _role("cls", "BERT's classification token.")
    sep = _role("sep", "BERT's separator.")
    mask = _role("mask", "BERT's mask.")


def sentinel_names(count: int) -> list[str]:
    """T5's names of ``count`` sentinels."""
    return [f"<extra_id_{index}>" for index in range(count)]


def compute_hash(parts: Iterable[bytes], options: Mapping[str, object]) -> str:
    """sha256 over the contents ``parts``, in order, and over ``options``."""
    digest = hashlib.sha256(json.dumps(dict(options), sort_keys=True).encode())
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def read_tokenizer_file(flag: str, path: str | None, tokenizer_type: str, what: str) -> bytes:
    """Return the bytes of the file ``path`` given by ``flag``; ``what`` describes its content in errors. Raises
    UserError if no path is given, or for a folder, a missing or an unreadable file."""
    if not path:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs {flag}: {what}")
    if os.path.isdir(path):
        raise UserError(f"{flag} {path} is a folder; --tokenizer-type {tokenizer_type} needs a file: {what}")
    try:
        return read_file(path, MAX_TEXT_BYTES)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read ({error.strerror}); it must be {what}") from error


def check_text(text: str) -> None:
    """Raise UserError if ``text`` has a lone surrogate, which UTF-8 cannot represent."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"text has a lone surrogate at position {error.start}: it is not valid Unicode") from error
