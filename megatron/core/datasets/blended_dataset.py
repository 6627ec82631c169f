"""Several data sets as one, in proportion to weights.

At every prefix of the stream each of n sources is within 1 + ln(n) samples of its share
(``helpers.build_blending_indices``)."""

import logging
from collections.abc import Sequence

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_config import MANY_SOURCES, BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset, Sample
from megatron.data import helpers
from megatron.data.blend import check_weights, normalize
from megatron.data.index_cache import IndexCache, Layout

logger = logging.getLogger(__name__)


class BlendedDataset:
    """Samples of ``datasets`` interleaved; which sample comes from which source is built or read from the index cache.

    Args:
        datasets: the sources, of one class and one split.
        weights: their shares; with ``size`` None, the exact number of samples to take of each.
        size: samples in all.
        config: the configuration.

    Raises:
        UserError: weights are not positive, or a source is asked for more samples than it has."""

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ):
        check_weights(weights, [str(dataset.dataset_path) for dataset in datasets])
        self.datasets = list(datasets)
        self.split = self.datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(weights)
        self.size = size
        self.config = config
        self.dataset_index, self.dataset_sample_index = self._build_or_load()
        self._check_exhaustion()

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, idx: int) -> Sample:
        source = int(self.dataset_index[idx])
        return {"dataset_id": source, **self.datasets[source][int(self.dataset_sample_index[idx])]}

    def sample_lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the lengths of ``samples``, int64, of sources with samples of different lengths."""
        return self._of_sources("sample_lengths", samples)

    def attention_costs(self, samples: np.ndarray) -> np.ndarray:
        """Return the sums of squared sequence lengths of rows, int64, of sources of packed rows."""
        return self._of_sources("attention_costs", samples)

    def _of_sources(self, method: str, samples: np.ndarray) -> np.ndarray:
        samples = np.asarray(samples)
        sources, numbers = self.dataset_index[samples], self.dataset_sample_index[samples]
        values = np.empty(len(samples), dtype=np.int64)
        for source in np.unique(sources):
            chosen = sources == source
            values[chosen] = getattr(self.datasets[source], method)(numbers[chosen])
        return values

    def _build_or_load(self) -> tuple[np.ndarray, np.ndarray]:
        """With ``size`` None every sample of each source occurs once; else sources are chosen by weight."""
        length = int(sum(self.weights)) if self.size is None else self.size

        def build() -> dict[str, np.ndarray]:
            if self.size is None:
                arrays = helpers.build_exhaustive_blending_indices(np.array(self.weights, dtype=np.int64))
            else:
                arrays = helpers.build_blending_indices(np.array(self.weights), self.size)
            return dict(zip(("dataset_index", "dataset_sample_index"), arrays))

        identity = {"class": type(self).__name__, "weights": self.weights, "size": self.size}
        layout: Layout = {"dataset_index": ((length,), "int16"), "dataset_sample_index": ((length,), "int64")}
        bounds = {"dataset_index": [(0, len(self.datasets) - 1)], "dataset_sample_index": [(0, length - 1)]}
        kind = f"{type(self).__name__}-{self.split.name}"
        cache = IndexCache(self.config.path_to_cache, kind, identity, layout, bounds)
        arrays = cache.get(build)
        return arrays["dataset_index"], arrays["dataset_sample_index"]

    def _check_exhaustion(self) -> None:
        """Raise UserError if the blend takes more samples of a source than it provides; else log the shares."""
        counts = np.bincount(self.dataset_index, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, counts.tolist()):
            if count > len(dataset):
                raise UserError(
                    f"the {self.split.name} blend takes {count} samples of {dataset.dataset_path}, which provides "
                    f"{len(dataset)}: raise --mid-level-dataset-surplus (now {self.config.mid_level_dataset_surplus})"
                )
        self._log_shares(counts.tolist())

    def _log_shares(self, counts: list[int]) -> None:
        """Of more than ``MANY_SOURCES``, these lines go to DEBUG and one line for all to INFO."""
        total, name, many = sum(self.weights), self.split.name, len(self.datasets) > MANY_SOURCES
        epochs = [dataset.num_epochs * count / len(dataset) for dataset, count in zip(self.datasets, counts)]
        for dataset, weight, count, passes in zip(self.datasets, self.weights, counts, epochs):
            logger.log(
                logging.DEBUG if many else logging.INFO,
                "%s blend: %s gives %d of %d samples (weight %.6f), %.2f epochs",
                name,
                dataset.dataset_path,
                count,
                len(self),
                weight / total,
                passes,
            )
        if many:
            most, path = max((passes, str(dataset.dataset_path)) for passes, dataset in zip(epochs, self.datasets))
            logger.info(
                "%s blend: %d sources give %d samples, %.2f to %.2f epochs of each (most of %s; --logging-level 10"
                " lists all)",
                name,
                len(epochs),
                len(self),
                min(epochs),
                most,
                path,
            )
