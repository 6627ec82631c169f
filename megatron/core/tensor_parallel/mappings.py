"""Collectives of tensor and sequence parallelism under Megatron-LM's names and arguments.

``group`` is a torch ``ProcessGroup`` or a ``Group``; None: the running program's tensor-parallel group. On a group of
one rank the functions return their input itself (a copy for uneven shards, ``all_to_all_sp2hp`` and ``hp2sp``). Split
sizes may be tensors; on a GPU the host waits to read them. Layers of the library pass their group to ``operators.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.autograd_context import AutogradContext
from megatron.core.groups.process_groups import AnyGroup, Group
from megatron.core.parallel_state import resolve_group
from megatron.core.tensor_parallel import operators


def copy_to_tensor_model_parallel_region(input_: Tensor, group: AnyGroup = None) -> Tensor:
    """Return ``input_``; all-reduce its gradient."""
    return operators.copy_to_region(input_, resolve_group(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: AnyGroup = None) -> Tensor:
    """Return the all-reduced ``input_``, which is not changed; the gradient passes through."""
    return operators.reduce_from_region(input_, resolve_group(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: AnyGroup = None) -> Tensor:
    """Split the last dim, [..., n] -> [..., n / ranks]; all-gather the gradient."""
    return operators.scatter_to_region(input_, resolve_group(group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: AnyGroup = None) -> Tensor:
    """All-gather along the last dim, [..., n] -> [..., n * ranks]; split the gradient."""
    return operators.gather_from_region(input_, resolve_group(group))


def scatter_to_sequence_parallel_region(input_: Tensor, group: AnyGroup = None) -> Tensor:
    """Split the first dim, [s, ...] -> [s / ranks, ...]; all-gather the gradient."""
    return operators.scatter_to_sequence(input_, resolve_group(group))


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: AnyGroup = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """All-gather along the first dim, [s, ...] -> [sum of all ranks' s, ...]. Raises ValueError for
    ``output_split_sizes`` without ``tensor_parallel_output_grad``.

    Args:
        input_: this rank's shard.
        tensor_parallel_output_grad: whether each rank's gradient is a partial sum, which is reduce-scattered. Otherwise
            the gradients of all ranks are equal and are split.
        group: ranks that hold the shards; None: the tensor-parallel group. One rank returns its input.
        output_split_sizes: first dims of all ranks' shards, if they differ; requires ``tensor_parallel_output_grad``.
        use_global_buffer: ignored; the result has separate memory."""
    ranks = resolve_group(group)
    if output_split_sizes is not None:
        if not tensor_parallel_output_grad:
            raise ValueError("output_split_sizes: requires tensor_parallel_output_grad=True; remove one of them")
        return _UnevenGather.apply(input_, ranks, tuple(output_split_sizes))
    operator = operators.gather_from_sequence
    return (operator if tensor_parallel_output_grad else operators.gather_replicated_from_sequence)(input_, ranks)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: AnyGroup = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Reduce-scatter partial sums along the first dim, [s, ...] -> this rank's shard; all-gather the gradient.
    ``input_`` is not changed. Raises ValueError if s is not divisible by the ranks, without split sizes.
    ``input_split_sizes``: first dims of all ranks' shards, if they differ. ``use_global_buffer`` is ignored."""
    if input_split_sizes is not None:
        return _UnevenScatter.apply(input_, resolve_group(group), tuple(input_split_sizes))
    return operators.reduce_scatter_to_sequence(input_, resolve_group(group))


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: AnyGroup = None) -> Tensor:
    """All-gather along the last dim; reduce-scatter the gradient."""
    return operators.gather_last_dim(input_, resolve_group(group))


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: AnyGroup = None) -> Tensor:
    """Reduce-scatter along the last dim; all-gather the gradient."""
    return operators.reduce_scatter_last_dim(input_, resolve_group(group))


def all_to_all(
    group: AnyGroup,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """All-to-all of rows: send ``input_split_sizes[r]`` rows to rank r and receive ``output_split_sizes_[r]`` from it,
    in rank order. One rank returns ``input_`` itself. Without sizes all chunks are equal. ``use_nccl_stream`` is
    ignored. The gradient uses the inverse all-to-all."""
    ranks = resolve_group(group)
    if ranks.size == 1:
        return input_
    return _AllToAll.apply(input_, ranks, _sizes(output_split_sizes_), _sizes(input_split_sizes))


def all_to_all_sp2hp(input_: Tensor, group: AnyGroup = None) -> Tensor:
    """All-to-all from a split of the tokens to a split of the features: [..., h] -> [tokens * ranks, h / ranks], with
    the leading dims flattened to this rank's tokens. Raises ValueError if h is not divisible."""
    ranks = resolve_group(group)
    rows = input_.reshape(-1, input_.shape[-1])
    parts = operators.equal_parts(rows, ranks, -1)
    return all_to_all(ranks, torch.cat(parts, dim=0))


def all_to_all_hp2sp(input_: Tensor, group: AnyGroup = None) -> Tensor:
    """All-to-all from a split of the features to a split of the tokens: [..., h] -> [tokens / ranks, h * ranks], with
    the leading dims flattened to tokens, whose number must be divisible by the ranks."""
    ranks = resolve_group(group)
    rows = all_to_all(ranks, input_.reshape(-1, input_.shape[-1]))
    return torch.cat(operators.equal_parts(rows, ranks, 0), dim=-1)


def _sizes(sizes: Tensor | Sequence[int] | None) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


def _all_gather_parts(part: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    """``sizes``: rows of each rank."""
    # pad to the largest: gloo all-gathers equal shapes only
    padded = part.new_zeros((max(sizes), *part.shape[1:]))
    padded[: len(part)] = part
    gathered = operators.all_gather_along_first_dim(padded, group).chunk(group.size)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes)])


def _reduce_scatter_parts(full: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    # all-reduce: gloo cannot reduce-scatter unequal shards, and torch emulates it on NCCL with broadcasts
    return operators.all_reduce_sum(full, group).split(list(sizes))[group.rank].contiguous()


class _UnevenGather(torch.autograd.Function):
    """All-gather of shards of ``sizes`` rows; reduce-scatter of the gradient."""

    @staticmethod
    def forward(ctx: AutogradContext, part: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return part.clone() if group.size == 1 else _all_gather_parts(part, group, sizes)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad if ctx.group.size == 1 else _reduce_scatter_parts(grad, ctx.group, ctx.sizes), None, None


class _UnevenScatter(torch.autograd.Function):
    """Reduce-scatter into shards of ``sizes`` rows; all-gather of the gradient."""

    @staticmethod
    def forward(ctx: AutogradContext, full: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return full.clone() if group.size == 1 else _reduce_scatter_parts(full, group, sizes)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad if ctx.group.size == 1 else _all_gather_parts(grad, ctx.group, ctx.sizes), None, None


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows; backward is the inverse all-to-all."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, group: Group, receive: list[int] | None, send: list[int] | None
    ) -> Tensor:
        ctx.group, ctx.receive, ctx.send = group, receive, send
        return _exchange(x, group, receive, send)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _exchange(grad, ctx.group, ctx.send, ctx.receive), None, None, None


def _exchange(x: Tensor, group: Group, receive: list[int] | None, send: list[int] | None) -> Tensor:
    result = x.new_empty((x.shape[0] if receive is None else sum(receive), *x.shape[1:]))
    dist.all_to_all_single(result, x.contiguous(), receive, send, group=group.handle)
    return result
