"""Forward and backward passes over the micro-batches of one global batch: chooses a schedule and runs it.

A *forward step* is ``forward_step(data_iterator, model) -> (output, loss_func)``; ``loss_func(output)`` returns either

* ``(loss, num_tokens, {name: tensor})``: ``loss`` is the **sum** of the token losses of the micro-batch and
  ``num_tokens`` how many tokens it sums over; each logged value is a pair ``[sum, count]`` or a plain mean; or
* ``(loss, {name: tensor})``: ``loss`` is a mean, and every micro-batch counts alike (the older convention).

Gradients of all micro-batches but the last accumulate inside ``model.no_sync()``, so that a data-parallel wrapper
starts to reduce a bucket with the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.pipeline_parallel.choose import schedule_of
from megatron.core.pipeline_parallel.p2p import Messages, MessageShape
from megatron.core.pipeline_parallel.results import MicroBatchResult
from megatron.core.pipeline_parallel.runtime import PipelineRun, Work, iterators_of_chunks, unwrapped
from megatron.core.pipeline_parallel.schedule_plain import forward_only as forward_only_schedule
from megatron.core.pipeline_parallel.schedule_plain import without_pipeline

__all__ = ["MicroBatchResult", "forward_backward_no_pipelining", "forward_backward_pipelining",
           "get_forward_backward_func"]  # fmt: skip

_NO_MESSAGES = MessageShape((), torch.float32, torch.device("cpu"))


def forward_backward_no_pipelining(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | Sequence[Iterator],
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
    loss_transform: Callable[[Tensor], Tensor] | None = None,
    collect_non_loss_data: bool = False,
    **_shapes: Any,
) -> list[MicroBatchResult]:
    """Runs every micro-batch through a model that is whole on this rank.

    Args:
        loss_transform: applied to the loss before its backward (the constant of the loss rule, the loss scale).
        collect_non_loss_data: call ``loss_func(output, non_loss_data=True)`` and keep what it returns.
        _shapes: ``seq_length``, ``micro_batch_size`` … which pipelined schedules need for their buffers.
    """
    chunks = _chunks(model)
    iterators = iterators_of_chunks(data_iterator, 1)
    only_forward = forward_only or collect_non_loss_data
    schedule = forward_only_schedule(1, num_microbatches) if only_forward else without_pipeline(num_microbatches)
    work = Work(forward_step_func, chunks, iterators, loss_transform, collect_non_loss_data)
    return _run(PipelineRun(schedule, 0, work, Messages(schedule, SINGLE_PROCESS, _NO_MESSAGES)))


def forward_backward_pipelining(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | Sequence[Iterator],
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
    **options: Any,
) -> list[MicroBatchResult]:
    """Runs every micro-batch through the stages of all pipeline ranks, by the schedule that the model's configuration
    names; every rank of the pipeline calls it alike.

    Args:
        model: this rank's chunk, or its chunks in the order in which a micro-batch visits them.
        seq_length: of the whole sequence, before context and sequence parallelism split it.
        micro_batch_size: sequences per micro-batch.
        options: ``loss_transform`` and ``collect_non_loss_data`` as without a pipeline; ``decoder_seq_length`` of a
            model with two stacks, whose encoder has ``seq_length``; ``row_lengths``, where each micro-batch is one row
            of sequences laid end to end: its tokens, at most ``seq_length * micro_batch_size``.

    Returns:
        One result per micro-batch on the last stage, nothing elsewhere.
    """
    chunks = _chunks(model)
    config: Any = unwrapped(chunks[0]).config
    groups = parallel_state.get_process_groups()
    if options.get("collect_non_loss_data") or forward_only:
        schedule = forward_only_schedule(groups.pp.size, num_microbatches, len(chunks))
    else:
        schedule = schedule_of(config, groups.pp.size, len(chunks), num_microbatches)
    work = Work(
        forward_step_func, chunks, iterators_of_chunks(data_iterator, len(chunks)), options.get("loss_transform"),
        options.get("collect_non_loss_data", False),
    )  # fmt: skip
    lengths = seq_length, options.get("decoder_seq_length")
    shape = message_shape(unwrapped(chunks[0]), groups, lengths, micro_batch_size)
    if (row_lengths := options.get("row_lengths")) is not None:
        shape = of_rows(shape, row_lengths, seq_length)
    messages = Messages(schedule, groups, shape)
    return _run(PipelineRun(schedule, groups.pp.rank, work, messages, lookahead=int(config.overlap_p2p_comm)))


def _run(run: PipelineRun) -> list[MicroBatchResult]:
    """All micro-batches, and the callbacks that a program's own loop has set in its configuration."""
    config = getattr(unwrapped(run.work.chunks[0]), "config", None)  # a model of a program's own need not have one
    if not isinstance(config, ModelParallelConfig):
        return run.run()
    if run.work.loss_transform is None:
        run.work = replace(run.work, loss_transform=config.grad_scale_func)
    results = run.run()
    if config.finalize_model_grads_func is not None and run.schedule.has_backward:
        device = next(run.work.chunks[0].parameters()).device
        num_tokens = torch.zeros((), dtype=torch.float64, device=device)  # stages without the loss count none
        for result in results:
            num_tokens += result.num_tokens
        config.finalize_model_grads_func(list(run.work.chunks), num_tokens)
    return results


def _chunks(model: nn.Module | Sequence[nn.Module]) -> Sequence[nn.Module]:
    return model if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]


def message_shape(
    model: Any, groups: ProcessGroups, lengths: tuple[int, int | None], micro_batch_size: int
) -> MessageShape:  # fmt: skip
    """Hidden states [s, b, h] as one stage passes them to the next, or what ``model.message_shapes`` says."""
    config = model.config
    parts = groups.cp.size * (groups.tp.size if config.sequence_parallel else 1)
    shapes = [(lengths[0] // parts, micro_batch_size, config.hidden_size)]
    if hasattr(model, "message_shapes"):
        shapes = model.message_shapes(lengths, micro_batch_size)
    device = torch.device("cpu")
    if dist.get_backend(groups.pp_up.handle) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    return MessageShape(tuple(shapes), config.pipeline_dtype, device)


def of_rows(shape: MessageShape, row_lengths: Sequence[int], seq_length: int) -> MessageShape:
    """Hidden states [n, 1, h] of rows of ``row_lengths`` tokens in place of [s, b, h], split over as many ranks."""
    ((local_length, batch, hidden),) = shape.shapes
    lengths = tuple(length * local_length // seq_length for length in row_lengths)
    return shape._replace(shapes=((local_length * batch, 1, hidden),), lengths=lengths)


def get_forward_backward_func() -> Callable[..., list[MicroBatchResult]]:
    """The function that runs all micro-batches in the layout that is up: through a pipeline if there is one."""
    if parallel_state.get_process_groups().pp.size > 1:
        return forward_backward_pipelining
    return forward_backward_no_pipelining
