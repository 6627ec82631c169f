"""Recorded graphs are freed before NCCL's communicators, which wait for graphs of their kernels."""

from contextlib import nullcontext

import torch

from megatron.core.fusions.cuda_graphs import record_cuda_graph, release_cuda_graphs
from megatron.training import initialize


def test_graphs_are_freed_before_their_communicators(monkeypatch):
    events = []

    class Graph:
        def reset(self):
            events.append("graph")

        def replay(self):
            events.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    first, second = record_cuda_graph(lambda: 1, None), record_cuda_graph(lambda: 2, None)
    assert (first(), second()) == (1, 2)
    del first
    monkeypatch.setattr(initialize.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(initialize.dist, "barrier", lambda: events.append("barrier"))
    monkeypatch.setattr(initialize.parallel_state, "destroy_model_parallel", lambda: events.append("groups"))
    monkeypatch.setattr(initialize.dist, "destroy_process_group", lambda: events.append("communicators"))
    initialize.shut_down()
    assert events == ["replay", "replay", "barrier", "graph", "groups", "communicators"]
    del second
    release_cuda_graphs()
    assert events[6:] == []


def test_graphs_share_the_pool_and_are_captured_on_the_stream(monkeypatch):
    captures = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (), {}))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: captures.append(options) or nullcontext())
    record_cuda_graph(lambda: 1, None, pool=(0, 5))
    assert captures == [{"pool": (0, 5), "stream": None, "capture_error_mode": "thread_local"}]
