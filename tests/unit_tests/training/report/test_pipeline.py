"""Rows of the dry run about the pipeline equal the closed forms of the guide to pipelines, for equal stages."""

import re

import pytest

from megatron.training.arguments import parse_args
from megatron.training.report.pipeline import (
    bubble_fraction,
    enough_microbatches,
    peak_layers,
    pipeline_rows,
    run_schedule,
    simulated_timeline,
)
from megatron.training.report.plan.search import apply

MODEL = (
    "--num-layers 32 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --lr 1e-3 --train-iters 10 --vocab-size 100"
)
SCHEDULES = {
    "1f1b": "",
    "interleaved by 2": "--num-virtual-stages-per-pipeline-rank 2",
    "interleaved by 4": "--num-virtual-stages-per-pipeline-rank 4",
    "groups of 8": "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 8",
    "zero-bubble": "--pipeline-schedule zero-bubble",
    "zero-bubble-h2": "--pipeline-schedule zero-bubble-h2",
}


def settings(flags, stages, microbatches):
    argv = f"{MODEL} {flags} --pipeline-model-parallel-size {stages} --global-batch-size {2 * microbatches}"
    cfg = apply(parse_args(argv.split(), needs_data=False), {}, 2 * stages)
    assert not isinstance(cfg, str), cfg
    return cfg


def idle_units(schedule, stages):
    """Bubble in passes of a stage's layers, for F = B = W = 1."""
    if schedule.startswith("zero-bubble"):
        return stages - 1
    chunks = {"interleaved by 2": 2, "interleaved by 4": 4, "groups of 8": 2}.get(schedule, 1)
    return 3 * (stages - 1) / chunks


def live_microbatches(schedule, stages, rank):
    """Micro-batches of a chunk whose activations a rank holds at most."""
    if schedule == "1f1b":
        return stages - rank
    if schedule == "zero-bubble":
        return stages
    if schedule == "zero-bubble-h2":
        return 2 * stages - 1
    chunks, group = {"interleaved by 2": (2, stages), "interleaved by 4": (4, stages), "groups of 8": (2, 8)}[schedule]
    return (chunks - 1) * group + 2 * (stages - 1 - rank) + 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages, microbatches", [(2, 16), (4, 32), (4, 208)])
def test_bubbles_and_live_activations_of_equal_stages_equal_the_closed_forms(schedule, stages, microbatches):
    """An unknown vocabulary leaves out the cost of the output layer. Long schedules are extrapolated."""
    cfg = settings(SCHEDULES[schedule], stages, microbatches)
    idle = idle_units(schedule, stages)
    bubble = bubble_fraction(cfg, None)
    assert bubble == pytest.approx(idle / (3 * microbatches + idle), abs=2e-3)
    num_schedule_chunks = run_schedule(cfg, microbatches).num_chunks
    layers = 32 / stages / num_schedule_chunks
    peaks = [live_microbatches(schedule, stages, rank) * layers for rank in range(stages)]
    assert peak_layers(cfg, run_schedule(cfg, microbatches), None) == peaks
    rows = list(pipeline_rows(cfg, None))
    assert [name for name, _ in rows[:stages]] == [f"pipeline rank {rank}" for rank in range(stages)]
    texts = dict(rows)
    for rank in range(stages):
        assert texts[f"pipeline rank {rank}"].count(";") == num_schedule_chunks - 1
    assert f"{num_schedule_chunks} per rank, {microbatches} micro-batches" in texts["schedule"]
    assert texts["bubble"].startswith(f"{bubble:.1%} of the time")
    printed = re.search(r"at most (.*) by rank", texts["layers x micro-batches alive"])[1]
    assert [float(peak) for peak in printed.split(", ")] == peaks


@pytest.mark.parametrize("schedule", ["interleaved by 2", "groups of 8", "zero-bubble-h2"])
def test_bubbles_of_unequal_stages_equal_the_full_simulation(schedule):
    """The last stage is slower by its output layer: the other ranks wait for it after many micro-batches only."""
    for stages, microbatches in ((2, 49), (4, 49), (4, 82)):
        cfg = settings(f"{SCHEDULES[schedule]} --vocab-size 3000", stages, microbatches)
        assert enough_microbatches(cfg) < microbatches
        full = simulated_timeline(cfg, microbatches, 3000).bubble
        assert bubble_fraction(cfg, 3000) == pytest.approx(full, abs=6e-3)


def test_peaks_before_the_steady_state_equal_the_full_simulation():
    """A stage with more layers than the others has its peak late if the last round of micro-batches is incomplete."""
    cfg = settings(f"{SCHEDULES['interleaved by 2']} --vocab-size 4000000", 4, 23)
    peaks = ", ".join(f"{peak:g}" for peak in peak_layers(cfg, run_schedule(cfg, 23), 4_000_000))
    assert peaks in dict(pipeline_rows(cfg, 4_000_000))["layers x micro-batches alive"]


def test_the_output_layer_makes_the_bubble_larger():
    """Cut layers cannot balance an output layer that costs more than all layers of a stage."""
    cfg = settings("--vocab-size 4000000 --hidden-size 64", 4, 32)
    assert bubble_fraction(cfg, 4_000_000) > 0.5 > bubble_fraction(cfg, None)
