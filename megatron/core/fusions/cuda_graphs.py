"""Recording of functions as CUDA graphs: a replay launches all their kernels with one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

Outputs = TypeVar("Outputs")
_graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()


class Recorder(Protocol):
    def __call__(self, run: Callable[[], Outputs], stream: torch.cuda.Stream | None, /) -> Callable[[], Outputs]:
        """Return a replay function of ``run``. Recording only captures; outputs are undefined before a replay."""


def record_cuda_graph(
    run: Callable[[], Outputs], stream: torch.cuda.Stream | None, pool: tuple[int, int] | None = None
) -> Callable[[], Outputs]:
    """Call ``run`` once under CUDA graph capture on ``stream`` (None: torch's): its kernels are recorded, not executed.
    Return a function that replays them on the current stream and returns the captured output tensors, always the same
    ones, overwritten by each replay. Other threads may use CUDA meanwhile. Graphs with the same ``pool`` share memory
    for temporary tensors: they must not be replayed at the same time."""
    graph = torch.cuda.CUDAGraph()
    _graphs.add(graph)
    # thread_local: other threads (pin-memory loaders, watchdogs) may call CUDA during the capture
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # type: ignore[arg-type]
        outputs = run()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


def release_cuda_graphs() -> None:
    """Free all graphs, which must not be replayed again: NCCL ends a communicator only after graphs of its kernels."""
    for graph in list(_graphs):
        graph.reset()
