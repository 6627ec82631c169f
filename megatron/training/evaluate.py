"""Evaluation: the same samples every time, one mean per valid token for each data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.loader import EvalSampler, Shard, build_loader
from megatron.training.initialize import training_device
from megatron.training.observe.loss_sums import LossSums
from megatron.training.observe.metrics import EvalResult
from megatron.training.tasks.base import Task


@dataclass(frozen=True)
class EvalSet:
    """One data set to evaluate on; ``name`` tells several validation sets apart."""

    dataset: Any
    name: str | None = None


def eval_sets(dataset: Any, names: list[str] | None = None) -> list[EvalSet]:
    """A provider's validation or test data (None, one data set, or a list of them) as named sets."""
    if dataset is None:
        return []
    if not isinstance(dataset, list | tuple):
        return [EvalSet(dataset)]
    labels = names or [str(index) for index in range(len(dataset))]
    if len(labels) != len(dataset):
        raise UserError(f"--validation-set-names: {len(labels)} names for {len(dataset)} validation sets")
    return [EvalSet(part, label) for part, label in zip(dataset, labels) if part is not None]


class Evaluator:
    """Runs a model over evaluation sets. Two evaluations of the same weights agree exactly."""

    def __init__(self, cfg: PretrainConfig, task: Task, model: Sequence[nn.Module], groups: ProcessGroups) -> None:
        self.cfg, self.task, self.model, self.groups = cfg, task, model, groups
        self.shard = Shard(cfg.eval_micro_batch_size, groups.dp.rank, groups.dp.size)

    def num_samples(self, eval_set: EvalSet) -> int:
        """Samples of one evaluation: everything under --full-validation, else --eval-iters global batches."""
        if self.cfg.full_validation:
            return len(eval_set.dataset)
        wanted = self.cfg.eval_iters * self.cfg.eval_global_batch_size
        return min(wanted, len(eval_set.dataset))

    def evaluate(
        self, sets: list[EvalSet], name: Literal["validation", "test"], final: bool = False
    ) -> list[EvalResult]:
        """The mean losses of every set."""
        for chunk in self.model:
            chunk.eval()
        try:
            return [EvalResult(name, each.name, self._losses(each), final) for each in sets]
        finally:
            for chunk in self.model:
                chunk.train()

    def _losses(self, eval_set: EvalSet) -> dict[str, float]:
        device = training_device()
        sampler = EvalSampler(self.shard, self.cfg.eval_global_batch_size, self.num_samples(eval_set))
        sums = LossSums(device)
        batches, steps = self._batches(eval_set, sampler)
        for _ in range(steps):
            sums.add(
                get_forward_backward_func()(
                    forward_step_func=self.task.forward_step,
                    model=self.model,
                    forward_only=True,
                    **self.task.micro_batches(
                        batches, sampler.micro_batches_per_step, self.cfg.eval_micro_batch_size
                    ),
                )
            )
        sums.share(self.groups.pp).all_reduce(self.groups.dp_cp)
        return {name: value.item() for name, value in sums.means().items()}

    def _batches(self, eval_set: EvalSet, sampler: EvalSampler) -> tuple[Iterator[dict], int]:
        """An iterator of micro-batches and the number of global batches in it."""
        if self.cfg.dataloader_type == "external":
            return iter(eval_set.dataset), self.cfg.eval_iters
        pin = torch.cuda.is_available()
        loader = build_loader(eval_set.dataset, sampler, self.cfg.num_workers, pin)
        return iter(loader), len(sampler) // sampler.micro_batches_per_step
