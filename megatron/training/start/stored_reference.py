"""Token losses of the reference model of --dpo, computed once and stored next to the data.

The key has the data, the tokenizer, the files of the model, the precision and the rows. A run that finds the values
builds no reference model."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.preferences import REFERENCE
from megatron.core.datasets.preference_dataset import PreferenceDataset
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel.loss_weights import LossPairs
from megatron.core.pipeline_parallel.microbatches import choose_runner
from megatron.data.index_cache import IndexCache, file_stamp
from megatron.training.checkpoint.files import find_checkpoint
from megatron.training.checkpoint.reference_settings import reference_settings
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.loader import EvalSampler
from megatron.training.initialize import training_device
from megatron.training.start.companions import build_companion
from megatron.training.tasks.base import Task

logger = logging.getLogger(__name__)


class _Rows:
    """The first rows of an epoch, with ``places``: the index in the file of each label, int64 [s]; -1: padding."""

    def __init__(self, data: PreferenceDataset) -> None:
        self.data, self.attention_costs = data, data.attention_costs

    def __len__(self) -> int:
        return min(len(self.data), self.data.rows_per_epoch)

    def __getitem__(self, row: int) -> Mapping[str, object]:
        return {**self.data[row], "places": self.data.label_places(row)}


def store_reference(task: Task, datasets: object, groups: ProcessGroups) -> None:
    """Give preference data in ``datasets`` the reference model's token losses, read or computed. Collective."""
    other = reference_settings(task.cfg)
    assert other is not None, "a rule requires its folder"
    companion = None
    for data in _preference_sets(datasets):
        cache = _cache(data, task.cfg, other)
        arrays = cache.load()
        is_stored = torch.tensor(int(arrays is not None), device=training_device())  # folders may be local to a node
        if groups.world.size > 1:
            dist.all_reduce(is_stored, op=dist.ReduceOp.MIN, group=groups.world.handle)
        if not is_stored:
            companion = companion or build_companion(REFERENCE, other, task.tokenizer, groups)
            values = _token_losses(task, companion.model, data, groups)
            arrays = cache.get(lambda values=values: {"losses": values.cpu().numpy()})  # type: ignore[misc]
        assert arrays is not None
        data.reference_losses = arrays["losses"]


def _preference_sets(data: object) -> Iterator[PreferenceDataset]:
    if isinstance(data, PreferenceDataset):
        yield data
    for part in data if isinstance(data, list | tuple) else getattr(data, "datasets", ()):
        yield from _preference_sets(part)


def _cache(data: PreferenceDataset, cfg: PretrainConfig, other: PretrainConfig) -> IndexCache:
    folder = other.checkpoint.load_hf
    if folder is None:
        checkpoint = find_checkpoint(other.checkpoint.load, other.checkpoint.ckpt_step)
        folder = "" if checkpoint is None else checkpoint.directory
    files, count = sorted(path for path in Path(folder).rglob("*") if path.is_file()), len(_Rows(data))
    identity = {
        "pairs": data.dataset.key,
        "model": [(str(path), *file_stamp(str(path))) for path in files],
        "dtype": str(cfg.model.params_dtype),
        "sequence_length": data.config.sequence_length,
        "lines": [int(data.indices[0]), int(data.indices[-1])],
        # which pairs these rows have depends on the seed, unless they are all of an epoch
        "rows": [count, data.config.random_seed, data.config.packing] if count < data.rows_per_epoch else None,
    }
    place = data.config.path_to_cache or f"{data.dataset_path}.cache"
    layout = {"losses": ((len(data.dataset.tokens),), "float32")}
    return IndexCache(os.fspath(place), f"reference-{data.index_split.name}", identity, layout)


def _token_losses(task: Task, model: Sequence[nn.Module], data: PreferenceDataset, groups: ProcessGroups) -> Tensor:
    """Return the loss of each token of the file as a label, fp32; 0 where it is in no row. Equal on all ranks."""
    cfg, rows, device = task.cfg, _Rows(data), training_device()
    values = torch.zeros(len(data.dataset.tokens), device=device)

    def keep(batch: Mapping[str, Tensor], losses: Tensor) -> LossPairs:
        used = (batch["places"] >= 0) & (batch["sample_index"] >= 0)[:, None]  # rows that pad a batch repeat row 0
        values[batch["places"][used]] = losses[used].float()
        return {REFERENCE: (losses.new_zeros(()), losses.new_zeros(()))}

    reader = copy.copy(task)
    reader.loss_func = keep  # type: ignore[method-assign,assignment]
    reader.sequence_keys = (*task.sequence_keys, "places")  # type: ignore[attr-defined]
    reader.batches = reader.make_batches()
    size, total = cfg.training.micro_batch_size, cfg.training.global_batch_size
    sampler = EvalSampler(reader.batches.shard(size, groups), total, len(rows))
    logger.info("%s: computing the reference model's losses of %d rows", data.dataset_path, len(rows))
    batches = iter(reader.batches.loader(rows, sampler, groups))
    run = partial(choose_runner(), forward_step_func=reader.forward_step, model=model, forward_only=True)
    for _ in range(sampler.num_global_batches):
        run(**reader.batches.split(batches, total // (size * groups.dp.size), size))
    if groups.dp_cp.size > 1:
        dist.all_reduce(values, group=groups.dp_cp.handle)
    if groups.pp.size > 1:
        dist.broadcast(values, groups.pp.ranks[-1], group=groups.pp.handle)
    return values
