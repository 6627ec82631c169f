"""Forward and backward passes over the micro-batches of one global batch.

A *forward step* is ``forward_step(data_iterator, model) -> (output, loss_func)``; ``loss_func(output)`` returns either

* ``(loss, num_tokens, {name: tensor})``: ``loss`` is the **sum** of the token losses of the micro-batch and
  ``num_tokens`` how many tokens it sums over; each logged value is a pair ``[sum, count]`` or a plain mean; or
* ``(loss, {name: tensor})``: ``loss`` is a mean, and every micro-batch counts alike (the older convention).

Only the schedule without a pipeline lives here so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class MicroBatchResult:
    """What one micro-batch contributes. Tensors stay on their device: nothing here waits for the GPU."""

    num_tokens: Tensor
    """int64 or float scalar: tokens (or, for mean losses, 1) that the loss is a sum over."""
    logged: dict[str, Tensor] = field(default_factory=dict)
    """``name -> float64 [sum, count]``."""
    non_loss: object = None
    """What ``collect_non_loss_data`` asked for."""


def as_sum_and_count(value: Tensor | tuple | float) -> Tensor:
    """A logged value as a float64 pair [sum, count]; a plain mean counts once."""
    if isinstance(value, tuple | list):
        value = torch.stack([torch.as_tensor(part, dtype=torch.float64) for part in value])
    value = torch.as_tensor(value).detach().to(torch.float64)
    return value if value.numel() == 2 else torch.stack([value.reshape(()), torch.ones_like(value.reshape(()))])


def split_loss(returned: tuple) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Both conventions of ``loss_func`` as ``(loss to differentiate, num_tokens, {name: [sum, count]})``."""
    if len(returned) == 3:
        loss, num_tokens, logged = returned
    elif len(returned) == 2:
        loss, logged = returned
        num_tokens = torch.ones((), dtype=torch.int64, device=loss.device)
    else:
        raise ValueError(f"loss_func returned {len(returned)} values; give (loss, num_tokens, dict) or (loss, dict)")
    pairs = {name: as_sum_and_count(value) for name, value in logged.items()}
    return loss, torch.as_tensor(num_tokens).detach(), pairs


def forward_backward_no_pipelining(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | Sequence[Iterator],
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
    loss_transform: Callable[[Tensor], Tensor] | None = None,
    collect_non_loss_data: bool = False,
    **_shapes: int,
) -> list[MicroBatchResult]:
    """Runs every micro-batch through a model that is whole on this rank.

    Args:
        loss_transform: applied to the loss before its backward (the constant of the loss rule, the loss scale).
        collect_non_loss_data: call ``loss_func(output, non_loss_data=True)`` and keep what it returns.
        _shapes: ``seq_length``, ``micro_batch_size`` … which pipelined schedules need for their buffers.

    Gradients of all micro-batches but the last accumulate inside ``model.no_sync()``, so that a data-parallel wrapper
    starts to reduce a bucket with the last one.
    """
    chunk = model[0] if isinstance(model, list | tuple) else model
    iterator = data_iterator[0] if isinstance(data_iterator, list | tuple) else data_iterator
    no_sync = getattr(chunk, "no_sync", nullcontext)
    results = []
    for micro_batch in range(num_microbatches):
        last = micro_batch == num_microbatches - 1
        with nullcontext() if last or forward_only else no_sync(), torch.set_grad_enabled(not forward_only):
            output, loss_func = forward_step_func(iterator, chunk)
            if collect_non_loss_data:
                kept = loss_func(output, non_loss_data=True)
                results.append(MicroBatchResult(num_tokens=torch.zeros(()), non_loss=kept))
                continue
            loss, num_tokens, logged = split_loss(loss_func(output))
            results.append(MicroBatchResult(num_tokens=num_tokens, logged=logged))
            if not forward_only:
                (loss if loss_transform is None else loss_transform(loss)).backward()
    return results


def get_forward_backward_func() -> Callable[..., list[MicroBatchResult]]:
    """The schedule for the layout that is up; without pipeline parallelism, one loop over the micro-batches."""
    return forward_backward_no_pipelining
