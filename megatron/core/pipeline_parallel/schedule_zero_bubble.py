"""Zero-bubble schedules (arXiv:2401.10241): the weight gradient W of a micro-batch is split from its input gradient B,
so that B reaches the stage before it sooner, and W fills the time in which a rank would wait. Torch-free.

Forward and backward passes keep the order of 1F1B, or with several chunks per rank of the interleaved schedule; rank r
computes weight gradients r micro-batches behind. This is ZB-H1: the bubble shrinks from (P - 1)(F + B + W) to
(P - 1)(F + B - W) at the peak memory of 1F1B. W waits for no other rank, so no deadlock can come with it.

ZB-H2 runs twice as many forwards ahead, and weight gradients twice as far behind: 2P - 1 micro-batches are alive on
every rank. What is left of the bubble is (P - 1)F, since the ranks' steps of the optimizer wait for each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from megatron.core.pipeline_parallel.actions import Action, Schedule
from megatron.core.pipeline_parallel.schedule_interleaved import interleaved
from megatron.core.pipeline_parallel.schedule_plain import one_forward_one_backward


def zero_bubble(
    num_ranks: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """ZB-H1 with one or several chunks per rank."""
    if num_chunks == 1:
        whole = one_forward_one_backward(num_ranks, num_microbatches)
    else:
        whole = interleaved(num_ranks, num_chunks, num_microbatches, group_size)
    split = tuple(_with_weight_gradients(actions, behind=rank) for rank, actions in enumerate(whole.actions))
    return replace(whole, name="zero-bubble", actions=split)


def zero_bubble_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2."""
    whole = one_forward_one_backward(num_ranks, num_microbatches, ahead=2)
    split = tuple(_with_weight_gradients(actions, behind=2 * rank) for rank, actions in enumerate(whole.actions))
    return replace(whole, name="zero-bubble-h2", actions=split)


def _with_weight_gradients(actions: tuple[Action, ...], behind: int) -> tuple[Action, ...]:
    result: list[Action] = []
    waiting: deque[Action] = deque()
    for action in actions:
        result.append(action)
        if action.kind == "B":
            waiting.append(action._replace(kind="W"))
            if len(waiting) > behind:
                result.append(waiting.popleft())
    return (*result, *waiting)
