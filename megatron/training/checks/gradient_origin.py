"""Find the ranks whose gradients are NaN or infinite: run the failing iteration again without reducing its gradients.

The reduction spreads a NaN to all ranks, and a check before it would read all gradients in every step. A repetition
costs healthy steps nothing but the memory of two global batches of tokens. It computes the same gradients: the weights
have not changed since (:mod:`megatron.training.checks.finite`), and dropout masks depend on the samples only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor

from megatron.core.config.errors import counted, listed
from megatron.core.dist_checkpointing.exchange import all_gather_json
from megatron.core.distributed import DataParallel
from megatron.core.groups.process_groups import Group

MOST_NAMED = 8
"""Maximum number of ranks in a message."""


class GlobalBatch(NamedTuple):
    """This rank's share of the global batch of one iteration."""

    iteration: int
    size: int
    """Samples over all ranks."""
    counts: Tensor
    """Valid tokens over all ranks, fp64 [losses]."""
    batches: list[dict]
    """Micro-batches that have been read."""


class RecentBatches:
    """Saves the last two global batches: those that :class:`FiniteCheck` may still reject."""

    def __init__(self) -> None:
        self._recent: deque[GlobalBatch] = deque(maxlen=2)

    def save(self, iteration: int, size: int, counts: Tensor, batches: Iterable[dict]) -> Iterator[dict]:
        """Iterate over ``batches`` and save each as one of ``iteration``. Other arguments: see :class:`GlobalBatch`."""
        self._recent.append(GlobalBatch(iteration, size, counts, []))
        return _saved(batches, self._recent[-1].batches)

    def of_iteration(self, iteration: int) -> GlobalBatch:
        """Return the saved global batch of ``iteration``. Raises ValueError if it is not saved."""
        (one,) = (batch for batch in self._recent if batch.iteration == iteration)
        return one


def _saved(batches: Iterable[dict], into: list[dict]) -> Iterator[dict]:
    for batch in batches:
        # copy memory that is shared with a worker process: every such tensor keeps a file descriptor open
        into.append({name: x.clone() if _is_of_worker(x) else x for name, x in batch.items()})
        yield batch


def _is_of_worker(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.is_shared()


def nonfinite_ranks(model: Sequence[DataParallel], world: Group, forward_backward: Callable[[], object]) -> str:
    """Return a sentence that names the ranks of ``world`` with NaN or infinite gradients before the reduction, in the
    micro-batches that ``forward_backward`` runs. Overwrites ``main_grad``. Collective; waits for the device."""
    with ExitStack() as stack:
        chunks = [stack.enter_context(chunk.local_gradients()) for chunk in model]
        forward_backward()
        names = [name for invalid_names in chunks for name in invalid_names()]
    ranks = [
        f"rank {rank} ({counted(number, model[0].reduced_part)}, the last {last})"
        for rank, (number, last) in enumerate(all_gather_json([len(names), "".join(names[-1:])], world))
        if number
    ]
    if not ranks:
        return (
            "Run again, the iteration has finite gradients on every rank before their sum: the sum overflows, or a"
            " device computes wrong values at times"
        )
    return (
        f"Run again, the iteration has NaN or infinite gradients before their sum on {listed(ranks, most=MOST_NAMED)}"
    )
