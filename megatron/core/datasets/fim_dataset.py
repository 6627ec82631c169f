"""Fill-in-the-middle samples for a decoder-only model (Bavarian et al. 2022, arXiv:2207.14255).

A sample of ``GPTDataset`` is cut at its end-of-document tokens. With probability ``fim_rate`` the text of a segment is
split at two random characters into prefix, middle and suffix, and written as

  PSM  <prefix> prefix <suffix> suffix <middle> middle             (with probability 1 - ``fim_spm_rate``)
  SPM  <prefix> <suffix> suffix <middle> prefix middle             (with probability ``fim_spm_rate``)

The result is cut to the sample's length, or padded without loss. Random numbers follow from (seed, sample), so that a
sample does not depend on layouts, workers or earlier samples; Megatron-LM draws them from one generator per process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass(kw_only=True)
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Settings of a fill-in-the-middle data set, by the names of the flags."""

    fim_rate: float = 0.5
    fim_spm_rate: float = 0.5
    fim_extra_tokens: dict[str, str] | None = None
    """Texts of the tokens ``TOKENS``."""
    fim_split_sample: str | None = None
    fim_fragment_rate: float | None = None
    fim_no_prefix: str | None = None

    def __post_init__(self, s3_cache_path: str | None) -> None:
        super().__post_init__(s3_cache_path)
        if missing := set(TOKENS) - set(self.fim_extra_tokens or {}):
            raise UserError(f"fim_extra_tokens: has no {', '.join(sorted(missing))}; give the texts of these tokens")
        if self.fim_split_sample is not None and self.fim_fragment_rate is None:
            raise UserError("fim_split_sample: requires fim_fragment_rate (--fim-fragment-rate)")


class GPTFIMDataset(GPTDataset):
    """See the module; as ``GPTDataset``. Raises UserError for a token that the tokenizer does not have."""

    config: GPTFIMDatasetConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = self.config.fim_extra_tokens
        assert names is not None
        prefix, middle, suffix, _, self._end = (self._token(f"--fim-{role}-token", names[role]) for role in TOKENS)
        self._marks = prefix, middle, suffix
        split = self.config.fim_split_sample
        self._separator = None if split is None else self._token("--fim-split-sample", split)

    def _token(self, flag: str, text: str) -> int:
        index = self.config.tokenizer.vocab.get(text)
        if index is None:
            raise UserError(f"{flag} {text}: is not a token of the tokenizer; name one, or add it to the tokenizer")
        return int(index)

    def _text(self, idx: int) -> tuple[np.ndarray, int]:
        text, filled = super()._text(idx)
        draw = np.random.default_rng((self.config.random_seed, idx))
        permuted = self._permute_parts(text[:filled], self._end, draw, self._permute_fragments)[: len(text)]
        text[: len(permuted)] = permuted
        text[len(permuted) :] = self._pad
        return text, len(permuted)

    def _permute_parts(self, ids: np.ndarray, separator: int, draw: np.random.Generator, permute: Any) -> np.ndarray:
        """The ``separator`` ids stay."""
        ends = np.flatnonzero(ids == separator)
        parts = []
        for part in np.split(ids, ends + 1):
            closed = len(part) and part[-1] == separator
            body = part[:-1] if closed else part
            parts += [permute(body, draw) if len(body) else body, part[len(body) :]]
        return np.concatenate(parts)

    def _permute_fragments(self, ids: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Permute a segment, or with ``fim_split_sample`` its fragments."""
        if self._separator is None or not (ids == self._separator).any():
            return self._permute(ids, draw, self.config.fim_rate)
        if draw.random() >= self.config.fim_rate:
            return ids
        rate = self.config.fim_fragment_rate
        return self._permute_parts(ids, self._separator, draw, lambda part, draw: self._permute(part, draw, rate))

    def _permute(self, ids: np.ndarray, draw: np.random.Generator, rate: Any) -> np.ndarray:
        """Permute with probability ``rate``. Control tokens are left out of the text."""
        if draw.random() >= rate:
            return ids
        tokenizer = self.config.tokenizer
        special = tokenizer.all_special_ids
        text = tokenizer.detokenize([token for token in ids.tolist() if token not in special])
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return ids
        start, end = sorted(draw.integers(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (
            [*map(int, part)]
            for part in tokenizer.tokenize_sentences([text[:start], text[start:end], text[end:]], False)
        )
        prefix_id, middle_id, suffix_id = self._marks
        if draw.random() < self.config.fim_spm_rate:
            return np.array([prefix_id, suffix_id, *suffix, middle_id, *prefix, *middle], dtype=np.int64)
        return np.array([prefix_id, *prefix, suffix_id, *suffix, middle_id, *middle], dtype=np.int64)
