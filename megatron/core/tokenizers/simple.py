"""Tokenizers that need no file: synthetic ids for benchmarks, and raw bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.tokenizers.base import Tokenizer, check_text, compute_hash


class NullTokenizer(Tokenizer):
    """Text is already ids, separated by blanks: ``"5 17 3"``. The last id of the vocabulary ends a document."""

    def __init__(self, vocab_size: int, eod_id: int | None = None, pad_id: int = -1):
        """Set the special ids: ``eod_id`` None means the last id of the vocabulary; ``pad_id`` is not checked (-1: none
        in any data). Raises UserError for an empty vocabulary, or an ``eod_id`` outside it."""
        if vocab_size < 1:
            raise UserError(f"--vocab-size {vocab_size}: must be at least 1 for --tokenizer-type NullTokenizer")
        eod = vocab_size - 1 if eod_id is None else eod_id
        if not 0 <= eod < vocab_size:
            raise UserError(f"--null-tokenizer-eod-id {eod}: must lie in [0, {vocab_size}), the range of --vocab-size")
        options = {"type": "null", "vocab_size": vocab_size, "eod": eod}
        super().__init__("NullTokenizer", vocab_size, {"eod": eod, "pad": pad_id}, compute_hash([], options))

    def tokenize(self, text: str) -> list[int]:
        """Return the integers in ``text``, separated by white space. Raises UserError for others."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise UserError(f"--tokenizer-type NullTokenizer reads ids separated by blanks: {error}") from error
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise UserError(f"id {max(ids) if min(ids) >= 0 else min(ids)} is outside --vocab-size {self.vocab_size}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(index)) for index in ids)

    def _read_token_bytes(self, token: int) -> bytes:
        return f" {token}".encode()


class ByteLevelTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 ends a document."""

    def __init__(self) -> None:
        super().__init__("ByteLevelTokenizer", 257, {"eod": 256}, compute_hash([], {"type": "bytes", "eod": 256}))

    def tokenize(self, text: str) -> list[int]:
        check_text(text)
        return list(text.encode())

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(int(index) for index in ids if index < 256).decode(errors="replace")

    def _read_token_bytes(self, token: int) -> bytes:
        return bytes([token] if token < 256 else [])

    @property
    def vocab(self) -> dict[str, int]:
        return {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "<eod>": 256}
