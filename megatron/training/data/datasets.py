"""Data sets of a run: samples per split, settings, and the check of the data's tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.config.errors import call_all
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.models.family import DataSet
from megatron.core.schedules import batch_size as batch_sizes
from megatron.core.tokenizers.base import Tokenizer
from megatron.data.blend import get_blend_and_blend_per_split
from megatron.data.indexed_dataset import MissingDatasetError, resolve_prefix
from megatron.data.sidecar import check_sidecar
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.validation import eval_samples, num_evaluations

logger = logging.getLogger(__name__)

NumSamples = tuple[int | None, int | None, int | None]


def batch_size_at(cfg: PretrainConfig) -> Callable[[int], int]:
    """Return a function that maps consumed samples to the size of the next global batch."""
    return partial(batch_sizes.running_global_batch_size, cfg.flat, data_parallel_size=cfg.data_parallel_size)


def samples_per_split(cfg: PretrainConfig) -> NumSamples:
    """Return the number of samples for which each split's data set is built; None, for validation and test with
    --full-validation, means one full pass. The counts match Megatron-LM's, because the shuffle of a data set depends on
    them: training samples of the full run (0 with --skip-train), validation samples of all evaluations during and after
    it, test samples of one. Every evaluation here starts at sample 0 and reads ``eval_samples`` samples."""
    training = cfg.training
    if cfg.validation.skip_train:
        train: int = 0
    elif training.train_samples is not None:
        train = training.train_samples
    else:
        train = batch_sizes.samples_from_iters(cfg.flat, training.train_iters or 0, cfg.data_parallel_size)
    if cfg.validation.full_validation:
        return train, None, None
    samples = eval_samples(cfg.validation)
    return train, num_evaluations(cfg.validation, training.train_iters) * samples, samples


def data_source_options(cfg: PretrainConfig, tokenizer: Tokenizer | None) -> dict[str, object]:
    """Return the constructor arguments common to all data set configurations: seed, sequence length, blends, split,
    cache and loading options, tokenizer. Reads the files of --data-args-path; builds no data set."""
    blend, blend_per_split = get_blend_and_blend_per_split(cfg.data)
    return {
        "random_seed": cfg.model.seed,
        "sequence_length": cfg.data.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": cfg.data.split,
        "multiple_validation_sets": cfg.validation.multiple_validation_sets,
        "full_validation": cfg.validation.full_validation,
        "num_dataset_builder_threads": cfg.data.num_dataset_builder_threads,
        "path_to_cache": cfg.data.data_cache_path,
        "mmap_bin_files": cfg.data.mmap_bin_files,
        "tokenizer": tokenizer,
        "mid_level_dataset_surplus": cfg.data.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": cfg.data.allow_ambiguous_pad_tokens,
    }


def data_sources(cfg: PretrainConfig) -> tuple[list[str], list[object]]:
    """Return the prefixes of the data files that every rank reads, each once, and for each blend the positions of its
    prefixes and its weights. Empty for mock data and data of the program. Opens no data file."""
    if not cfg.needs_data or cfg.data.mock_data or cfg.data.dataloader_type == "external":
        return [], []
    blend, per_split = get_blend_and_blend_per_split(cfg.data)
    blends = [blend, *(per_split or [])]
    names = list(dict.fromkeys(name for source in blends if source is not None for name in source[0]))
    positions = {name: index for index, name in enumerate(names)}
    weights = [source and [[positions[name] for name in source[0]], source[1]] for source in blends]
    prefixes = []
    for name in names:
        try:
            prefixes.append(resolve_prefix(name))
        except MissingDatasetError:  # only on this rank: the comparison of ranks names it
            prefixes.append(name)
    return prefixes, list(weights)


def select_data_set(cfg: PretrainConfig, tokenizer: Tokenizer | None) -> DataSet:
    """Return (data set class, its configuration) of the model family; builds no data set. Without a ``tokenizer`` the
    data set can select documents but not create samples."""
    assert cfg.family.data_set is not None, "the task of this family makes its data sets"
    return cfg.family.data_set(cfg, data_source_options(cfg, tokenizer))


def check_data_tokenizer(config: BlendedMegatronDatasetConfig, tokenizer: Any) -> None:
    """Check that data was tokenized with ``tokenizer``; raises ``ValueError`` otherwise. Data without a record (made by
    other programs) gives one warning; its token ids are checked as samples are drawn."""
    silent = sources_without_record(config, tokenizer)
    if silent:
        logger.warning(
            "%d data set(s) do not record their tokenizer (the first: %s); token ids are checked against the"
            " vocabulary of %d as samples are drawn",
            len(silent),
            silent[0],
            tokenizer.vocab_size,
        )


def sources_without_record(config: BlendedMegatronDatasetConfig, tokenizer: Tokenizer) -> list[str]:
    """Return prefixes of data without a tokenizer record. Raises ``ValueError`` for data of another tokenizer."""
    blends = [] if config.reads_text else [config.blend, *(config.blend_per_split or [])]
    prefixes = call_all(partial(resolve_prefix, prefix) for blend in blends if blend is not None for prefix in blend[0])
    sidecars = call_all(partial(check_sidecar, prefix, tokenizer) for prefix in prefixes)
    return [prefix for prefix, sidecar in zip(prefixes, sidecars) if sidecar is None]
