"""Rows of packed conversations for supervised fine-tuning (--sft), read from JSON lines files.

A sequence of n tokens takes n - 1 positions of a row: its last token is only a label. Each sequence is one document: it
attends to itself, counts positions from 0, and has a loss at its answers only. A row is a function of (file, tokenizer,
template, length, seed, number); it does not depend on the layout, so that context parallelism needs no padding in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from megatron.core.config.errors import UserError, counted
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.conversations.packing import Rows, best_fit_decreasing, pack_epochs
from megatron.core.datasets.conversations.prepare import CONVERSATIONS, DTYPES, Reader, prepared
from megatron.core.datasets.megatron_dataset import EmptySplitError, MegatronDataset, Sample
from megatron.core.tokenizers.base import Tokenizer
from megatron.data.index_cache import IndexCache, Layout

logger = logging.getLogger(__name__)

LOSS_BEGIN, LOSS_END = "⟦", "⟧"


@dataclass(kw_only=True)
class SFTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of :class:`SFTDataset`."""

    reads_text: ClassVar[bool] = True

    packing: bool = True
    """Pack several sequences into a row."""


class ConversationFile:
    """Tokenized conversations of a JSON lines file, or its preference pairs."""

    def __init__(self, path: str, config: SFTDatasetConfig, reader: Reader = CONVERSATIONS) -> None:
        arrays, self.report, self.key = prepared(path, config.tokenizer, config.path_to_cache, reader)
        self.tokens, self.lengths, self.firsts, self.lines, self.items = (arrays[name] for name in DTYPES)
        self.starts = np.cumsum(self.lengths) - self.lengths

    def sequence(self, number: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first ``most`` ids, int64 [n], and whether each is in the loss, bool [n]."""
        start = int(self.starts[number])
        stored = self.tokens[start : start + int(self.cut_lengths(np.array([number]), most)[0])].astype(np.int64)
        return np.where(stored < 0, -1 - stored, stored), stored >= 0

    def cut_lengths(self, numbers: np.ndarray, most: int) -> np.ndarray:
        """Return the lengths of sequences, cut at the end to at most ``most`` ids, int64."""
        return np.minimum(self.lengths[numbers], most)


class SFTDataset(MegatronDataset):
    """See the module. ``dataset[i]`` has tokens, labels and position_ids int64 [s], loss_mask float32 [s], and
    ``cu_seqlens`` int32, the bounds of its sequences; padding at the end is a document without loss. Sequences longer
    than s + 1 are cut at the end; sequences without a loss in the rest are left out. Both are counted in the log.
    Raises EmptySplitError if no sequence remains."""

    sequence_name = "line"
    reason_left_out: ClassVar[str] = "no answer begins before the cut"
    config: SFTDatasetConfig

    def __init__(self, *source: Any) -> None:
        super().__init__(*source)
        self.check_documents()
        self._pack()
        self._log()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: ConversationFile) -> int:
        return low_level_dataset.report.lines

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: SFTDatasetConfig) -> ConversationFile:
        return ConversationFile(dataset_path, config)

    def check_documents(self) -> None:
        """Select the sequences of this split. Raises EmptySplitError if none has a loss."""
        file, most = self.dataset, self.config.sequence_length + 1
        first, last = (int(self.indices[0]), int(self.indices[-1]) + 1) if len(self.indices) else (0, 0)
        chosen = np.arange(*np.searchsorted(file.lines, [first + 1, last + 1]))
        has_loss = file.firsts[chosen] < file.cut_lengths(chosen, most)
        self.sequences = chosen[has_loss]
        self.lost = chosen[~has_loss]
        """Sequences without a token to train on in the first s + 1 tokens."""
        if not len(self.sequences):
            line = f", the first in line {file.lines[self.lost[0]]}" if len(self.lost) else ""
            raise EmptySplitError(
                f"{self.dataset_path}: {self.index_split.name} has no answer to train on in {last - first} lines of "
                f"{file.report.lines}; {counted(len(self.lost), 'conversation')} lost the answers by --seq-length "
                f"{most - 1}{line}; raise --seq-length, or give this split a larger share in --split"
            )

    @cached_property
    def positions(self) -> np.ndarray:
        """Positions that each selected sequence takes of a row, int64."""
        return self.dataset.cut_lengths(self.sequences, self.config.sequence_length + 1) - 1

    @cached_property
    def rows_per_epoch(self) -> int:
        """Rows of one pass over the sequences."""
        if not self.config.packing:
            return len(self.positions)
        return len(best_fit_decreasing(np.sort(self.positions)[::-1].tolist(), self.config.sequence_length))

    @classmethod
    def samples_of_epochs(cls, num_epochs: int, *source: object) -> int:
        """Build no plan and log nothing."""
        return num_epochs * cls.unbuilt(*source).rows_per_epoch

    def _pack(self) -> None:
        positions, length, config = self.positions, self.config.sequence_length, self.config
        count = self.rows_per_epoch if self.num_samples is None else max(1, self.num_samples)
        self.num_epochs = -(-count // self.rows_per_epoch)
        items, rows = len(positions) * self.num_epochs, self.rows_per_epoch * self.num_epochs
        layout: Layout = {"order": ((items,), "int64"), "bounds": ((rows + 1,), "int64")}
        identity = {
            "conversations": self.dataset.key,
            "sequence_length": length,
            "multiple": 1,  # context-parallel ranks split rows, not sequences: there is no padding between them
            "lines": [int(self.indices[0]), int(self.indices[-1])],
            "seed": config.random_seed,
            "epochs": self.num_epochs,
            "packing": config.packing,
        }
        folder = config.path_to_cache or f"{self.dataset_path}.cache"
        bounds = {"order": [(0, len(positions) - 1)], "bounds": [(0, items)]}
        cache = IndexCache(folder, f"rows-{self.index_split.name}", identity, layout, bounds)

        def build() -> dict[str, np.ndarray]:
            return pack_epochs(positions, length, config.random_seed, self.num_epochs, config.packing)._asdict()

        self.rows = Rows(**cache.get(build))
        self.count = count

    def _log(self) -> None:
        file, config, split = self.dataset, self.config, self.index_split
        lengths, level = file.lengths[self.sequences], config.source_log_level(split)
        beyond = lengths - config.sequence_length - 1
        fill = self.positions.sum() / (self.rows_per_epoch * config.sequence_length)
        first = f" (first: line {file.lines[self.lost[0]]})" if len(self.lost) else ""
        text = (
            f"{split.name} of {self.dataset_path}: {len(lengths)} sequences in {self.rows_per_epoch} rows of "
            f"{config.sequence_length} tokens ({fill:.1%} filled), {self.count} rows in {self.num_epochs} epoch(s); "
            f"{int((beyond > 0).sum())} sequences cut at the end ({int(beyond.clip(min=0).sum())} tokens), "
            f"{len(self.lost)} left out because {self.reason_left_out}{first}"
        )
        logger.log(level, "%s", text)
        if split.name == "train":
            for sentence in file.report.text():
                logger.log(level, "  %s", sentence)
            logger.log(level, "first sample, the loss in %s %s: %s", LOSS_BEGIN, LOSS_END, next(self.describe(0)))

    def __len__(self) -> int:
        return self.count

    def row_sequences(self, row: int) -> np.ndarray:
        """Return the numbers in the file of the sequences of a row."""
        return self.sequences[self.rows.order[self.rows.bounds[row] : self.rows.bounds[row + 1]]]

    def squares(self) -> np.ndarray:
        """Return the sum of squared lengths of each item that is packed, int64."""
        return self.positions**2

    @cached_property
    def _squares(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.squares()[self.rows.order])])

    def attention_costs(self, rows: np.ndarray) -> np.ndarray:
        """Return the sum of squared lengths of the sequences of each of ``rows``, int64, without reading tokens."""
        return self._squares[self.rows.bounds[rows + 1]] - self._squares[self.rows.bounds[rows]]

    def __getitem__(self, idx: int) -> Sample:
        if not 0 <= idx < self.count:
            raise IndexError(f"row {idx} of {self.count}")
        length, numbers = self.config.sequence_length, self.row_sequences(idx)
        sample = {name: np.zeros(length, dtype=np.int64) for name in ("tokens", "labels", "position_ids")}
        mask = np.zeros(length, dtype=np.float32)
        bounds = [0]
        for number in numbers.tolist():
            ids, trained = self.dataset.sequence(number, length + 1)
            place = slice(bounds[-1], bounds[-1] + len(ids) - 1)
            sample["tokens"][place], sample["labels"][place], mask[place] = ids[:-1], ids[1:], trained[1:]
            sample["position_ids"][place] = np.arange(len(ids) - 1)
            bounds.append(place.stop)
        if not mask.any():
            lines = ", ".join(str(line) for line in self.dataset.lines[numbers].tolist())
            raise UserError(f"{self.dataset_path}, line {lines}: no token has a loss; remove these lines")
        if bounds[-1] < length:
            sample["position_ids"][bounds[-1] :] = np.arange(length - bounds[-1])
            bounds.append(length)
        return {**sample, "loss_mask": mask, "cu_seqlens": np.array(bounds, dtype=np.int32)}

    def describe(self, row: int) -> Iterator[str]:
        """Yield the line and the text of each sequence of a row, its tokens with a loss in brackets ⟦ ⟧."""
        for number in self.row_sequences(row).tolist():
            ids, trained = self.dataset.sequence(number, self.config.sequence_length + 1)
            text = marked(self.config.tokenizer, ids, trained)
            yield f"line {self.dataset.lines[number]} ({len(ids)} tokens, {int(trained[1:].sum())} with a loss): {text}"


def marked(tokenizer: Tokenizer, ids: np.ndarray, trained: np.ndarray) -> str:
    """Return the text of ``ids`` with brackets ⟦ ⟧ around tokens in the loss."""
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    pieces = []
    for start, stop in zip(edges, edges[1:]):
        text = tokenizer.detokenize(ids[start:stop].tolist())
        pieces.append(f"{LOSS_BEGIN}{text}{LOSS_END}" if trained[start] else text)
    return "".join(pieces)
