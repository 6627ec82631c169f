"""Detect data files that change during a run.

Token files are memory-mapped. If one is truncated, reads in the rest of its last page return zeros, which are valid
tokens, and reads beyond that page raise SIGBUS. Sizes are therefore compared at log points and before every save, so
that no checkpoint holds weights that were trained on such zeros. SIGBUS, and the death of a DataLoader worker, end the
run with a message that names the truncated file."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator

from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetError
from megatron.training.config.launcher import launched_rank, local_rank
from megatron.training.exits.conditions import every
from megatron.training.exits.endings import notify_launcher, say
from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.save import SAVING
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import Record, RecordKind, RunInfo
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)

SHARE_OF_TIME = 0.01
"""Maximum fraction of the run time for checks: many files on a slow network file system skip log points."""


def opened_files(datasets: Iterable[object]) -> Iterator[IndexedDataset]:
    """Yield the `IndexedDataset` objects in ``datasets``, also those nested in lists and in the attributes ``dataset``
    and ``datasets`` of other objects. Ignores other types and None. May yield one file several times."""
    for dataset in datasets:
        if isinstance(dataset, IndexedDataset):
            yield dataset
        elif isinstance(dataset, list | tuple):
            yield from opened_files(dataset)
        elif dataset is not None:
            parts = vars(dataset) if hasattr(dataset, "__dict__") else {}
            yield from opened_files([parts.get("dataset"), parts.get("datasets")])


class DataFilesHook(Hook):
    """Compares the files of ``datasets`` with their state when opened; IndexedDatasetError if one was truncated."""

    def __init__(self, datasets: Iterable[object], log_interval: int) -> None:
        self.files = list({data.path_prefix: data for data in opened_files(datasets)}.values())
        self.log_interval = log_interval
        self.reported: set[str] = set()
        self._not_before = 0.0

    kinds = (SAVING,)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        if every(self.log_interval, state.iteration) and time.monotonic() >= self._not_before:
            self.check()

    def on_record(self, kind: RecordKind, record: Record) -> None:
        self.check()

    def check(self) -> None:
        """Compare all files now; raise IndexedDatasetError for a truncated file. Log any other change as a warning,
        each once. Then skip checks at log points until this check has taken at most 1 % of the time."""
        start = time.monotonic()
        for data in self.files:
            for change in data.changes():
                if change not in self.reported:
                    self.reported.add(change)
                    logger.warning("WARNING: %s", change)
        end = time.monotonic()
        self._not_before = end + (end - start) / SHARE_OF_TIME


def truncated_file(datasets: Iterable[object]) -> IndexedDatasetError | None:
    """Compare all token files inside ``datasets`` with their state when opened; return (not raise) the error of the
    first truncated file, or None. Ignores other changes."""
    try:
        for data in opened_files(datasets):
            list(data.changes())
    except IndexedDatasetError as error:
        return error
    return None


class BusErrorGuard(Hook):
    """End the process with a message on SIGBUS if a data file was truncated. Python's own signal handlers run between
    bytecodes, but the read that faults never completes. So the handler is set through the C library and runs inside the
    faulting read. If no file was truncated it restores the previous handler (the stacks of ``faulthandler``), which the
    same read then reaches."""

    def __init__(self, datasets: Iterable[object]) -> None:
        self.datasets = list(datasets)
        self._library = ctypes.CDLL(None)
        self._library.signal.argtypes, self._library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._report)  # must outlive its registration
        self._previous: int | None = None

    def on_start(self, run: RunInfo) -> None:
        self._previous = self._library.signal(signal.SIGBUS, ctypes.cast(self._callback, ctypes.c_void_p))

    def on_end(self) -> None:
        self._library.signal(signal.SIGBUS, self._previous)

    def _report(self, number: int) -> None:
        """Inside the faulting read: if a data file was truncated, print its error and exit immediately. Otherwise
        restore the previous handler; the read then faults again."""
        error = truncated_file(self.datasets)
        if error is None:
            self._library.signal(signal.SIGBUS, self._previous)
            return
        say(str(error), launched_rank())
        notify_launcher(str(error))
        os._exit(error.exit_code)


def data_file_hooks(datasets: Iterable[object], log_interval: int) -> list[Hook]:
    """Return the hooks for the token files inside ``datasets``; empty without any. `BusErrorGuard` on every rank, then
    `DataFilesHook` on one rank of each host, whose ranks see the same files."""
    hook = DataFilesHook(datasets, log_interval)
    if not hook.files:
        return []
    return [BusErrorGuard(hook.files), hook] if local_rank() == 0 else [BusErrorGuard(hook.files)]
