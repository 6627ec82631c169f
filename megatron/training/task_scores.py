"""--eval-tasks: scores of lm-evaluation-harness during training, on the training ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.distributed import DataParallel
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.inference.engine import PAGE_SIZE, Engine
from megatron.core.inference.harness import evaluate_tasks, find_tasks
from megatron.core.inference.scheduler import Limits
from megatron.core.pipeline_parallel.stage_model import unwrapped
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.observe.metrics import EvalResult

FLAG = "--eval-tasks"
_SEQUENCES = 16
"""Sequences in the cache, which exists during an evaluation only."""


class TaskScores:
    """Scores of the tasks that flags name. Rank 0 runs the harness; all ranks compute its forward passes."""

    def __init__(
        self, cfg: PretrainConfig, model: Sequence[DataParallel], tokenizer: Tokenizer | None, groups: ProcessGroups
    ) -> None:
        """Find the tasks. Raises UserError for unknown ones, and without the package or a tokenizer."""
        if tokenizer is None:
            raise UserError(f"{FLAG}: requires a tokenizer; add --tokenizer-type")
        settings = cfg.validation
        self._chunk, self._tokenizer, self._groups = model[0], tokenizer, groups
        self._names, self._limit = settings.eval_tasks or [], settings.eval_tasks_limit
        self._manager = find_tasks(FLAG, self._names, settings.eval_tasks_path)
        length = cfg.data.seq_length
        assert length is not None, "required for training"
        self._limits = Limits(length, max_tokens=max(length, 8192), max_sequences=_SEQUENCES)

    def __call__(self) -> list[EvalResult]:
        """Return one result per task, equal on all ranks. Leaves the model in training mode. Collective; raises
        UserError on all ranks if the harness fails."""
        self._chunk.finish_param_sync()
        model: nn.Module = unwrapped(self._chunk)
        pages = 1 + _SEQUENCES * -(-self._limits.max_length // PAGE_SIZE)
        found: list[Any] = [None]
        try:
            engine = Engine(model, self._limits, num_pages=pages)
            if self._groups.world.is_first:
                found = [self._scores(engine)]
            else:
                engine.follow()
        finally:
            self._chunk.train()
        if self._groups.world.size > 1:
            dist.broadcast_object_list(found, self._groups.world.ranks[0], group=self._groups.world.handle)
        if isinstance(found[0], str):
            raise UserError(f"{FLAG}: {found[0]}")
        return [EvalResult("task", name, scores) for name, scores in found[0].items()]

    def _scores(self, engine: Engine) -> dict[str, dict[str, float]] | str:
        """Return {task: {metric: score}}, or the error as text: other ranks must not wait for this one."""
        try:
            results = evaluate_tasks(engine, self._tokenizer, self._names, self._manager, limit=self._limit)["results"]
            return {name: _metrics(values) for name, values in results.items()}
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            engine.stop()


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return the scores by metric from the harness's ``{"acc,none": 0.5, "acc_stderr,none": …, "alias": …}``."""
    named = {name.partition(",")[0]: value for name, value in values.items() if "," in name}
    return {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not name.endswith("_stderr")
    }
