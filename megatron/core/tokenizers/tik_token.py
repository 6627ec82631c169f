"""TikTokenizer: a JSON list of ``{"rank", "token_bytes" (base64), "token_str"}``, the form in which Megatron-LM keeps
tiktoken vocabularies, or tiktoken's own form, a line ``base64 rank`` for each token. Special tokens take the lowest
ids, the ranks follow."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.safe_files import parse_json
from megatron.core.tokenizers.base import Tokenizer, check_text, compute_hash, read_tokenizer_file
from megatron.core.tokenizers.libraries import require

_TAIL = r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "v1": rf"[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_TAIL}",
    "v2": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_TAIL}",
}
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
DEFAULT_VOCAB_SIZE = 131072
_ROLES = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "mask": "<mask>", "pad": "<pad>", "cls": "<cls>", "sep": "<sep>"}


class TikTokenizer(Tokenizer):
    """Ids 0 to ``num_special_tokens`` - 1 are special, id ``num_special_tokens`` + r is the token of rank r."""

    def __init__(
        self,
        path: str | None,
        *,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] | None = None,
    ):
        """Read the vocabulary file. ``vocab_size`` (None: 131,072, or fewer if the file has fewer) includes the
        ``num_special_tokens``; ids without a name in ``special_tokens`` become <SPECIAL_n>; ``pattern`` is a key of
        ``PATTERNS`` (None: v2). Raises UserError for missing required tokens, sizes that do not fit, or a malformed
        file."""
        what = "a JSON list of ranks and token bytes, or a .tiktoken file"
        raw = read_tokenizer_file("--tokenizer-model", path, "TikTokenizer", what)
        names = list(special_tokens or SPECIAL_TOKENS)
        missing = [token for token in SPECIAL_TOKENS if token not in names]
        if missing or len(set(names)) != len(names):
            raise UserError(
                f"--tokenizer-special-tokens must be different tokens and include {' '.join(SPECIAL_TOKENS)}"
                + (f"; missing: {' '.join(missing)}" if missing else "")
            )
        if len(names) > num_special_tokens:
            raise UserError(
                f"--tiktoken-num-special-tokens {num_special_tokens} is less than the {len(names)} special tokens"
            )
        names += [f"<SPECIAL_{index}>" for index in range(len(names), num_special_tokens)]
        num_ranks = (vocab_size or DEFAULT_VOCAB_SIZE) - num_special_tokens
        if num_ranks < 256:
            raise UserError(
                f"--vocab-size {vocab_size} leaves {num_ranks} ids in addition to --tiktoken-num-special-tokens "
                f"{num_special_tokens}; at least 256 are needed, for the bytes"
            )
        ranks = _read_ranks(raw, str(path), num_ranks, num_special_tokens)
        if vocab_size is not None and len(ranks) < num_ranks:
            raise UserError(
                f"--tokenizer-model {path} holds {len(ranks)} tokens; with {num_special_tokens} special ones that is "
                f"less than --vocab-size {vocab_size}; use --vocab-size {len(ranks) + num_special_tokens}"
            )
        library = require("tiktoken", "--tokenizer-type TikTokenizer")
        chosen = pattern or "v2"
        self._specials = {name: index for index, name in enumerate(names)}
        self._encoding = library.Encoding(
            name="TikTokenizer", pat_str=PATTERNS[chosen], mergeable_ranks=ranks, special_tokens=self._specials
        )
        options = {"type": "tiktoken", "pattern": chosen, "special": names, "size": len(ranks)}
        special_ids = {role: self._specials[name] for role, name in _ROLES.items()}
        special_ids["eod"] = special_ids["eos"]
        self._ranks = ranks
        size = len(ranks) + num_special_tokens
        super().__init__("TikTokenizer", size, special_ids, compute_hash([raw], options))

    @property
    def vocab(self) -> dict[str, int]:
        return {**self._specials, **{piece.decode("latin-1"): index for piece, index in self._ranks.items()}}

    def tokenize(self, text: str) -> list[int]:
        check_text(text)
        return self._encoding.encode(text, allowed_special="all")

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(self._encoding.encode_to_numpy(text, allowed_special="all")) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(index) for index in ids])

    def _read_token_bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token)


def _read_ranks(raw: bytes, path: str, num_ranks: int, first_id: int) -> dict[bytes, int]:
    """``raw`` is a JSON list, or lines of base64 and rank. UserError for wrong ranks or missing bytes."""
    try:
        is_json = raw.lstrip()[:1] in (b"[", b"{")
        rows = parse_json(raw) if is_json else _parse_lines(raw)
        if not isinstance(rows, list):
            raise ValueError(f"it holds a JSON {type(rows).__name__}, not a list")
        ranks: dict[bytes, int] = {}
        for rank, row in enumerate(rows[:num_ranks]):
            piece = base64.b64decode(row["token_bytes"], validate=True)
            if row["rank"] != rank:
                raise ValueError(f"entry {rank} has rank {row['rank']}")
            if is_json and rank < 256 and piece != bytes([rank]):
                raise ValueError(f"entry {rank} is not the byte {rank}")
            if piece in ranks:
                raise ValueError(f"entries {ranks[piece] - first_id} and {rank} are the same token")
            ranks[piece] = first_id + rank
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"--tokenizer-model {path} is not a tiktoken vocabulary: {reason:.300}") from error
    if len(ranks) < 256:
        raise UserError(f"--tokenizer-model {path} holds {len(ranks)} tokens; the first 256 must be the bytes")
    if absent := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"--tokenizer-model {path} has no token for the byte {absent[0]}; every byte needs one")
    return ranks


def _parse_lines(raw: bytes) -> list[dict[str, object]]:
    """The bytes are in any order among the tokens."""
    rows: list[dict[str, object]] = []
    for line in raw.splitlines():
        piece, rank = line.split()
        rows.append({"token_bytes": piece, "rank": int(rank)})
    return rows
