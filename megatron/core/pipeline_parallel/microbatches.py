"""Forward and backward over the micro-batches of one global batch: choose a schedule and run it. Programs with a custom
training loop call ``schedules.py``, which has Megatron-LM's names.

A *forward step* is ``forward_step(data_iterator, model) -> (output, loss_func)``. ``loss_func(output)`` returns the
losses of the micro-batch by name, each as (sum, count). Backward starts from the sum of the losses times their weights
(``loss_weights.py``), which are known before the forward pass; names without a weight are only logged.

Backward of all micro-batches except the last runs inside ``model.no_sync()``, so that a data-parallel wrapper starts
to reduce gradients in the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.groups.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.pipeline_parallel.choose import build_schedule
from megatron.core.pipeline_parallel.p2p import Messages, MessageShape
from megatron.core.pipeline_parallel.results import MicroBatchResult
from megatron.core.pipeline_parallel.runtime import PipelineRun, Work, chunk_iterators
from megatron.core.pipeline_parallel.schedule_plain import forward_only as forward_only_schedule
from megatron.core.pipeline_parallel.schedule_plain import without_pipeline
from megatron.core.pipeline_parallel.stage_model import message_shapes, unwrapped

_NO_MESSAGES = MessageShape((), torch.float32, torch.device("cpu"))


def run_without_pipeline(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | Sequence[Iterator],
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
    **options: object,
) -> list[MicroBatchResult]:
    """Run all micro-batches through an unpipelined model; return one result per micro-batch. Gradients accumulate;
    backward passes before the last run inside ``model.no_sync()``. ``options``: ``loss_weights``, ``on_forward`` (see
    ``Work``), and ``collect_non_loss_data``: collect ``loss_func(output, non_loss_data=True)`` without backward.
    Others, which ``run_pipeline`` needs, are ignored."""
    chunks = _chunks(model)
    iterators = chunk_iterators(data_iterator, 1)
    only_forward = forward_only or options.get("collect_non_loss_data", False)
    schedule = forward_only_schedule(1, num_microbatches) if only_forward else without_pipeline(num_microbatches)
    work = Work(forward_step_func, chunks, iterators, **_work_options(options))
    return PipelineRun(schedule, 0, work, Messages(schedule, SINGLE_PROCESS, _NO_MESSAGES)).run()


def run_pipeline(
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
    """Run all micro-batches through the pipeline with the configuration's schedule; return one result per micro-batch
    on the last stage, else an empty list. Every rank must call it with the same settings. ``data_iterator`` and
    ``model``: one, or a list by chunk in the order of visits. ``seq_length``: full length, before ranks split it.
    ``options`` as in :func:`run_without_pipeline`; also ``decoder_seq_length`` (``seq_length`` is then the encoder's),
    and ``row_lengths`` if every micro-batch is one row of packed sequences: tokens per row, at most ``seq_length *
    micro_batch_size``."""
    chunks = _chunks(model)
    config: Any = unwrapped(chunks[0]).config
    groups = parallel_state.get_process_groups()
    if options.get("collect_non_loss_data") or forward_only:
        schedule = forward_only_schedule(groups.pp.size, num_microbatches, len(chunks))
    else:
        schedule = build_schedule(config, groups.pp.size, len(chunks), num_microbatches)
    work = Work(forward_step_func, chunks, chunk_iterators(data_iterator, len(chunks)), **_work_options(options))
    lengths = seq_length, options.get("decoder_seq_length")
    shape = message_shape(unwrapped(chunks[0]), groups, lengths, micro_batch_size)
    if (row_lengths := options.get("row_lengths")) is not None:
        shape = of_rows(shape, row_lengths, seq_length)
    varies = getattr(config, "variable_seq_lengths", False)
    messages = Messages(schedule, groups, shape, varies)
    # no lookahead with unknown shapes: such a receive blocks the host until the sender has sent
    lookahead = int(config.overlap_p2p_comm and not varies)
    return PipelineRun(schedule, groups.pp.rank, work, messages, lookahead=lookahead).run()


def _work_options(options: dict[str, object]) -> dict[str, Any]:
    names = ("loss_weights", "collect_non_loss_data", "on_forward")
    return {name: options[name] for name in names if name in options}


def _chunks(model: nn.Module | Sequence[nn.Module]) -> Sequence[nn.Module]:
    return model if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]


def message_shape(
    model: Any, groups: ProcessGroups, lengths: tuple[int, int | None], micro_batch_size: int
) -> MessageShape:
    """Return the shape of messages in ``config.pipeline_dtype``, on the current GPU with NCCL, else the CPU."""
    shapes = message_shapes(model, groups, lengths, micro_batch_size)
    device = torch.device("cpu")
    if dist.get_backend(groups.pp_up.handle) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    num_frozen = getattr(model, "num_frozen_tensors", 0)
    return MessageShape(tuple(shapes), model.config.pipeline_dtype, device, num_frozen=num_frozen)


def of_rows(shape: MessageShape, row_lengths: Sequence[int], seq_length: int) -> MessageShape:
    """Replace hidden states [s, b, h] by [n, 1, h] for packed rows of ``row_lengths`` tokens. Rows are split over the
    same ranks as ``seq_length`` was; [n, 1, h] has the maximum n = s * b. Models may differ in h only."""
    ((local_length, batch),) = {(length, batch) for length, batch, _ in shape.shapes}
    lengths = tuple(length * local_length // seq_length for length in row_lengths)
    shapes = tuple((local_length * batch, 1, hidden) for _, _, hidden in shape.shapes)
    return shape._replace(shapes=shapes, lengths=lengths)


def choose_runner() -> Callable[..., list[MicroBatchResult]]:
    """Return ``run_pipeline`` if the current layout has several pipeline ranks, else ``run_without_pipeline``."""
    return run_pipeline if parallel_state.get_process_groups().pp.size > 1 else run_without_pipeline
