"""Real traces of torch's profiler: the fields that reading relies on are there."""

import pytest
import torch

from benchmarks.harness import kernel_classes as kinds
from benchmarks.harness import step_trace

OUT, INTO, TOKENS = 384, 256, 640


def profiled(device, path):
    """Two iterations of a linear layer; the first one's loss is read."""
    weight = torch.randn(OUT, INTO, device=device, requires_grad=True)
    x = torch.randn(TOKENS, INTO, device=device, requires_grad=True)
    torch.nn.functional.linear(x, weight).sum().backward()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=activities, record_shapes=True) as trace:
        for iteration in (7, 8):
            with torch.profiler.record_function(f"iteration {iteration}"):
                loss = torch.nn.functional.linear(x, weight).square().sum()
                loss.backward()
                with torch.profiler.record_function("optimizer"):
                    weight.data.mul_(0.999)
                loss.item()
    trace.export_chrome_trace(str(path))
    return step_trace.profile(step_trace.read_events(path), {(OUT, INTO)})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_trace_is_read_as_it_was_made(device, tmp_path):
    result = profiled(device, tmp_path / "rank-0.json")
    assert result.iteration == 7
    assert sum(result.ms.values()) == pytest.approx(result.step_ms)
    for kind in (kinds.GEMM_FORWARD, kinds.GEMM_DGRAD, kinds.GEMM_WGRAD, kinds.OPTIMIZER):
        assert result.ms[kind] > 0, kind
    assert result.ms[kinds.GEMM_OTHER] == 0
    if device == "cuda":
        assert result.device_to_host_copies == 1 and result.num_synchronizations >= 1
        assert sum(result.host_calls.values()) >= 6 and result.gaps[0]["host"]
