"""Samples of ``sequence_length`` tokens for a decoder-only model, cut from concatenated shuffled documents.

A sample is a function of (files, seed, number); nothing in a data set changes after construction, and every array it
returns is the caller's own. Document boundaries inside a sample are given as cumulative lengths, never as a dense mask.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.config.errors import UserError, counted
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import EmptySplitError, MegatronDataset, Sample, special_id
from megatron.data.blend import Split
from megatron.data.gpt_index import EpochPlan, GPTIndices, build_gpt_indices, plan_epochs
from megatron.data.helpers import count_samples
from megatron.data.index_cache import Layout
from megatron.data.indexed_dataset import IndexedDataset, resolve_prefix

logger = logging.getLogger(__name__)

NO_PAD = -1  # an id that no data holds


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of a GPT data set: how samples are cut and what goes with them."""

    reset_position_ids: bool = False
    """Positions start at 0 after each end-of-document token."""

    reset_attention_mask: bool = False
    """Samples carry ``cu_seqlens``, the document boundaries that attention must not cross."""

    eod_mask_loss: bool = False
    """No loss where the input is an end-of-document token."""

    create_attention_mask: bool = True
    """Accepted for existing programs; a dense mask is never made."""

    drop_last_partial_validation_sequence: bool = True
    """Leave out the last, shorter sample of a full validation pass instead of padding it."""

    add_extra_token_to_sequence: bool = True
    """Draw one token more than the sequence length, so that the last position has a label too."""

    vocab_size: int | None = None
    """Token ids must be below this; None takes the tokenizer's."""

    context_parallel_size: int = 1
    """Accepted for existing programs, as the next two: a sample does not depend on the layout."""

    data_parallel_size: int = 1

    sequence_parallel_size: int = 0

    hybrid_context_parallel: bool | None = False
    """Context-parallel groups of a size that depends on the sequence: not for samples of equal length."""

    inter_document_masking: bool | None = False
    """Attention within documents only; not available under this name: see ``reset_attention_mask``."""

    def __post_init__(self, s3_cache_path: str | None) -> None:
        super().__post_init__(s3_cache_path)
        if self.hybrid_context_parallel:
            raise UserError(
                "hybrid_context_parallel: requires samples of different lengths (VarlenDataset); set it to False"
            )
        if self.inter_document_masking:
            raise UserError("inter_document_masking: not available; use reset_attention_mask (--reset-attention-mask)")


