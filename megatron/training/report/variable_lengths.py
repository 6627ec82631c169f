"""Report of plans for samples of different lengths: rows, predicted imbalance, context-parallel sizes. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.datasets.varlen_dataset import LengthStatistics, parse_mock_lengths
from megatron.core.description.model import ModelDescription
from megatron.core.schedules.variable_lengths import plan_batch
from megatron.data.blend import get_blend_and_blend_per_split
from megatron.data.indexed_dataset import IndexedDataset, resolve_prefix
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.variable_lengths import plan_settings

EXAMPLES = 5
"""Global batches that are planned."""


def example_lengths(cfg: PretrainConfig, count: int) -> np.ndarray | None:
    """Return ``count`` random document lengths, of the mock distribution or the first readable data set, or None."""
    if (text := cfg.variable_lengths.varlen_mock_dataset_config_json) is not None:
        return parse_mock_lengths(text).draw(count, cfg.model.seed)
    if cfg.data.mock_data:
        return None
    blend, per_split = get_blend_and_blend_per_split(cfg.data)
    first = blend or next((prefix for prefix in per_split or () if prefix is not None), None)
    if first is None:
        return None
    try:
        lengths = IndexedDataset(resolve_prefix(first[0][0])).sequence_lengths
    except (OSError, UserError):  # the data may be on the machine that trains
        return None
    return np.random.RandomState(cfg.model.seed).choice(lengths, count)


def variable_length_rows(cfg: PretrainConfig, description: ModelDescription) -> Iterator[tuple[str, str]]:
    """Yield rows: ranks and tokens of a micro-batch, lengths of example documents, and the predicted imbalance of their
    plans. Yields nothing without --use-varlen-dataset."""
    if not cfg.variable_lengths.use_varlen_dataset:
        return
    settings, max_length, size = plan_settings(cfg, description), cfg.data.seq_length, cfg.training.global_batch_size
    ranks = settings.ranks
    shared = f"{ranks.smallest} rank(s)"
    if ranks.largest_block > ranks.smallest:
        shared = f"{ranks.smallest} to {ranks.largest_block} of {ranks.count} ranks"
    yield "micro-batch", f"one row on {shared}, at most {ranks.limit} tokens on each"
    documents = example_lengths(cfg, EXAMPLES * size)
    if documents is None:
        yield "imbalance", "known when the document lengths are"
        return
    yield "documents", str(LengthStatistics(documents))
    pieces = [
        min(max_length, length - 1 - start)
        for length in documents.tolist()
        for start in range(0, length - 1, max_length)
    ]
    plans = [
        plan_batch(pieces[at : at + size], ranks, settings.cost, settings.stages)
        for at in range(0, min(len(pieces), EXAMPLES * size), size)
    ]
    if not plans:
        return
    imbalances, sizes = [plan.imbalance for plan in plans], Counter[int]()
    for plan in plans:
        sizes.update(plan.cp_sizes)
    steps = [len(steps) for plan in plans for steps in plan.ranks]
    mean = sum(imbalances) / len(plans)
    yield "imbalance", f"{mean:.1%} in modeled time, at most {max(imbalances):.1%}, of {len(plans)} example batches"
    yield "micro-batches per rank", f"{min(steps)} to {max(steps)}"
    counts = ", ".join(f"{count / len(plans):g} on {ranks}" for ranks, count in sorted(sizes.items()))
    yield "micro-batches by CP size", f"{counts} (mean per batch)"
