"""Basic schedules: no pipeline, 1F1B (PipeDream-flush, arXiv:2006.09503) and forward only. Torch-free."""

from __future__ import annotations

from megatron.core.pipeline_parallel.actions import Action, Schedule


def without_pipeline(num_microbatches: int) -> Schedule:
    """Build the schedule of a single rank: every forward is followed by its backward."""
    actions = tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in ("F", "B"))  # type: ignore[arg-type]
    return Schedule("without pipeline", 1, num_microbatches, (actions,))


def one_forward_one_backward(num_ranks: int, num_microbatches: int, ahead: int = 1) -> Schedule:
    """Build 1F1B: rank r runs P - 1 - r warm-up forwards, then alternates forward and backward, then cools down. At
    most P - r micro-batches are in flight on rank r. The bubble fraction is (P - 1) / (M + P - 1). ``ahead`` multiplies
    the number of warm-up forwards; this changes the duration only if weight gradients are split off (ZB-H2)."""
    return Schedule(
        "1f1b",
        1,
        num_microbatches,
        tuple(_one_rank(ahead * (num_ranks - 1 - r), num_microbatches) for r in range(num_ranks)),
    )


def _one_rank(ahead: int, num_microbatches: int) -> tuple[Action, ...]:
    """``ahead`` warm-up forwards (at most all), then forward and backward alternate, then the remaining backwards."""
    ahead = min(ahead, num_microbatches)
    actions = [Action("F", 0, m) for m in range(ahead)]
    for m in range(num_microbatches - ahead):
        actions += [Action("F", 0, m + ahead), Action("B", 0, m)]
    actions += [Action("B", 0, m) for m in range(num_microbatches - ahead, num_microbatches)]
    return tuple(actions)


def forward_only(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Build the evaluation schedule, equal on all ranks. Groups of P micro-batches pass chunk after chunk."""
    actions = tuple(
        Action("F", chunk, m)
        for first in range(0, num_microbatches, num_ranks)
        for chunk in range(num_chunks)
        for m in range(first, min(first + num_ranks, num_microbatches))
    )
    return Schedule("forward only", num_chunks, num_microbatches, (actions,) * num_ranks)
