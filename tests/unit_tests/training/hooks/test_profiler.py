"""Profiles cover the asked iterations and lie where users look for them."""

import gzip
import json

import pytest
import torch

from megatron.training.hooks.base import Hook
from megatron.training.hooks.profiler import ProfilerHook, trace_directory


def test_the_trace_holds_the_asked_iterations_only(tmp_path, simulated_run):
    class Marks(Hook):
        """Stands for training: each iteration leaves one named range."""

        def __getattr__(self, name):
            return lambda *arguments: None

        def on_start(self, run):
            self.mark(1)

        def on_step(self, state, metrics):
            self.mark(state.iteration + 1)  # the next iteration begins

        def mark(self, iteration):
            with torch.profiler.record_function(f"iteration {iteration}"):
                torch.ones(2) + 1

    hook = ProfilerHook(2, 4, tmp_path / "torch_profile")
    simulated_run(rank=1, world_size=2).train([hook, Marks()], 1, 6)
    with gzip.open(tmp_path / "torch_profile" / "rank-1.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {name for name in names if name and name.startswith("iteration ")} == {"iteration 3", "iteration 4"}


@pytest.mark.parametrize(("first", "last", "profiled"), [(4, 6, True), (5, 6, False), (1, 1, False), (1, 3, True)])
def test_a_resume_inside_the_range_starts_at_once_and_an_early_end_keeps_the_trace(
    tmp_path, simulated_run, first, last, profiled
):
    simulated_run().train([ProfilerHook(2, 4, tmp_path)], first, last)
    assert (tmp_path / "rank-0.json.gz").exists() == profiled


def test_without_torchs_profiler_the_range_is_only_marked(simulated_run):
    simulated_run().train([ProfilerHook(1, 2, None)], 1, 3)  # no CUDA: nothing happens, nothing fails


def test_traces_are_written_next_to_the_tensorboard_directory(tmp_path):
    assert trace_directory(str(tmp_path / "tb"), "save") == tmp_path / "torch_profile"
    assert str(trace_directory(None, "save")) == "save/torch_profile"
    assert str(trace_directory(None, None)) == "torch_profile"


def test_an_empty_profile_range_is_rejected():
    with pytest.raises(ValueError, match="--profile-step-end 4 must be larger than --profile-step-start 4"):
        ProfilerHook(4, 4, None)
