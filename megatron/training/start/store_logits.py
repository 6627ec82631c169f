"""Run of a teacher that stores its largest log-probabilities of the training samples (--logits-save-dir)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.config.distillation import DistillationConfig
from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.exchange import together
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel.loss_weights import LossPairs
from megatron.core.pipeline_parallel.microbatches import choose_runner
from megatron.core.tensor_parallel.distillation import top_entries
from megatron.core.tensor_parallel.operators import all_gather_along_first_dim
from megatron.core.tensor_parallel.vocabulary import num_true_entries
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import Batch
from megatron.training.data.datasets import batch_size_at
from megatron.training.data.stored_logits import StoredLogits, digests
from megatron.training.tasks.gpt import GPTTask

logger = logging.getLogger(__name__)


def store_logits(task: GPTTask, model: Sequence[nn.Module], batches: Iterator[dict], groups: ProcessGroups) -> None:
    """Run ``model`` forward on all samples of training, ``batches`` of the stream from its start, and store the
    log-probabilities. Collective; the first rank of the last pipeline stage writes."""
    cfg, folder = task.cfg, str(task.distillation.logits_save_dir)
    size, sizes, number = cfg.training.micro_batch_size, _batch_sizes(cfg), _num_entries(cfg, task.vocab_size)
    writes = groups.pp.is_last and groups.tp.is_first and groups.dp_cp.is_first
    stores: list[StoredLogits] = []

    def create() -> None:
        if writes:
            stores.append(create_store(cfg, task.vocab_size))

    together(create, groups.world, UserError)
    reader = copy.copy(task)
    reader.distills = True  # the model returns logits
    reader.loss_func = partial(_keep, stores, number, task.vocab_size, groups)  # type: ignore[method-assign]
    reader.sequence_keys = (*task.sequence_keys, "places")
    reader.batches = reader.make_batches()
    reader.get_batch = lambda data_iterator: reader.batches.local(  # type: ignore[method-assign]
        _with_places(next(data_iterator))
    )
    for chunk in model:
        chunk.eval()
    run = partial(choose_runner(), forward_step_func=reader.forward_step, model=model, forward_only=True)
    logger.info("storing %d log-probabilities of each token of %d samples in %s", number, sum(sizes), folder)
    for total in sizes:
        run(**reader.batches.split(batches, reader.batches.number(total // (size * groups.dp.size)), size))

    def finish() -> None:
        for store in stores:
            store.finish(folder)

    together(finish, groups.world, UserError)


def create_store(cfg: PretrainConfig, vocab_size: int) -> StoredLogits:
    """Create the folder of --logits-save-dir. Raises UserError as ``StoredLogits.create``."""
    settings = cfg.group(DistillationConfig)
    shape = (sum(_batch_sizes(cfg)), cfg.data.seq_length, _num_entries(cfg, vocab_size))
    return StoredLogits.create(str(settings.logits_save_dir), settings.logits_save_dtype, vocab_size, shape)


def _num_entries(cfg: PretrainConfig, vocab_size: int) -> int:
    number = cfg.group(DistillationConfig).logits_save_top_k
    assert number is not None, "a rule requires it"
    return min(number, vocab_size)


def _batch_sizes(cfg: PretrainConfig) -> list[int]:
    sizes: list[int] = []
    for _ in range(cfg.training.train_iters or 0):
        sizes.append(batch_size_at(cfg)(sum(sizes)))
    return sizes


def _with_places(batch: Batch) -> Batch:
    tokens = batch["tokens"]
    return {**batch, "places": torch.arange(tokens.shape[1]).repeat(len(tokens), 1), "digests": digests(tokens)}


def _keep(
    stores: Sequence[StoredLogits],
    number: int,
    vocab_size: int,
    groups: ProcessGroups,
    batch: Mapping[str, Tensor],
    logits: Tensor,
) -> LossPairs:
    """Store the largest log-probabilities of ``logits`` [b, s, v] of all data- and context-parallel ranks."""
    num_true = num_true_entries(vocab_size, logits.shape[-1], groups.tp)
    values, ids = top_entries(logits, number, num_true, groups.tp)
    parts = [batch["sample_index"], batch["places"], values, ids, batch["digests"]]
    if groups.dp_cp.size > 1:
        parts = [all_gather_along_first_dim(part, groups.dp_cp) for part in parts]
    for store in stores:
        store.write(*(part.cpu() for part in parts))
    return {"stored": (logits.new_zeros(()), logits.new_zeros(()))}
