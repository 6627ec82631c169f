"""--eval-tasks: scores of lm-evaluation-harness during training, on the training ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.evaluation.harness import evaluate_tasks
from megatron.core.evaluation.tasks import find_tasks
from megatron.core.inference.engine import Engine
from megatron.core.inference.scheduler import Limits
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.components import Components
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.exits.conditions import every
from megatron.training.generation.live_engine import LiveEngine
from megatron.training.observe.kinds.evaluation import TASK
from megatron.training.observe.records import Record, RecordKind

FLAG = "--eval-tasks"
_SEQUENCES = 16
"""Sequences in the cache, which exists during an evaluation only."""


class TaskScores:
    """Scores of the tasks that flags name. Rank 0 runs the harness; all ranks compute its forward passes."""

    def __init__(self, cfg: PretrainConfig, parts: Components, tokenizer: Tokenizer | None) -> None:
        """Find the tasks. Raises UserError for unknown ones, and without the package or a tokenizer."""
        if tokenizer is None:
            raise UserError(f"{FLAG}: requires a tokenizer; add --tokenizer-type")
        settings = cfg.validation
        self._tokenizer, self._names, self._limit = tokenizer, settings.eval_tasks or [], settings.eval_tasks_limit
        self._interval = settings.eval_tasks_interval
        self._manager = find_tasks(FLAG, self._names, settings.eval_tasks_path)
        length = cfg.data.seq_length
        assert length is not None, "required for training"
        self._engine = LiveEngine(FLAG, parts, Limits(length, max(length, 8192), _SEQUENCES))

    def is_due(self, iteration: int, evaluates: bool) -> bool:
        return every(self._interval, iteration)

    def __call__(self, final: bool = False) -> list[tuple[RecordKind, Record]]:
        """Return one record per task, none after training. Collective. UserError if the harness fails."""
        scores = {} if final else self._engine.run(self._scores)
        return [(TASK, {"dataset": name, **metrics}) for name, metrics in scores.items()]

    def _scores(self, engine: Engine) -> dict[str, dict[str, float]]:
        results = evaluate_tasks(engine, self._tokenizer, self._names, self._manager, limit=self._limit)["results"]
        return {name: metrics(values) for name, values in results.items()}


def metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return scores by metric, by ``METRIC,FILTER`` if several filters have the metric. ``values``: the harness's
    ``{"acc,none": 0.5, "acc_stderr,none": …, "alias": …}``."""
    names = {name: name.partition(",")[0] for name in values if "," in name}
    filters = Counter(names.values())
    return {
        metric if filters[metric] == 1 else name: float(values[name])
        for name, metric in names.items()
        if isinstance(values[name], int | float) and not metric.endswith("_stderr")
    }
