"""Evaluation on the same samples every time; one mean loss per valid token for each data set."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel.microbatches import choose_runner
from megatron.core.pipeline_parallel.runtime import ForwardEvent
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.validation import eval_samples
from megatron.training.data.loader import EvalSampler
from megatron.training.initialize import training_device
from megatron.training.observe.kinds.evaluation import EvalResult
from megatron.training.observe.loss_sums import LossSums
from megatron.training.tasks.base import Task

EvalName = Literal["validation", "test"]


@dataclass(frozen=True)
class EvalSet:
    """One data set to evaluate; ``name`` distinguishes several validation sets."""

    dataset: Any
    name: str | None = None


def eval_sets(dataset: object, names: list[str] | None = None) -> list[EvalSet]:
    """Return a provider's validation or test data (None, one data set or a list) as named sets. A single data set has
    no name; lists use ``names`` or their indices and drop None entries. UserError for too few names."""
    if dataset is None:
        return []
    if not isinstance(dataset, list | tuple):
        return [EvalSet(dataset)]
    labels = names or [str(index) for index in range(len(dataset))]
    if len(labels) != len(dataset):
        raise UserError(f"--validation-set-names: {len(labels)} names for {len(dataset)} validation sets")
    return [EvalSet(part, label) for part, label in zip(dataset, labels) if part is not None]


class Evaluator:
    """Evaluates a model on data sets. Repeated evaluations of the same weights give identical results."""

    def __init__(
        self,
        cfg: PretrainConfig,
        task: Task,
        model: Sequence[nn.Module],
        groups: ProcessGroups,
        on_forward: Callable[[ForwardEvent, bool], None] | None = None,
    ) -> None:
        self.cfg, self.task, self.model, self.groups, self.on_forward = cfg, task, model, groups, on_forward
        self.shard = task.batches.shard(cfg.validation.eval_micro_batch_size, groups)

    def num_samples(self, eval_set: EvalSet) -> int:
        """Return the samples per evaluation: all with --full-validation, else --eval-iters batches."""
        if self.cfg.validation.full_validation:
            return len(eval_set.dataset)
        return min(eval_samples(self.cfg.validation), len(eval_set.dataset))

    def evaluate(self, sets: list[EvalSet], name: EvalName, final: bool = False) -> list[EvalResult]:
        """Return the mean losses of every set. Switches the model to evaluation mode and back. Collective over all
        ranks; waits for the device. Raises UserError if no token contributes to the loss."""
        for chunk in self.model:
            chunk.eval()
        try:
            results = []
            for valid in sets:
                start = time.perf_counter()
                losses = self._losses(valid)
                results.append(EvalResult(name, valid.name, losses, final, time.perf_counter() - start))
            return results
        finally:
            for chunk in self.model:
                chunk.train()

    def _losses(self, eval_set: EvalSet) -> dict[str, float]:
        """Run forward passes over one set; return the mean of each loss as floats, equal on all ranks. Sums are
        broadcast over the pipeline and all-reduced over ``dp_cp``; waits for the device. UserError without tokens."""
        device = training_device()
        sampler = EvalSampler(self.shard, self.cfg.validation.eval_global_batch_size, self.num_samples(eval_set))
        sums = LossSums(device)
        step, size = self.task.forward_step, self.cfg.validation.eval_micro_batch_size
        number = self.task.batches.number(self.cfg.validation.eval_global_batch_size // (size * self.groups.dp.size))
        with self._batches(eval_set, sampler) as (batches, steps):
            for _ in range(steps):
                inputs = self.task.batches.split(batches, number, size) | {"on_forward": self.on_forward}
                sums.add(choose_runner()(forward_step_func=step, model=self.model, forward_only=True, **inputs))
        sums.share(self.groups.pp).all_reduce(self.groups.dp_cp)
        if steps and not sums.count():
            named = "" if eval_set.name is None else f" on {eval_set.name}"
            raise UserError(
                f"evaluation{named}: no token contributes to the loss, as every loss mask is 0; look at the data "
                "(tools/check_dataset.py reports empty documents)"
            )
        return {name: value.item() for name, value in sums.means().items()}

    @contextmanager
    def _batches(self, eval_set: EvalSet, sampler: EvalSampler) -> Iterator[tuple[Iterator[dict], int]]:
        """Context with an iterator over micro-batches, and its number of global batches; ends the loader's workers."""
        if self.cfg.data.dataloader_type == "external":
            yield iter(eval_set.dataset), self.cfg.validation.eval_iters
            return
        batches = iter(self.task.batches.loader(eval_set.dataset, sampler, self.groups))
        try:
            yield batches, sampler.num_global_batches
        finally:
            if isinstance(batches, Generator):
                batches.close()
