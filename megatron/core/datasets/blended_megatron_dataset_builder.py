"""From a configuration and three sizes to the train, valid and test data sets.

Each process builds what it needs for itself; what is expensive is shared through the index cache. No collective."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from megatron.core.config.errors import UserError, call_all
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import EmptySplitError
from megatron.data.blend import Blend, Split, normalize, split_range

logger = logging.getLogger(__name__)

FULL_RANGE = (0.0, 1.0)

_EVERY_RANK = ContextVar("build data sets on every rank", default=False)


@contextmanager
def built_on_every_rank() -> Iterator[None]:
    """Ignore ``is_built_on_rank`` inside this context: in our training loop every rank reads its own micro-batches."""
    token = _EVERY_RANK.set(True)
    try:
        yield
    finally:
        _EVERY_RANK.reset(token)


class BlendedMegatronDatasetBuilder:
    """Build one data set per split. The constructor opens no file.

    Args:
        cls: the ``MegatronDataset`` class.
        sizes: samples wanted of train, valid and test: a number, 0 for none, or None for one pass over the data.
        is_built_on_rank: whether this process needs the data at all; see :func:`built_on_every_rank`.
        config: the configuration.

    Raises:
        UserError: not three sizes, or a full pass (None) of a split whose sources have weights."""

    def __init__(
        self,
        cls: Any,
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ):
        if len(sizes) != len(Split):
            raise UserError(f"{len(sizes)} sizes given; one each for train, valid and test is needed")
        self.cls, self.sizes, self.is_built_on_rank, self.config = cls, list(sizes), is_built_on_rank, config
        self._sources: dict[str | None, Any] = {}
        self._lock = Lock()
        for split in Split:
            blend = self._blend(split)
            if blend is not None and blend[1] is not None and self.sizes[split.value] is None:
                raise UserError(
                    f"a full pass of {split.name} (--full-validation) takes every source whole: "
                    "give its data sets without weights"
                )

    def build(self) -> list[Any]:
        """Return a data set for each split, None where nothing is wanted or the split has no share.

        One source gives a data set of ``cls``, several a ``BlendedDataset``, several validation sources with
        ``multiple_validation_sets`` a list. Weighted blends hold at least the size asked for; blends without weights
        hold each source once, interleaved by size, and at most the size asked for. A common source without a test
        sample gives no test data, with a warning; other empty splits raise ValueError."""
        if not _EVERY_RANK.get() and not self.is_built_on_rank():
            return [None] * len(Split)
        return call_all(partial(self._build_split, split) for split in Split)

    def check(self) -> None:
        """Raise what :meth:`build` raises of files that cannot be read and splits without a sample; builds no index."""
        call_all(partial(self._check_split, split) for split in Split)

    def _check_split(self, split: Split) -> None:
        """Raise UserError with the problems of all sources, or EmptySplitError if sources hold no sample: all of them,
        or any if they have weights or are separate validation sets. A test split that no flag names may be empty."""
        size, blend, bounds = self.sizes[split.value], self._blend(split), self._bounds(split)
        if size == 0 or blend is None or bounds is None:
            return
        empty: list[EmptySplitError] = []

        def check(prefix: str) -> None:
            try:
                self._build_source(prefix, split, bounds, size, self.cls.unbuilt)
            except EmptySplitError as error:
                empty.append(error)

        call_all(partial(check, prefix) for prefix in blend[0])
        # optional for ``build``: an unnamed test set, and sources of a blend weighted by size
        spared = split is Split.test and self.config.blend_per_split is None
        by_size = blend[1] is None and not (self.config.multiple_validation_sets and split is Split.valid)
        if empty and not spared and (len(empty) == len(blend[0]) or not by_size):
            raise EmptySplitError("\n".join(map(str, empty)))

    def samples_of_epochs(self, num_epochs: int) -> int:
        """Return the training samples of ``num_epochs`` passes. Raises UserError unless there is one training source,
        and EmptySplitError if it gives no sample."""
        blend, bounds = self._blend(Split.train), self._bounds(Split.train)
        if blend is None or bounds is None or len(blend[0]) != 1:
            raise UserError(
                "needs one training data set, whose size is one epoch; join them by megatron merge-datasets"
            )
        count = partial(self.cls.samples_of_epochs, num_epochs)
        return self._build_source(blend[0][0], Split.train, bounds, None, count)  # type: ignore[return-value]

    def _bounds(self, split: Split) -> tuple[float, float] | None:
        return FULL_RANGE if self.config.split_matrix is None else self.config.split_matrix[split.value]

    def _blend(self, split: Split) -> Blend | None:
        if self.config.blend_per_split is not None:
            return self.config.blend_per_split[split.value]
        return self.config.blend

    def _build_split(self, split: Split) -> object:
        """A test split without documents that no flag names is None, with a warning."""
        try:
            return self._build_wanted(split)
        except EmptySplitError as error:
            # --eval-iters requests both validation and test, and a share of 1 % of a small corpus holds no document:
            # only explicit test data is a request for a test
            if split is not Split.test or self.config.blend_per_split is not None:
                raise
            logger.warning("no test evaluation at the end, since there is no test data: %s", error)
            return None

    def _build_wanted(self, split: Split) -> object:
        """Return one data set, a blend, or a list for --multiple-validation-sets."""
        size, config = self.sizes[split.value], self.config
        blend, bounds = self._blend(split), self._bounds(split)
        if size == 0:
            return None
        if bounds is None or (blend is None and not config.mock):
            flag = "--split" if bounds is None else f"--{split.name}-data-path"
            logger.warning("no %s data: %s assigns nothing to this split", split.name, flag)
            return None
        if config.mock:
            return self._build_source(None, split, bounds, size)
        assert blend is not None
        prefixes, weights = blend
        if len(prefixes) == 1 and (weights is None or config.blend_per_split is not None):
            return self._build_source(prefixes[0], split, bounds, size)
        if config.multiple_validation_sets and split is Split.valid:
            return self._build_sources(prefixes, split, bounds, [size] * len(prefixes))
        if weights is not None and size is not None:
            return self._build_weighted(prefixes, weights, split, bounds, size)
        return self._build_by_size(prefixes, split, bounds, size)

    def _build_weighted(
        self, prefixes: list[str], weights: list[float], split: Split, bounds: tuple[float, float], size: int
    ) -> BlendedDataset:
        """Each source builds ceil(size * weight) samples plus the surplus; the blend has their sum without it."""
        weights = normalize(weights)
        surplus = 1 + self.config.mid_level_dataset_surplus
        counts = [math.ceil(size * weight) for weight in weights]
        provided: list[int | None] = [math.ceil(count * surplus) for count in counts]
        datasets = self._build_sources(prefixes, split, bounds, provided)
        return BlendedDataset(datasets, weights, sum(counts), self.config)

    def _build_by_size(
        self, prefixes: list[str], split: Split, bounds: tuple[float, float], size: int | None
    ) -> BlendedDataset:
        """Blend one pass over all sources, cut to ``size``. Skips empty sources; warns if ``size`` exceeds the pass."""
        datasets = self._build_sources(prefixes, split, bounds, [None] * len(prefixes), skip_empty=True)
        if not datasets:
            raise EmptySplitError(
                f"samples of {split.name} are asked for, but none of {', '.join(prefixes)} holds one: give that split "
                f"a larger share in --split (now {self.config.split}) or more data, or ask no samples of it "
                "(--eval-iters 0)"
            )
        lengths = [len(dataset) for dataset in datasets]
        if size is not None and size > sum(lengths):
            logger.warning(
                "%s: %d samples asked for, but a blend without weights is one pass and holds %d: "
                "give weights to repeat data",
                split.name,
                size,
                sum(lengths),
            )
        return BlendedDataset(datasets, lengths, None if size is None else min(size, sum(lengths)), self.config)

    def _build_sources(
        self,
        prefixes: list[str],
        split: Split,
        bounds: tuple[float, float],
        sizes: Sequence[int | None],
        skip_empty: bool = False,
    ) -> list[Any]:
        """Build in threads, which all finish before an error is raised. ``skip_empty``: warn about empty sources."""

        left_out: list[EmptySplitError] = []

        def build(prefix: str, size: int | None) -> object:
            try:
                return self._build_source(prefix, split, bounds, size)
            except EmptySplitError as error:
                if not skip_empty:
                    raise
                left_out.append(error)
                return None

        with ThreadPoolExecutor(max_workers=max(1, self.config.num_dataset_builder_threads)) as threads:
            started = [threads.submit(build, prefix, size) for prefix, size in zip(prefixes, sizes)]
            datasets = [dataset for dataset in call_all(future.result for future in started) if dataset is not None]
        if left_out:
            number = f"{len(left_out)} of {len(prefixes)} sources" if len(left_out) > 1 else "one source"
            logger.warning("%s left out of the %s blend: %s", number, split.name, left_out[0])
        return datasets

    def _build_source(
        self, prefix: str | None, split: Split, bounds: tuple[float, float], size: int | None, make: Any = None
    ) -> object:
        source = self._open(prefix)
        first, last = split_range(bounds, self.cls.numel_low_level_dataset(source))
        dtype = np.int32 if last <= np.iinfo(np.int32).max else np.int64
        return (make or self.cls)(source, prefix, np.arange(first, last, dtype=dtype), size, split, self.config)

    def _open(self, prefix: str | None) -> object:
        """Each data set is opened once and shared by all splits: of two threads, both return the first result."""
        with self._lock:
            opened = self._sources.get(prefix)
        if opened is None:
            opened = self.cls.build_low_level_dataset(prefix, self.config)
            with self._lock:
                opened = self._sources.setdefault(prefix, opened)
        return opened
