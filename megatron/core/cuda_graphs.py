"""Recording of functions as CUDA graphs: a replay launches all their kernels with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Recorder = Callable[[Callable[[], Any], Any], Callable[[], Any]]
"""Maps (function, stream) to a replay function. Recording only captures; outputs are undefined before a replay."""


def record_cuda_graph(run: Callable[[], Any], stream: Any, pool: Any = None) -> Callable[[], Any]:
    """Call ``run`` once under CUDA graph capture on ``stream`` (None: torch's): its kernels are recorded, not executed.
    Return a function that replays them on the current stream and returns the captured output tensors, always the same
    ones, overwritten by each replay. Other threads may use CUDA meanwhile. Graphs with the same ``pool`` share memory
    for temporary tensors: they must not be replayed at the same time."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads (pin-memory loaders, watchdogs) may call CUDA during the capture
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        outputs = run()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay
