"""Forward and backward functions for programs with a custom training loop, with Megatron-LM's names and conventions.

``get_forward_backward_func()(forward_step_func=..., data_iterator=..., model=..., num_microbatches=M, ...)`` calls
``forward_step_func(data_iterator, model) -> (output, loss_func)`` for every micro-batch. On the last pipeline stage it
returns a list with one entry per micro-batch, the last value that ``loss_func(output)`` returned, unchanged. On other
stages the list is empty. ``loss_func`` returns

    (loss, anything)                backward starts from loss * CP / M
    (loss, num_tokens, anything)    backward starts from loss / max(num_tokens, 1) / M; with
                                    ``config.calculate_per_token_loss`` from loss, a sum; ``finalize_model_grads``
                                    then divides by the number of tokens

If the model is wrapped in ``DistributedDataParallel``, gradients are means over the data- and context-parallel ranks.
The wrappers sum gradients, so the loss of each rank is divided by the number of these ranks.
``config.grad_scale_func`` is applied to each loss. After the last backward
``config.finalize_model_grads_func(chunks, num_tokens or None)`` is called if it is set.

The training program uses ``microbatches.py`` instead, where losses have weights that are known before the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron import serve_other_names
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.core.pipeline_parallel.microbatches import choose_runner, run_pipeline, run_without_pipeline
from megatron.core.pipeline_parallel.program_losses import MainLossInput, takes_main_loss
from megatron.core.pipeline_parallel.results import MicroBatchResult
from megatron.core.pipeline_parallel.stage_model import unwrapped

__all__ = [
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
]

_OPTIONS = {"seq_length", "micro_batch_size", "decoder_seq_length", "row_lengths"}
_WITHOUT_EFFECT = {"first_val_step", "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection", "force_all_reduce"}
"""Megatron-LM arguments that are accepted and ignored."""


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: object = None
) -> Callable[..., list[object]]:
    """Return the function that runs all micro-batches in the current parallel layout. The arguments are ignored."""
    return _FUNCTIONS[choose_runner()]


LOSS = "loss"
"""Name of a program's main loss among the losses of the runtime."""


class _LossFunctions:
    """Adapter of a program's forward step. ``results``: last value that ``loss_func`` returned per micro-batch."""

    def __init__(self, forward_step: Callable, chunks: Sequence[nn.Module], num_microbatches: int) -> None:
        """Without a config: mean losses, no scaling. If the chunk's wrapper sums gradients and losses are not per
        token, ``mean_weight`` also divides by the data- and context-parallel ranks."""
        self.forward_step = forward_step
        config = getattr(unwrapped(chunks[-1]), "config", None)  # a custom model may have no config
        self.per_token = bool(getattr(config, "calculate_per_token_loss", False))
        self.scale: Callable[[Tensor], Tensor] = getattr(config, "grad_scale_func", None) or (lambda loss: loss)
        groups = parallel_state.get_process_groups()
        self.context_ranks = groups.cp.size
        sums_ranks = getattr(chunks[-1], "sums_gradients", False) and not self.per_token
        self.mean_weight = 1.0 / (num_microbatches * (groups.dp_cp.size if sums_ranks else 1))
        """Weight of a micro-batch's mean loss in the sum over micro-batches and data-parallel ranks."""
        self.main_loss = MainLossInput()
        self.results: list[object] = []

    @contextmanager
    def training(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Pass the scaled weight of the main loss to models that take ``main_loss``, by hooks until exit."""
        models = [model for model in map(unwrapped, chunks) if takes_main_loss(model)]
        hooks = []
        if models:
            weight = torch.ones((), dtype=torch.float64, device=next(models[0].parameters()).device)
            weight = self.scale(weight if self.per_token else weight * self.mean_weight)
            self.main_loss = MainLossInput(MainLoss(weight, is_mean=not self.per_token))
            hooks = [model.register_forward_pre_hook(self.main_loss, with_kwargs=True) for model in models]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __call__(self, iterator: Iterator, chunk: nn.Module) -> tuple[object, Callable]:
        output, loss_func = self.forward_step(iterator, chunk)
        return output, partial(self._loss, loss_func)

    def _loss(self, loss_func: Callable | None, output: object, **non_loss: bool) -> object:
        """Append the last value of ``loss_func`` to ``results``; return ``{LOSS: (scaled loss, number of tokens)}``, 1
        for a mean, {} without backward. Without a loss function append the output. Raises ValueError without a loss
        function for a backward or unless there are 2 or 3 values."""
        if loss_func is None and torch.is_grad_enabled():
            raise ValueError("forward_step_func returned no loss function; return one, or pass forward_only=True")
        if loss_func is None or non_loss:
            self.results.append(output if loss_func is None else loss_func(output, **non_loss))
            return {}
        returned = loss_func(output)
        if len(returned) not in (2, 3):
            raise ValueError(
                f"loss_func returned {len(returned)} values; give (loss, anything) or (loss, num_tokens, anything)"
            )
        self.results.append(returned[-1])
        if not torch.is_grad_enabled():
            return {}
        loss, num_tokens = returned[0], torch.ones(())
        if len(returned) == 2:
            loss = loss * (self.context_ranks * self.mean_weight)
        else:
            num_tokens = torch.as_tensor(returned[1], device=loss.device)
            if not self.per_token:
                loss = loss * self.mean_weight / num_tokens.clamp(min=1)
        if self.per_token:
            self.main_loss.check(num_tokens if len(returned) == 3 else None)
        return {LOSS: (self.scale(loss), num_tokens)}


def _forward_backward(
    runner: Callable[..., list[MicroBatchResult]],
    *,
    forward_step_func: Callable,
    data_iterator: object,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    **options: object,
) -> list[object]:
    """Run all micro-batches by ``runner`` and, after a backward, ``config.finalize_model_grads_func``. Return the last
    value of ``loss_func`` per micro-batch, on stages with the loss. ``options``: ``seq_length`` and
    ``micro_batch_size`` (with a pipeline), ``decoder_seq_length``, ``row_lengths``; other Megatron-LM arguments are
    ignored, unknown ones raise TypeError."""
    if unknown := sorted(options.keys() - _OPTIONS - _WITHOUT_EFFECT):
        raise TypeError(f"forward_backward_func() has no arguments {', '.join(unknown)}")
    options = {name: value for name, value in options.items() if name in _OPTIONS}
    chunks: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    has_backward = not forward_only and not collect_non_loss_data
    losses = _LossFunctions(forward_step_func, chunks, num_microbatches)
    with losses.training(chunks) if has_backward else nullcontext():
        results = runner(
            forward_step_func=losses,
            data_iterator=data_iterator,
            model=chunks,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            **options,
        )
    finalize = getattr(getattr(unwrapped(chunks[0]), "config", None), "finalize_model_grads_func", None)
    if finalize is not None and has_backward:
        finalize(chunks, _num_tokens(results, chunks) if losses.per_token else None)
    return losses.results


def _num_tokens(results: Sequence[MicroBatchResult], chunks: Sequence[nn.Module]) -> Tensor:
    """fp64 scalar on the device, not reduced over ranks; 0 on stages without the loss."""
    total = torch.zeros((), dtype=torch.float64, device=next(chunks[0].parameters()).device)
    for result in results:
        total += result.logged[LOSS][1]
    return total


forward_backward_no_pipelining = partial(_forward_backward, run_without_pipeline)
"""Run all micro-batches of a model without pipeline parallelism."""
forward_backward_pipelining_without_interleaving = partial(_forward_backward, run_pipeline)
"""Run all micro-batches through a pipeline; collective over its ranks."""
forward_backward_pipelining_with_interleaving = forward_backward_pipelining_without_interleaving
"""Run all micro-batches through a pipeline with several chunks per rank."""

_FUNCTIONS: dict[object, Callable[..., list[object]]] = {
    run_without_pipeline: forward_backward_no_pipelining,
    run_pipeline: forward_backward_pipelining_without_interleaving,
}


serve_other_names(__name__)
