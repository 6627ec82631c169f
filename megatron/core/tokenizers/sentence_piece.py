"""SentencePiece models: SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer.

All three encode with the model as it is, adding no beginning-of-sequence id. ``legacy`` is the older layout of
SentencePieceTokenizer, which T5 uses: <CLS>, <SEP>, <EOD>, <MASK> and the sentinels follow the model's own pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.core.config.errors import UserError
from megatron.core.tokenizers.base import Tokenizer, check_text, compute_hash, read_tokenizer_file, sentinel_names
from megatron.core.tokenizers.libraries import require


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model file; ``added`` holds the tokens appended to its vocabulary, with their ids."""

    def __init__(
        self,
        tokenizer_type: str,
        model: str | None,
        *,
        legacy: bool = False,
        extra_ids: int = 0,
        special_tokens: Sequence[str] | None = None,
    ):
        """Read the model file. ``legacy`` appends <CLS>, <SEP>, <EOD>, <MASK> and missing <PAD>, <BOS>, <EOS>; else eos
        ends documents. ``special_tokens`` and ``extra_ids`` sentinels follow in both cases. Raises UserError for a
        missing or broken file, or without an end-of-document token."""
        raw = read_tokenizer_file("--tokenizer-model", model, tokenizer_type, "a SentencePiece .model file")
        library = require("sentencepiece", f"--tokenizer-type {tokenizer_type}")
        self._processor = library.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(raw)
            size = self._processor.get_piece_size()
            pieces = [self._processor.id_to_piece(index) for index in range(size)]
        except Exception as error:
            raise UserError(f"--tokenizer-model {model} is not a SentencePiece model: {error}") from error
        if not raw or size == 0:
            raise UserError(f"--tokenizer-model {model} is not a SentencePiece model: it holds no pieces")
        self._vocab = {piece: index for index, piece in enumerate(pieces)}
        roles = {
            "bos": self._processor.bos_id(),
            "eos": self._processor.eos_id(),
            "pad": self._processor.pad_id(),
            "unk": self._processor.unk_id(),
        }
        special_ids = {role: index for role, index in roles.items() if index >= 0}
        self.added: dict[str, int] = {}
        if legacy:
            special_ids.update({role: self._add(f"<{role.upper()}>") for role in ("cls", "sep", "eod", "mask")})
            special_ids.update({r: self._add(f"<{r.upper()}>") for r in ("pad", "bos", "eos") if r not in special_ids})
        elif "eos" in special_ids:
            special_ids["eod"] = special_ids["eos"]
        for token in (*(special_tokens or ()), *sentinel_names(extra_ids)):
            self._add(token)
        if "eod" not in special_ids:
            raise UserError(
                f"--tokenizer-model {model} has no end-of-sequence piece, which ends documents; "
                "train it with eos_id >= 0, or add --tokenizer-sentencepiece-legacy, which appends <EOD>"
            )
        self._splitter = re.compile("(" + "|".join(map(re.escape, self.added)) + ")") if self.added else None
        named = {token: index for token, index in self.added.items() if token not in sentinel_names(extra_ids)}
        options = {"type": "sentencepiece", "added": named}
        super().__init__(tokenizer_type, max(self._vocab.values()) + 1, special_ids, compute_hash([raw], options))

    def _add(self, token: str) -> int:
        index = self._vocab.setdefault(token, len(self._vocab))
        self.added[token] = index
        return index

    @property
    def vocab(self) -> dict[str, int]:
        return self._vocab

    def tokenize(self, text: str) -> list[int]:
        """Added tokens in the text (special tokens, sentinels, the legacy layout's own) become their ids; the text
        between them is encoded separately. Raises UserError for a lone surrogate."""
        check_text(text)
        if self._splitter is None:
            return self._processor.encode_as_ids(text)
        ids: list[int] = []
        for part in self._splitter.split(text):
            if part in self.added:
                ids.append(self.added[part])
            elif part:
                ids += self._processor.encode_as_ids(part)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; added tokens appear as their names; others are decoded between them."""
        if not self.added:
            return self._processor.decode([int(index) for index in ids])
        names = {index: token for token, index in self.added.items()}
        text = ""
        run: list[int] = []
        for index in map(int, ids):
            if index in names:
                text += (self._processor.decode(run) if run else "") + names[index]
                run = []
            else:
                run.append(index)
        return text + (self._processor.decode(run) if run else "")

    def _read_token_bytes(self, token: int) -> bytes:
        if token < self._processor.get_piece_size() and self._processor.is_byte(token):
            return bytes([int(self._processor.id_to_piece(token)[1:-1], 16)])
        return super()._read_token_bytes(token)
