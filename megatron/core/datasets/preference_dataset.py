"""Rows of packed preference pairs: both sequences of a pair are in one row, so that no rank needs another one's part.

A row is a function of (file, tokenizer, template, length, seed, number), as in :class:`SFTDataset`."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megatron.core.config.errors import counted
from megatron.core.datasets.conversations.preferences import PREFERENCES
from megatron.core.datasets.megatron_dataset import EmptySplitError, Sample
from megatron.core.datasets.sft_dataset import ConversationFile, SFTDataset, SFTDatasetConfig


class PreferenceDataset(SFTDataset):
    """See the module. ``dataset[i]`` has the tensors of :class:`SFTDataset` and ``completions`` int64 [s]: 2k for
    labels of the chosen completion of the row's pair k, 2k + 1 for those of the rejected one, -1 for prompts and
    padding. Pairs longer than a row are left out and counted in the log: a cut would compare parts of answers. Raises
    EmptySplitError if no pair remains."""

    reference_losses: np.ndarray | None = None
    """Loss of each token of the file as a label under the reference model, fp32; adds ``reference`` [s] to rows."""

    reason_left_out = "the two sequences of their pair are longer than a row"

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: SFTDatasetConfig) -> ConversationFile:
        return ConversationFile(dataset_path, config, PREFERENCES)

    def check_documents(self) -> None:
        """Select the pairs of this split. Raises EmptySplitError if none fits into a row."""
        file, length = self.dataset, self.config.sequence_length
        first, last = (int(self.indices[0]), int(self.indices[-1]) + 1) if len(self.indices) else (0, 0)
        pairs = np.arange(*np.searchsorted(file.lines, [first + 1, last + 1])).reshape(-1, 2)
        fits = file.lengths[pairs].sum(1) - 2 <= length
        self.sequences, self.lost = pairs[fits].ravel(), pairs[~fits].ravel()
        if not len(self.sequences):
            line = f", the first in line {file.lines[self.lost[0]]}" if len(self.lost) else ""
            raise EmptySplitError(
                f"{self.dataset_path}: {self.index_split.name} has no pair to train on in {last - first} lines of "
                f"{file.report.lines}; {counted(len(self.lost) // 2, 'pair')} longer than --seq-length {length}{line}; "
                "raise --seq-length, or give this split a larger share in --split"
            )

    @cached_property
    def positions(self) -> np.ndarray:
        """Positions that each selected pair takes of a row, int64."""
        return (self.dataset.lengths[self.sequences] - 1).reshape(-1, 2).sum(1)

    def squares(self) -> np.ndarray:
        """Return the sum of squared lengths of each pair, int64."""
        return ((self.dataset.lengths[self.sequences] - 1).reshape(-1, 2) ** 2).sum(1)

    def row_sequences(self, row: int) -> np.ndarray:
        """Return the numbers in the file of the sequences of a row: of each pair the chosen, then the rejected one."""
        pairs = self.rows.order[self.rows.bounds[row] : self.rows.bounds[row + 1]]
        return self.sequences.reshape(-1, 2)[pairs].ravel()

    def __getitem__(self, idx: int) -> Sample:
        sample = super().__getitem__(idx)
        lengths = np.diff(sample["cu_seqlens"])
        completions = np.where(sample["loss_mask"] > 0, np.repeat(np.arange(len(lengths)), lengths), -1)
        if self.reference_losses is not None:
            places = self.label_places(idx)
            sample = {**sample, "reference": np.where(places < 0, np.float32(0), self.reference_losses[places])}
        return {**sample, "completions": completions}

    def label_places(self, row: int) -> np.ndarray:
        """Return the index in the file of each label of a row, int64 [s]; -1 for padding."""
        places, end = np.full(self.config.sequence_length, -1), 0
        for number in self.row_sequences(row).tolist():
            start, count = int(self.dataset.starts[number]) + 1, int(self.dataset.lengths[number]) - 1
            places[end : end + count] = np.arange(start, start + count)
            end += count
        return places
