"""CUDA graphs of decode steps and short prompts: a step launches with one call, and the GPU never waits for the host.

A step's inputs are one row of integers. The first step of a shape runs without a graph, which loads kernels and
allocates the cache, and is then recorded on a static copy of its inputs; later steps of that shape copy their inputs
and replay. Graphs share the memory of their temporary tensors. At most MAX_GRAPHS are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.fusions.cuda_graphs import Recorder, record_cuda_graph
from megatron.core.host_memory import copied
from megatron.core.transformer.moe.dispatch import LocalDispatcher
from megatron.core.transformer.moe.experts import GroupedExperts
from megatron.core.transformer.moe.moe_layer import MoELayer

MAX_GRAPHS = 128
"""The least recently used graph is deleted for a new one."""


def graph_problem(model: Any) -> str | None:
    """Return why steps of ``model`` cannot be recorded; None if they can."""
    config, groups = model.config, model.groups
    device = next(model.parameters()).device
    experts = [x for x in model.modules() if isinstance(x, MoELayer)]
    sizes = config.hidden_size, config.moe_ffn_hidden_size or 0
    grouped = config.params_dtype == torch.bfloat16 and not any(size % 8 for size in sizes)
    reasons = {
        f"the model is on {device}": device.type != "cuda",
        "pipeline stages wait for each other": groups.pp.size > 1,
        "float64 has no attention kernel": config.params_dtype == torch.float64,
        "the host reads the positions of each sequence in batch_invariant_mode": config.batch_invariant_mode,
        "layers in fp8 are untested": config.fp8 is not None,
        "copy engines cannot be recorded": groups.stream(config.sequence_parallel).engines is not None,
        "the host reads the rows of each expert": not all(
            grouped and isinstance(x.dispatcher, LocalDispatcher) and isinstance(x.experts, GroupedExperts)
            for x in experts
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


Outputs = tuple[Tensor, ...]


class _Step(NamedTuple):
    inputs: Tensor
    replay: Callable[[], Outputs]


class StepGraphs:
    """Recorded steps by shape. ``record`` turns a function into its replay; None: a CUDA graph."""

    def __init__(self, device: torch.device, record: Recorder | None = None) -> None:
        self._device = device
        self._record = record or partial(record_cuda_graph, pool=torch.cuda.graph_pool_handle())
        self._steps: OrderedDict[Hashable, _Step] = OrderedDict()
        """The least recently used first."""

    @property
    def num_graphs(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Delete all graphs and their memory."""
        self._steps.clear()

    def run(self, shape: Hashable, values: np.ndarray, compute: Callable[[Tensor], Outputs]) -> Outputs:
        """Return ``compute`` of ``values``, int64, on the device. The next call overwrites the results. Steps of the
        same ``shape`` run the same operations on inputs of the same size."""
        # not one pinned buffer: after a step without results it may not have been read before the next one
        inputs = copied(torch.from_numpy(values), self._device)
        step = self._steps.get(shape)
        if step is None:
            if len(self._steps) >= MAX_GRAPHS:
                self._steps.popitem(last=False)
            result = compute(inputs)
            self._steps[shape] = _Step(inputs, self._record(partial(compute, inputs), None))
            return result
        self._steps.move_to_end(shape)
        step.inputs.copy_(inputs)
        return step.replay()