class GPTDataset(MegatronDataset):
    """See the module; arguments as for ``MegatronDataset``.

    ``dataset[i]`` is a dict of numpy arrays: ``tokens`` int64[s], ``labels`` int64[s], ``loss_mask`` float32[s],
    ``position_ids`` int64[s] and, with ``reset_attention_mask``, ``cu_seqlens`` int32[documents in the sample + 1].
    ``dataset[None]`` is a sample without loss that pads a batch. Raises EmptySplitError: a ValueError; not one sample
    can be cut from the documents."""

    def __init__(
        self,
        indexed_dataset: object,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ):
        """Build the indices or read them from the index cache."""
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self.config: GPTDatasetConfig = config
        self._pad = _padding_id(config)
        self._eod = _end_of_document(config)
        self._vocab_size = config.vocab_size
        if self._vocab_size is None and config.tokenizer is not None:
            self._vocab_size = config.tokenizer.vocab_size
        self.check_documents()
        self._build_indices()

    def _build_indices(self) -> None:
        self.num_epochs = self.plan.num_epochs
        indices = self._build_or_load()
        self.document_index = indices.document_index
        self.sample_index = indices.sample_index
        self.shuffle_index = indices.shuffle_index
        logger.log(
            self.config.source_log_level(self.index_split),
            "%s %s of %s: %d documents, %d tokens, %d samples in %d epoch(s)",
            type(self).__name__,
            self.index_split.name,
            self.dataset_path or "mock data",
            len(self.indices),
            self.tokens_per_epoch,
            len(self),
            self.plan.num_epochs,
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str, config: GPTDatasetConfig
    ) -> "IndexedDataset | MockGPTLowLevelDataset":
        """Open the indexed data set at ``dataset_path`` (a prefix, also without its default suffix). Raises UserError
        for mock settings, or if it stores several sentences per document; MissingDatasetError if a file is missing."""
        if config.mock:
            raise UserError(
                "no data: give --data-path (or another source of data), or --mock-data for synthetic samples"
            )
        source = IndexedDataset(resolve_prefix(dataset_path), multimodal=False, mmap=config.mmap_bin_files)
        documents = len(source.document_indices) - 1
        if documents < len(source):
            raise UserError(
                f"{source.path_prefix} holds sentences, {len(source)} of {documents} documents, which would be joined "
                "in random order: for GPT make the data with tools/preprocess_data.py without --split-sentences"
            )
        return source

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    def __getitem__(self, idx: int | None) -> Sample:
        """Return sample ``idx`` as new arrays. None gives sample 0 with a loss mask of zeros (padding of the last
        batch). Raises UserError for an id outside the vocabulary."""
        text, filled = self._text(0 if idx is None else idx)
        if self.extra_token:
            tokens, labels = text[:-1].copy(), text[1:].copy()
        else:
            tokens, labels = text, np.append(text[1:], self._pad)
        sample = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": np.ones(len(tokens), dtype=np.float32),
            "position_ids": np.arange(len(tokens), dtype=np.int64),
        }
        if self._eod is not None:
            self._add_document_boundaries(sample)
        if self._pad >= 0 or filled < len(text) or not self.extra_token:
            self._mask_padding(sample)
        if idx is None:
            sample["loss_mask"][:] = 0.0
        return sample

    def _text(self, idx: int) -> tuple[np.ndarray, int]:
        """Return (int64 [s + extra], padded at the end; number of tokens before the padding)."""
        position = int(self.shuffle_index[idx])
        (first, offset), (last, _) = self.sample_index[position : position + 2].tolist()
        text = np.empty(self.config.sequence_length + self.extra_token, dtype=np.int64)
        documents = self.document_index[first : last + 1]
        filled = self.dataset.gather(documents, offset, text)
        text[filled:] = self._pad
        if self._vocab_size is not None:
            self.check_tokens(text[:filled], self._vocab_size, documents, offset)
        return text, filled

    def _add_document_boundaries(self, sample: Sample) -> None:
        tokens = sample["tokens"]
        ends = np.flatnonzero(tokens == self._eod)
        if self.config.eod_mask_loss:
            sample["loss_mask"][ends] = 0.0
        bounds = np.concatenate(([0], ends + 1, [len(tokens)] if not len(ends) or ends[-1] + 1 < len(tokens) else []))
        bounds = bounds.astype(np.int64)
        if self.config.reset_position_ids:
            sample["position_ids"] -= np.repeat(bounds[:-1], np.diff(bounds))
        if self.config.reset_attention_mask:
            sample["cu_seqlens"] = bounds.astype(np.int32)

    def _mask_padding(self, sample: Sample) -> None:
        """No loss where the label is padding; padding becomes id 0, which every embedding has."""
        padded = sample["labels"] == self._pad
        if padded.any():
            sample["loss_mask"][padded] = 0.0
            sample["labels"][padded] = 0
        sample["tokens"][sample["tokens"] == self._pad] = 0

    def _count_tokens(self) -> int:
        lengths, count = self.dataset.sequence_lengths, len(self.indices)
        first = int(self.indices[0]) if count else 0
        chosen = lengths[first : first + count] if self.documents_are_a_range else lengths[self.indices]
        return int(chosen.sum(dtype=np.int64))

    size_needs_tokenizer = False

    @classmethod
    def samples_of_epochs(cls, num_epochs: int, *source: object) -> int:
        """A sample may begin in one pass and end in the next. Builds no index."""
        unbuilt = cls.unbuilt(*source)
        return count_samples(
            num_epochs * unbuilt.tokens_per_epoch, unbuilt.config.sequence_length, True, unbuilt.extra_token
        )

    def check_documents(self) -> None:
        """Counts tokens and the epochs that they are needed for."""
        self.extra_token = int(self.config.add_extra_token_to_sequence)
        self.tokens_per_epoch = self._count_tokens()
        self.plan = self._plan()

    def _drops_partial(self) -> bool:
        return self.index_split != Split.valid or self.config.drop_last_partial_validation_sequence

    def _plan(self) -> EpochPlan:
        """Raises EmptySplitError, with sizes and fixes, if the split has too few tokens for one sample."""
        length, extra = self.config.sequence_length, self.extra_token
        if self.tokens_per_epoch:
            plan = plan_epochs(self.tokens_per_epoch, self.num_samples, length, extra)
            tokens = plan.num_epochs * self.tokens_per_epoch
            if count_samples(tokens, length, self._drops_partial(), extra) > 0:
                return plan
        what = "a full pass" if self.num_samples is None else counted(self.num_samples, "sample")
        raise EmptySplitError(
            f"{what} of {self.index_split.name} asked of {self.dataset_path or 'mock data'}, but that split has "
            f"{len(self.indices)} documents with {self.tokens_per_epoch} tokens, and one sample needs "
            f"{length + extra}: give it a larger share in --split (now {self.config.split}), more data, or a smaller "
            "--seq-length; or ask no samples of it (--eval-iters 0)"
        )

    def _build_or_load(self) -> GPTIndices:
        """Cached arrays are checked. int32 where all numbers fit, else int64."""
        length, plan = self.config.sequence_length, self.plan
        drop = self._drops_partial()

        def build() -> dict[str, np.ndarray]:
            lengths = self.dataset.sequence_lengths
            seed = self.config.random_seed
            return vars(build_gpt_indices(lengths, self.indices, plan, length, seed, drop, self.extra_token))

        samples = count_samples(plan.num_epochs * plan.tokens_per_epoch, length, drop, self.extra_token)
        documents = plan.num_epochs * len(self.indices)
        narrow = int(self.indices.max()) <= np.iinfo(np.int32).max
        sample_dtype = "int32" if narrow and documents <= np.iinfo(np.int32).max else "int64"
        layout: Layout = {
            "document_index": ((documents,), "int32" if narrow else "int64"),
            "sample_index": ((samples + 1, 2), sample_dtype),
            "shuffle_index": ((samples,), "uint32" if samples < np.iinfo(np.uint32).max - 1 else "int64"),
        }
        max_length = int(self.dataset.sequence_lengths.max())
        bounds = {
            "document_index": [(int(self.indices.min()), int(self.indices.max()))],
            "sample_index": [(0, documents), (0, max_length)],
            "shuffle_index": [(0, samples - 1)],
        }
        identity = {
            "num_epochs": plan.num_epochs,
            "samples_before_final_epoch": plan.samples_before_final_epoch,
            "extra_token": self.extra_token,
            "drop_last_partial_sequence": drop,
        }
        return GPTIndices(**self.index_cache(identity, layout, bounds).get(build))


