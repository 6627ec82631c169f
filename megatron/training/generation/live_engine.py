"""Generation with the model under training, on the training ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.core.config.errors import UserError
from megatron.core.distributed import DataParallel
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.inference.engine import PAGE_SIZE, Engine
from megatron.core.inference.runner import model_problem
from megatron.core.inference.scheduler import Limits
from megatron.core.pipeline_parallel.stage_model import unwrapped
from megatron.training.components import Components

T = TypeVar("T")


class LiveEngine:
    """Generation engines of the only model chunk of ``parts``; each exists during one call of :meth:`run`. ``flag`` is
    for messages. Raises UserError if the model cannot generate with a cache."""

    def __init__(self, flag: str, parts: Components, limits: Limits, *, cuda_graphs: bool = True) -> None:
        self._flag = flag
        self._chunk: DataParallel = parts.model[0]
        if problem := model_problem(unwrapped(self._chunk)):
            raise UserError(f"{flag}: {problem}")
        self._groups: ProcessGroups = parts.groups
        self._on_forward, self._limits, self._cuda_graphs = parts.on_forward, limits, cuda_graphs
        self._pages = 1 + limits.max_sequences * -(-limits.max_length // PAGE_SIZE)

    def run(self, work: Callable[[Engine], T]) -> T:
        """Return ``work(engine)`` of rank 0 on every rank; the other ranks compute its forward passes. Leaves the model
        in training mode and torch's random generators as they were. Collective. Raises UserError on all ranks if
        ``work`` fails."""
        self._mark()  # rank 0 may prepare the requests for longer than a step takes
        self._chunk.finish_param_sync()
        world = self._groups.world
        outcome: list[Any] = [None]
        device = next(self._chunk.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                engine = Engine(
                    unwrapped(self._chunk),
                    self._limits,
                    num_pages=self._pages,
                    cuda_graphs=self._cuda_graphs,
                    on_step=self._mark,
                )
                if world.is_first:
                    outcome = [_result(engine, work)]
                else:
                    engine.follow()
            finally:
                self._chunk.train()
        if world.size > 1:
            dist.broadcast_object_list(outcome, world.ranks[0], group=world.handle)
        problem, result = outcome[0]
        if problem is not None:
            raise UserError(f"{self._flag}: {problem}")
        return result

    def _mark(self) -> None:
        if self._on_forward is not None:
            self._on_forward("generates", False)


def _result(engine: Engine, work: Callable[[Engine], T]) -> tuple[str | None, T | None]:
    """Return (None, result), or (error as text, None): other ranks must not wait for this one."""
    try:
        return None, work(engine)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    finally:
        engine.stop()
