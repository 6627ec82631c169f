"""T5's samples: text in which spans of words are replaced by sentinels, and the spans as what the decoder writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron.core.config.errors import counted
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig
from megatron.core.datasets.megatron_dataset import Sample, special_id
from megatron.data.word_masking import MaskingRule, expected_masks, mask_words


@dataclass(kw_only=True)
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Settings of T5's data set; ``sequence_length`` is the encoder's."""

    sequence_length_encoder: int = field(init=False, default=0)
    """The encoder's length, ``sequence_length``."""

    sequence_length_decoder: int
    """The decoder's length."""

    def __post_init__(self, s3_cache_path: str | None) -> None:
        self.sequence_length_encoder = self.sequence_length
        super().__post_init__(s3_cache_path)

    @property
    def num_special_places(self) -> int:
        return 2  # nothing takes them, but the order of samples depends on it

    @property
    def needed_roles(self) -> tuple[str, ...]:
        return ("eos",)

    @cached_property
    def sentinels(self) -> list[int]:
        """The ids that stand for spans, in their order; none where the tokenizer knows of none."""
        try:
            return [int(index) for index in self.tokenizer.additional_special_tokens_ids]
        except (AttributeError, NotImplementedError, ValueError):
            return []

    def problems(self) -> Iterator[str]:
        """Yield the base class's problems, then: a decoder length too short for the expected spans, too few sentinels,
        a tokenizer without bos and pad tokens. Lengths are not checked for an invalid masking probability."""
        yield from super().problems()
        if not 0 < self.masking_probability < 1:
            return
        masked, spans = expected_masks(self.sequence_length, self.masking_probability, self.masking_max_ngram)
        if self.sequence_length_decoder < masked + spans + 1:
            yield (
                f"--decoder-seq-length {self.sequence_length_decoder}: with --encoder-seq-length {self.sequence_length}"
                f" and --mask-prob {self.masking_probability} the decoder has about {counted(masked, 'masked token')}, "
                f"{counted(spans, 'sentinel')} and a start token to take; at least {masked + spans + 1}"
            )
        if len(self.sentinels) < spans:
            yield (
                f"--vocab-extra-ids: the tokenizer has {counted(len(self.sentinels), 'sentinel')}, but a sample has "
                f"about {counted(spans, 'span')}; give --vocab-extra-ids {max(100, spans)}"
            )
        if special_id(self.tokenizer, "bos") is None and special_id(self.tokenizer, "pad") is None:
            yield "--tokenizer-type: the tokenizer has neither a bos nor a pad token, with which decoder inputs start"


class T5MaskedWordPieceDataset(MaskedWordPieceDataset):
    """See the module; arguments as for ``MaskedWordPieceDataset``.

    ``dataset[i]`` is a dict of int64 arrays: ``text_enc`` [encoder] (each span replaced by its sentinel, then 0),
    ``text_dec`` [decoder] (bos, or pad if the tokenizer lacks bos, then each sentinel and its span, then 0),
    ``labels`` [decoder] (the same without bos, then eos, then -1), ``loss_mask`` [decoder], ``enc_mask`` [encoder]
    and ``dec_mask`` [decoder] (1 on real tokens, by length), and the int ``truncated`` (1: tokens were dropped).

    A sample masks no further word once all sentinels are used or the decoder is full."""

    config: T5MaskedWordPieceDatasetConfig

    @staticmethod
    def config_attention_mask(
        encoder_tokens: object, decoder_tokens: object, encoder_mask: Any, decoder_mask: Any, use_local: bool = False
    ) -> tuple[object, object, object]:
        """Return masks of encoder, decoder and cross-attention, True where hidden, as programs pass them to a model,
        from bool tensors [b, e] and [b, s] that are True where hidden: with ``use_local`` [b, 1, queries, keys], else
        encoder [b, 1, 1, keys], None (causal) and the pair (decoder, encoder). The tokens are ignored."""
        encoder, decoder = encoder_mask[:, None, None], decoder_mask[:, None, None]
        if not use_local:
            return encoder, None, (decoder, encoder)
        length = decoder.shape[-1]
        future = decoder.new_ones((length, length)).triu(1)
        rows = decoder.transpose(2, 3)
        return encoder | encoder.transpose(2, 3), decoder | rows | future, encoder | rows

    def masking_rule(self) -> MaskingRule:
        room = self.config.sequence_length_decoder - 1  # bos, in the labels eos
        return replace(super().masking_rule(), max_spans=len(self.config.sentinels), max_marked=room)

    def __getitem__(self, idx: int) -> Sample:
        everything, _, target = self.sentences(idx)
        tokens = everything[:target]
        spans = mask_words(tokens, target, self.rule, self.random_state(idx))
        ids = tokens.tolist()
        encoder: list[int] = []
        decoder = [self.ids["pad"] if self.ids["bos"] is None else self.ids["bos"]]
        start = 0  # the last span
        for sentinel, span in zip(self.config.sentinels, spans):
            encoder += [*ids[start : span[0][0]], sentinel]
            decoder += [sentinel, *(index for _, index in span)]
            start = span[-1][0] + 1
        encoder += ids[start:]
        labels = [*decoder[1:], self.ids["eos"]]
        enc, dec = self.config.sequence_length_encoder, self.config.sequence_length_decoder
        decoder_mask = self.ones(len(decoder), dec)
        return {
            "text_enc": self.padded(encoder, enc),
            "text_dec": self.padded(decoder, dec),
            "labels": self.padded(labels, dec, -1),
            "loss_mask": decoder_mask.copy(),
            "truncated": int(len(everything) > target),
            "enc_mask": self.ones(len(encoder), enc),
            "dec_mask": decoder_mask,
        }