def _end_of_document(config: GPTDatasetConfig) -> int | None:
    """Return the id if masks, positions or the loss depend on it. Raises UserError if the tokenizer has none."""
    if not (config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss):
        return None
    eod = None if config.tokenizer is None else config.tokenizer.eod
    if eod is None:
        raise UserError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need a tokenizer with an end-of-document "
            "token; this one has none"
        )
    return int(eod)


def _padding_id(config: GPTDatasetConfig) -> int:
    """Without padding, or if it equals end-of-document, return an id that no data contains: else text is masked."""
    pad = special_id(config.tokenizer, "pad")
    if pad is None:
        return NO_PAD
    if pad == config.tokenizer.eod and not config.allow_ambiguous_pad_tokens:
        logger.info("the tokenizer pads with its end-of-document id %d: only real padding is masked", pad)
        return NO_PAD
    return pad


class MockGPTLowLevelDataset:
    """100,000 documents that count upwards, of 1 to 4095 tokens, each ended by the end-of-document token. A model
    learns from them that the next token is one more. In a smaller vocabulary, counting starts again at 1."""

    seed = 0
    size = 100_000
    max_sequence_length = 4096

    def __init__(self, tokenizer: Any):
        """Draw the lengths of all documents from a fixed seed. Ids count from 1 below the vocabulary size without the
        end-of-document id, which ``tokenizer`` must have."""
        self.eod = int(tokenizer.eod)
        generator = np.random.default_rng(seed=self.seed)
        self.sequence_lengths = generator.integers(1, self.max_sequence_length, size=self.size, dtype=np.int32)
        ids = np.arange(1, max(2, min(int(tokenizer.vocab_size), self.max_sequence_length)), dtype=np.int64)
        ids = ids[ids != self.eod] if len(ids) > 1 else ids
        self._counting = np.resize(ids, self.max_sequence_length)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> np.ndarray:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Same as ``IndexedDataset.get``."""
        document = np.append(self._counting[: int(self.sequence_lengths[idx]) - 1], self.eod)
        return document[offset:] if length is None else document[offset : offset + length]

    def gather(self, sequences: np.ndarray, offset: int, out: np.ndarray) -> int:
        """Copy concatenated tokens into ``out`` until it is full; return the number of tokens copied."""
        filled = 0
        for idx in sequences.tolist():
            part = self.get(idx, offset, len(out) - filled)
            out[filled : filled + len(part)] = part
            filled, offset = filled + len(part), 0
        return filled


class MockGPTDataset(GPTDataset):
    """GPT samples from ``MockGPTLowLevelDataset``: no files needed."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> MockGPTLowLevelDataset:
        return MockGPTLowLevelDataset(config.tokenizer)
