"""Interleaved 1F1B (arXiv:2104.04473): several model chunks per rank divide the bubble by their number. Torch-free."""

from __future__ import annotations

from megatron.core.pipeline_parallel.actions import Action, Schedule


def group_sizes(num_ranks: int, num_microbatches: int, group_size: int) -> list[int]:
    """Sizes of the groups of micro-batches that pass through chunk after chunk.

    All have ``group_size``, the last one what remains. A remainder of fewer micro-batches than ranks would have to wait
    for itself at every chunk, and is shared out over the other groups instead.
    """
    full, rest = divmod(num_microbatches, group_size)
    if full == 0 or rest >= num_ranks:
        return [group_size] * full + [rest]
    return [num_microbatches // full + (index < num_microbatches % full) for index in range(full)]


def passes(sizes: list[int], num_chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of the forward passes, the same on every rank."""
    order: list[tuple[int, int]] = []
    first = 0
    for size in sizes:
        order += [(chunk, m) for chunk in range(num_chunks) for m in range(first, first + size)]
        first += size
    return order


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B for any group size from ``num_ranks`` on and any number of micro-batches.

    Rank r first runs (V - 1) x group + 2 (P - 1 - r) forwards, as far as there are that many.
    """
    group_size = num_ranks if group_size is None else group_size
    sizes = group_sizes(num_ranks, num_microbatches, group_size)
    order = passes(sizes, num_chunks)
    forwards = [Action("F", chunk, m) for chunk, m in order]
    backwards = [Action("B", num_chunks - 1 - chunk, m) for chunk, m in order]
    return Schedule(
        "interleaved", num_chunks, num_microbatches,
        tuple(
            _one_rank(forwards, backwards, (num_chunks - 1) * max(sizes) + 2 * (num_ranks - 1 - rank))
            for rank in range(num_ranks)
        ),
    )  # fmt: skip


def _one_rank(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    ahead = min(ahead, len(forwards))
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        actions += [forward, backward]
    return (*actions, *backwards[len(forwards) - ahead :])
