"""Interleaved 1F1B (arXiv:2104.04473): V model chunks per rank shrink the bubble by a factor of V. Torch-free."""

from __future__ import annotations

from megatron.core.pipeline_parallel.actions import Action, Schedule


def group_sizes(num_ranks: int, num_microbatches: int, group_size: int) -> list[int]:
    """Return the sizes of the micro-batch groups; a group runs through one chunk completely before the next chunk. All
    groups have ``group_size`` and the last one the remainder. A remainder smaller than ``num_ranks`` would stall at
    every chunk, waiting for its previous chunk on the last rank; it is spread over the other groups instead."""
    full, rest = divmod(num_microbatches, group_size)
    if full == 0 or rest >= num_ranks:
        return [group_size] * full + [rest]
    return [num_microbatches // full + (index < num_microbatches % full) for index in range(full)]


def passes(sizes: list[int], num_chunks: int) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) in the order of the forward passes, which is the same on all ranks: for each group of
    ``sizes`` consecutive micro-batches, all of them through chunk 0, then through chunk 1, and so on."""
    order: list[tuple[int, int]] = []
    first = 0
    for size in sizes:
        order += [(chunk, m) for chunk in range(num_chunks) for m in range(first, first + size)]
        first += size
    return order


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None = None) -> Schedule:
    """Build interleaved 1F1B for any number of micro-batches and any group size >= ``num_ranks`` (the default; not
    checked). The warm-up of rank r has (V - 1) x largest group + 2 (P - 1 - r) forwards, or all of them if there are
    fewer; `group_sizes` may make groups larger than ``group_size``."""
    group_size = num_ranks if group_size is None else group_size
    sizes = group_sizes(num_ranks, num_microbatches, group_size)
    order = passes(sizes, num_chunks)
    forwards = [Action("F", chunk, m) for chunk, m in order]
    backwards = [Action("B", num_chunks - 1 - chunk, m) for chunk, m in order]
    return Schedule(
        "interleaved",
        num_chunks,
        num_microbatches,
        tuple(
            _one_rank(forwards, backwards, (num_chunks - 1) * max(sizes) + 2 * (num_ranks - 1 - rank))
            for rank in range(num_ranks)
        ),
    )


def _one_rank(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """``ahead`` warm-up forwards, then forward and backward alternate, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        actions += [forward, backward]
    return (*actions, *backwards[len(forwards) - ahead :])
