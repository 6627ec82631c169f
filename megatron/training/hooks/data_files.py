"""Notices data files that change under a run.

Token files are mapped. Where one is cut, reads beyond its new end kill the process, and reads in the rest of its last
page give zeros, which are tokens like any other. So sizes are compared at log points and before every save: no
checkpoint is written of weights that may have learned from such zeros.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.data.indexed_dataset import IndexedDataset
from megatron.training.config.launcher import local_rank
from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hook
from megatron.training.observe.metrics import StepMetrics
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)

SHARE_OF_TIME = 0.01
"""Thousands of files on a busy network file system: log points are passed over so that looking costs no more."""


def opened_files(datasets: Iterable[Any]) -> Iterator[IndexedDataset]:
    """The token files below blends, splits and lists of data sets; those of other kinds are their owner's business."""
    for dataset in datasets:
        if isinstance(dataset, IndexedDataset):
            yield dataset
        elif isinstance(dataset, list | tuple):
            yield from opened_files(dataset)
        elif dataset is not None:
            parts = vars(dataset) if hasattr(dataset, "__dict__") else {}
            yield from opened_files([parts.get("dataset"), parts.get("datasets")])


class DataFilesHook(Hook):
    """Compares the files of ``datasets`` with what they were when they were opened.

    Raises:
        IndexedDatasetError: one is shorter than it was.
    """

    def __init__(self, datasets: Iterable[Any], log_interval: int) -> None:
        self.files = list({data.path_prefix: data for data in opened_files(datasets)}.values())
        self.log_interval = log_interval
        self.reported: set[str] = set()
        self._not_before = 0.0

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        if every(self.log_interval, state.iteration) and time.monotonic() >= self._not_before:
            self.check()

    def on_save(self, state: TrainState) -> None:
        self.check()

    def check(self) -> None:
        """Raise for a file that was cut; warn once of any other change, which does no harm to what is mapped."""
        start = time.monotonic()
        for data in self.files:
            for change in data.changes():
                if change not in self.reported:
                    self.reported.add(change)
                    logger.warning("WARNING: %s", change)
        end = time.monotonic()
        self._not_before = end + (end - start) / SHARE_OF_TIME


def data_file_hooks(datasets: Iterable[Any], log_interval: int) -> list[Hook]:
    """The hook, on one rank of each host: the others see the same files."""
    hook = DataFilesHook(datasets, log_interval)
    return [hook] if hook.files and local_rank() == 0 else []
