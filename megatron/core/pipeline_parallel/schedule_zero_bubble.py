"""Zero-bubble schedules ZB-H1 and ZB-H2 (arXiv:2401.10241). Torch-free.

The backward of a micro-batch is split into input gradient B and weight gradient W. The previous stage receives the
result of B earlier, and W fills time in which a rank would be idle.

ZB-H1 keeps the order of F and B of 1F1B (with several chunks per rank: of the interleaved schedule), and rank r delays
W by r micro-batches. The bubble shrinks from (P - 1)(F + B + W) to (P - 1)(F + B - W) at the peak memory of 1F1B. W
depends on no other rank, so that adding it cannot cause a deadlock.

ZB-H2 doubles the warm-up forwards and the delay of W; 2P - 1 micro-batches are alive on every rank. The remaining
bubble is (P - 1)F, because the optimizer step synchronizes the ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from megatron.core.pipeline_parallel.actions import Action, Schedule
from megatron.core.pipeline_parallel.schedule_interleaved import interleaved
from megatron.core.pipeline_parallel.schedule_plain import one_forward_one_backward


def zero_bubble(num_ranks: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None) -> Schedule:
    """Build ZB-H1 by adding W actions to 1F1B for one chunk per rank, else to interleaved 1F1B with ``group_size``. On
    rank r each W follows r further backwards after its own B, and the rest comes at the end."""
    if num_chunks == 1:
        unsplit = one_forward_one_backward(num_ranks, num_microbatches)
    else:
        unsplit = interleaved(num_ranks, num_chunks, num_microbatches, group_size)
    split = tuple(_with_weight_gradients(actions, delay=rank) for rank, actions in enumerate(unsplit.actions))
    return replace(unsplit, name="zero-bubble", actions=split)


def zero_bubble_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build ZB-H2, for one chunk per rank."""
    unsplit = one_forward_one_backward(num_ranks, num_microbatches, ahead=2)
    split = tuple(_with_weight_gradients(actions, delay=2 * rank) for rank, actions in enumerate(unsplit.actions))
    return replace(unsplit, name="zero-bubble-h2", actions=split)


def _with_weight_gradients(actions: tuple[Action, ...], delay: int) -> tuple[Action, ...]:
    """After the B that comes ``delay`` backwards later, or at the end, in the order of the B actions."""
    result: list[Action] = []
    waiting: deque[Action] = deque()
    for action in actions:
        result.append(action)
        if action.kind == "B":
            waiting.append(action._replace(kind="W"))
            if len(waiting) > delay:
                result.append(waiting.popleft())
    return (*result, *waiting)
