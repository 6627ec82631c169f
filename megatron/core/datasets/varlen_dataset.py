"""Samples of different lengths for a decoder-only model: one per document, split after ``sequence_length`` tokens.

A document of n tokens has n - 1 positions with a label. Its sample ``i`` holds the positions from i x sequence length
on; documents of fewer than two tokens give none. Every epoch is shuffled separately, by (seed, epoch), so that sample k
is a function of (files, seed, k). Samples are not padded and never hold tokens of two documents; packing them into rows
is the planner's work (``core/schedules/variable_lengths.py``), which needs their lengths in advance."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTLowLevelDataset
from megatron.core.datasets.megatron_dataset import EmptySplitError
from megatron.core.safe_files import parse_json
from megatron.data import helpers
from megatron.data.index_cache import Layout

logger = logging.getLogger(__name__)

P95 = 1.6449
"""Standard deviations of a normal distribution at its 95th percentile."""


@dataclass(frozen=True)
class LogNormalLengths:
    """Log-normal document lengths in tokens, clipped to [shortest, longest]."""

    median: float
    sigma: float
    shortest: int
    maximum: int

    @classmethod
    def of_percentiles(cls, p50: float, p95: float, longest: int, shortest: int = 2) -> "LogNormalLengths":
        """Return the distribution with these percentiles before clipping."""
        return cls(p50, math.log(p95 / p50) / P95, shortest, longest)

    def draw(self, count: int, seed: int) -> np.ndarray:
        """Return ``count`` lengths, int32."""
        normal = np.random.default_rng(seed).standard_normal(count)
        lengths = np.exp(math.log(self.median) + self.sigma * normal)
        return np.clip(np.rint(lengths), self.shortest, self.maximum).astype(np.int32)


def parse_mock_lengths(text: str) -> LogNormalLengths:
    """Return the distribution of --varlen-mock-dataset-config-json. Raises UserError for other text."""
    flag = "--varlen-mock-dataset-config-json"
    try:
        options: Any = parse_json(text)
    except ValueError as error:
        raise UserError(f"{flag}: is not JSON ({error}); see its help") from None
    if not isinstance(options, Mapping):
        raise UserError(f"{flag}: must be a JSON object; see its help")
    options = {key: value for key, value in options.items() if key not in ("mode", "format")}
    kind = options.pop("type", "lognormal")
    shortest, maximum = options.pop("min_seq_len", 2), options.pop("max_seq_len", None)
    by_percentile = set(options) == {"p50", "p95"}
    if kind != "lognormal" or not (by_percentile or set(options) == {"mean_seq_len", "lognormal_sigma"}):
        raise UserError(
            f"{flag}: has {', '.join(sorted(options)) or 'no lengths'} for type {kind}; give type lognormal, "
            "max_seq_len, and mean_seq_len with lognormal_sigma, or p50 with p95"
        )
    numbers = [shortest, maximum, *options.values()]
    if not all(isinstance(number, int | float) and number > 0 for number in numbers) or not 2 <= shortest <= maximum:
        raise UserError(f"{flag}: lengths must be positive numbers, and 2 <= min_seq_len <= max_seq_len")
    if by_percentile:
        if options["p95"] < options["p50"]:
            raise UserError(f"{flag}: p95 {options['p95']} is below p50 {options['p50']}; exchange them")
        return LogNormalLengths.of_percentiles(options["p50"], options["p95"], int(maximum), int(shortest))
    sigma = options["lognormal_sigma"]
    return LogNormalLengths(options["mean_seq_len"] * math.exp(-(sigma**2) / 2), sigma, int(shortest), int(maximum))


@dataclass(kw_only=True)
class VarlenDatasetConfig(GPTDatasetConfig):
    """Settings of a data set of samples of different lengths."""

    mock_lengths: LogNormalLengths | None = None
    """Lengths of mock documents; None: uniform from 1 to 4095."""


class LengthStatistics:
    """Statistics of lengths, for the log."""

    def __init__(self, lengths: np.ndarray) -> None:
        ordered = np.sort(lengths)
        tail = ordered[-max(1, len(ordered) // 100) :]
        self.p50, self.p95 = (int(ordered[int(share * (len(ordered) - 1))]) for share in (0.5, 0.95))
        self.maximum = int(ordered[-1])
        self.tail_share = float(tail.sum() / ordered.sum())

    def __str__(self) -> str:
        return (
            f"p50 {self.p50}, p95 {self.p95}, maximum {self.maximum} tokens; the longest 1 % hold "
            f"{self.tail_share:.1%} of the tokens"
        )


class VarlenDataset(GPTDataset):
    """See the module; arguments as for ``GPTDataset``. ``dataset[i]`` has tokens and labels int64 [n], loss_mask
    float32 [n], position_ids int64 [n]; n = ``sample_lengths([i])[0]``. Raises EmptySplitError."""

    config: VarlenDatasetConfig

    size_needs_tokenizer = False

    @classmethod
    def samples_of_epochs(cls, num_epochs: int, *source: object) -> int:
        return num_epochs * cls.unbuilt(*source).samples_per_epoch

    def check_documents(self) -> None:
        self.extra_token = 1
        lengths = np.asarray(self.dataset.sequence_lengths)[self.indices].astype(np.int64)
        self.tokens_per_epoch = int(lengths.sum())
        counts = -(-np.maximum(lengths - 1, 0) // self.config.sequence_length)
        self.first_sample = np.concatenate(([0], np.cumsum(counts)))
        """Number of the first sample of each document within an epoch, int64 [documents + 1]."""
        self.samples_per_epoch = int(self.first_sample[-1])
        if not self.samples_per_epoch:
            raise EmptySplitError(
                f"{self.index_split.name} of {self.dataset_path or 'mock data'} has {len(lengths)} documents, none of "
                "them with two tokens; give it a larger share in --split, or other data"
            )
        count = self.samples_per_epoch if self.num_samples is None else self.num_samples
        self.num_samples = max(1, count)
        self.num_epochs = -(-self.num_samples // self.samples_per_epoch)

    def _build_indices(self) -> None:
        count, per_epoch, seed = self.num_samples, self.samples_per_epoch, self.config.random_seed
        assert count is not None

        def build() -> dict[str, np.ndarray]:
            order = np.tile(np.arange(per_epoch, dtype=np.int64), self.num_epochs)
            for epoch in range(self.num_epochs):
                generator = np.random.RandomState((seed + epoch) % 2**32)
                helpers.shuffle(order[epoch * per_epoch : (epoch + 1) * per_epoch], generator)
            return {"order": order[:count]}

        layout: Layout = {"order": ((count,), "int64")}
        identity = {"samples": count, "samples_per_epoch": per_epoch}
        self.order = self.index_cache(identity, layout, {"order": [(0, per_epoch - 1)]}).get(build)["order"]
        lengths = np.asarray(self.dataset.sequence_lengths)[self.indices]
        logger.log(
            self.config.source_log_level(self.index_split),
            "%s %s of %s: %d documents (%d split, %d without a sample), %d samples in %d epoch(s), documents: %s",
            type(self).__name__,
            self.index_split.name,
            self.dataset_path or "mock data",
            len(lengths),
            int((lengths > self.config.sequence_length + 1).sum()),
            int((lengths < 2).sum()),
            count,
            self.num_epochs,
            LengthStatistics(lengths),
        )

    def __len__(self) -> int:
        return len(self.order)

    def _pieces(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (document of the split, offset in it, length) of each sample, int64."""
        number = self.order[samples]
        document = np.searchsorted(self.first_sample, number, side="right") - 1
        offset = (number - self.first_sample[document]) * self.config.sequence_length
        lengths = np.asarray(self.dataset.sequence_lengths)[self.indices[document]].astype(np.int64)
        return document, offset, np.minimum(lengths - 1 - offset, self.config.sequence_length)

    def sample_lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the lengths of ``samples``, int64, without reading their tokens."""
        return self._pieces(np.asarray(samples))[2]

    def _text(self, idx: int) -> tuple[np.ndarray, int]:
        (document,), (offset,), (length,) = self._pieces(np.array([idx]))
        documents = self.indices[document : document + 1]
        text = np.empty(length + 1, dtype=np.int64)
        filled = self.dataset.gather(documents, int(offset), text)
        assert filled == len(text), "the index has other lengths than the data"
        if self._vocab_size is not None:
            self.check_tokens(text, self._vocab_size, documents, int(offset))
        return text, filled


class _MockDocuments(MockGPTLowLevelDataset):
    def __init__(self, tokenizer: Any, lengths: LogNormalLengths) -> None:
        self.max_sequence_length = lengths.maximum
        super().__init__(tokenizer)
        self.sequence_lengths = lengths.draw(self.size, self.seed)


class MockVarlenDataset(VarlenDataset):
    """Samples from mock documents: no files needed."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> MockGPTLowLevelDataset:
        if config.mock_lengths is None:
            return MockGPTLowLevelDataset(config.tokenizer)
        return _MockDocuments(config.tokenizer, config.mock_lengths)
