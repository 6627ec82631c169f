"""Execution of a pipeline schedule: run this rank's F/B/W actions in order, overlapped with p2p sends and receives.

A stage's output is freed as soon as it has been sent: backward needs only its gradient edge in the autograd graph, not
its values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron.core.pipeline_parallel.actions import Action, Schedule
from megatron.core.pipeline_parallel.p2p import Message, Messages
from megatron.core.pipeline_parallel.results import MicroBatchResult, split_loss
from megatron.core.tensor_parallel.linear import WeightGradientStore


@dataclass(frozen=True)
class Work:
    """Model, data and loss functions that the actions of a schedule use."""

    forward_step: Callable
    """``(iterator, chunk) -> (output, loss_func)``."""
    chunks: Sequence[nn.Module]
    iterators: Sequence[Iterator]
    """One iterator per chunk, all over the same micro-batches."""
    loss_transform: Callable[[Tensor], Tensor] | None = None
    """Function applied to each loss before backward (normalization, loss scale)."""
    collect_non_loss_data: bool = False
    """Whether to call ``loss_func(output, non_loss_data=True)`` and collect its results instead of losses."""
    mean_loss_weight: float | None = None
    """Weight of a micro-batch's mean loss before ``loss_transform``, used to scale auxiliary losses. None: auxiliary
    losses derive from the model's loss mask whether the main loss is a sum or a mean."""


def chunk_iterators(data_iterator: Any, num_chunks: int) -> Sequence[Iterator]:
    """Return one iterator per chunk. A list or tuple of ``num_chunks`` iterators is returned as it is; ValueError for
    another length. A single iterator is teed, so that all chunks see the same micro-batches; None gives None for every
    chunk."""
    if isinstance(data_iterator, list | tuple):
        if len(data_iterator) == num_chunks:
            return data_iterator
        raise ValueError(f"{len(data_iterator)} data iterators for {num_chunks} model chunks: give one, or one each")
    if num_chunks == 1 or data_iterator is None:
        return [data_iterator] * num_chunks
    return itertools.tee(data_iterator, num_chunks)


@dataclass
class _InFlight:
    """Forward state of a micro-batch, kept until its backward."""

    received: Message | None
    """Input tensors from the previous stage, leaves of the autograd graph; None on the first stage."""
    roots: Sequence[Any]
    """The loss, or the gradient edges of the output tensors; an entry is None if its tensor requires no gradient."""
    weight_gradients: Sequence[Callable[[], None]] = ()
    """Weight gradient computations that B deferred to W."""


class PipelineRun:
    """Execution of ``schedule`` for one global batch on this rank.

    Args:
        schedule: actions of all ranks.
        rank: this rank in the pipeline.
        work: model chunks, data and loss functions.
        messages: p2p communication of this rank.
        lookahead: number of following actions whose receives are posted before the current action runs.
    """

    def __init__(self, schedule: Schedule, rank: int, work: Work, messages: Messages, *, lookahead: int = 1) -> None:
        self.schedule, self.rank, self.work, self.messages = schedule, rank, work, messages
        self.actions, self.lookahead = schedule.actions[rank], lookahead
        self.results: list[MicroBatchResult] = []
        self._stores: Sequence[WeightGradientStore] = ()
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._num_loss_values: int | None = None
        """Number of values that ``loss_func`` returned for the first micro-batch (2: mean loss, 3: sum)."""
        last = {(action.kind, action.chunk): action for action in self.actions}
        self._final = {action for (kind, _), action in last.items() if kind != "F"}
        """The last B and the last W of each chunk: only in these may data-parallel reduction start."""

    def run(self) -> list[MicroBatchResult]:
        """Run all actions and return the results of all micro-batches in order; empty on ranks without the loss.
        Gradients accumulate in the parameters. Every rank of the pipeline must call it, once. Sets the loss scale of
        models with auxiliary losses."""
        for chunk in self.work.chunks:
            set_loss_scale(chunk, self.work, self.schedule.has_backward)
        with deferred_weight_gradients(self.work.chunks, self.schedule.splits_backward) as self._stores:
            self._run()
        return self.results

    def _run(self) -> None:
        """Run this rank's actions in order. Before each action post its receive and the receives of the next
        ``lookahead`` actions. At the end wait until all messages have been sent (NCCL: in stream order)."""
        step = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}
        for index, action in enumerate(self.actions):
            # post before computing: an NCCL transfer starts only with its receive, and so overlaps with this action
            for soon in self.actions[index : index + 1 + self.lookahead]:
                self.messages.post(soon)
            step[action.kind](action)
        self.messages.finish()

    def _forward(self, action: Action) -> None:
        """Run the forward pass of a chunk: receive its input, pass it to the model, compute, and send the output or
        (last stage) compute the loss and append the result. Saves the input and the graph's roots for backward; in
        forward-only schedules nothing, without gradients. The output's memory is freed after the send; the model's
        input tensor is cleared. In training sets ``requires_grad`` of the received tensors in place."""
        work, chunk = self.work, self.work.chunks[action.chunk]
        train = self.schedule.has_backward
        received = self.messages.receive(action)
        if received is not None and train:
            for tensor in received:
                tensor.requires_grad_()  # a leaf: backward sends its .grad to the previous stage
        set_input_tensor(chunk, received)
        roots: Sequence[Any]
        with torch.set_grad_enabled(train):
            output, loss_func = work.forward_step(work.iterators[action.chunk], chunk)
            if self.schedule.stage(self.rank, action.chunk) == self.schedule.num_stages - 1:
                roots = [self._loss(output, loss_func)]
            else:
                message = output_tensors(output)
                self.messages.send(action, message)
                # a gradient edge keeps the graph but not the output, whose memory is freed after the send
                roots = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in message]
        # otherwise the model would keep the input alive until its next forward
        set_input_tensor(chunk, None)
        if train:
            self._in_flight[action.chunk, action.microbatch] = _InFlight(received, roots)

    def _loss(self, output: Tensor, loss_func: Callable) -> Tensor | None:
        """Call ``loss_func``, append the micro-batch's result to ``results``, and return the loss after
        ``loss_transform``; None with ``collect_non_loss_data``. Raises UserError if the returned values follow no
        convention or another one than before. In training without ``mean_loss_weight`` also checks the number of tokens
        against the loss mask of models with auxiliary losses, which waits for the device in the first micro-batch."""
        if self.work.collect_non_loss_data:
            kept = loss_func(output, non_loss_data=True)
            self.results.append(MicroBatchResult(num_tokens=torch.zeros(()), non_loss=kept))
            return None
        returned = loss_func(output)
        loss, num_tokens, logged = split_loss(returned, self._num_loss_values)
        self._num_loss_values = len(returned)
        if self.schedule.has_backward and self.work.mean_loss_weight is None:
            check_loss(self.work.chunks[-1], num_tokens if len(returned) == 3 else None)
        self.results.append(MicroBatchResult(num_tokens=num_tokens, logged=logged))
        return loss if self.work.loss_transform is None else self.work.loss_transform(loss)

    def _backward(self, action: Action) -> None:
        """Run a B action: receive the outputs' gradients (on the last stage start from the loss), run autograd, and
        send the gradients of the stage's inputs, zeros for unused ones. Frees inputs and roots. If the schedule splits
        backward, keeps the deferred weight gradients for W. Gradients accumulate in the parameters."""
        key = action.chunk, action.microbatch
        passed = self._in_flight[key] if self.schedule.splits_backward else self._in_flight.pop(key)
        gradients = self.messages.receive(action) or [None]
        pairs = [each for each in zip(passed.roots, gradients, strict=True) if each[0] is not None]
        if pairs:
            with self._grad_sync_context(action):
                roots, theirs = zip(*pairs)
                torch.autograd.backward(roots, theirs)
        if passed.received is not None:
            # send zeros for unused inputs: the previous stage has posted a receive
            found = (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in passed.received)
            self.messages.send(action, tuple(found))
        passed.received, passed.roots = None, ()  # until W, keep only the tensors that weight gradients need
        if self.schedule.splits_backward:
            passed.weight_gradients = self._stores[action.chunk].take()

    def _weight_gradients(self, action: Action) -> None:
        """Run a W action: compute the weight gradients that B deferred, and free the tensors that they needed."""
        with self._grad_sync_context(action):
            for compute in self._in_flight.pop((action.chunk, action.microbatch)).weight_gradients:
                compute()

    def _grad_sync_context(self, action: Action) -> AbstractContextManager:
        """Return the context for a B or W action: the chunk's ``no_sync()``, or one that allows gradient reduction in
        the last B and the last W of a chunk, or for chunks without ``no_sync``."""
        chunk = self.work.chunks[action.chunk]
        # a bucket that is reduced earlier would miss the gradients of later micro-batches
        return nullcontext() if action in self._final else getattr(chunk, "no_sync", nullcontext)()


@contextmanager
def deferred_weight_gradients(chunks: Sequence[nn.Module], split: bool) -> Iterator[Sequence[WeightGradientStore]]:
    """Context in which backward of the chunks' linear layers puts weight gradients into a store instead of computing
    them: sets ``weight_gradient_store`` of all layers, and resets it to None on exit. Yields one store per chunk.
    Without ``split`` the stores stay empty and no layer is changed."""
    stores = [WeightGradientStore() for _ in chunks]
    layers = [
        (module, store) for chunk, store in zip(chunks, stores) if split for module in chunk.modules()
        if hasattr(module, "weight_gradient_store")
    ]  # fmt: skip
    for module, store in layers:
        module.weight_gradient_store = store  # type: ignore[assignment]
    try:
        yield stores
    finally:
        for module, _ in layers:
            module.weight_gradient_store = None  # type: ignore[assignment]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside all wrappers (data-parallel, ``Float16Module``), following ``.module``."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def output_tensors(output: Any) -> Message:
    """Return the tensors of a stage's output, which is a tensor or a tuple of tensors and None (skipped)."""
    return (output,) if isinstance(output, Tensor) else tuple(each for each in output if each is not None)


def set_input_tensor(chunk: nn.Module, message: Message | None) -> None:
    """Pass the previous stage's output to the model inside the wrappers: a tensor, a tuple if there are several, or
    None to clear it. Raises ValueError if there is a message but the model has no ``set_input_tensor``."""
    model: Any = unwrapped(chunk)
    if hasattr(model, "set_input_tensor"):
        model.set_input_tensor(message[0] if message is not None and len(message) == 1 else message)
    elif message is not None:
        raise ValueError(f"{type(model).__name__} is a later pipeline stage: it needs set_input_tensor(tensor)")


def set_loss_scale(chunk: nn.Module, work: Work, has_backward: bool = True) -> None:
    """Call the model's ``set_loss_scale`` with the factor of the main loss, an fp64 scalar on its device:
    ``mean_loss_weight``, then ``loss_transform``, which must accept it. With ``mean_loss_weight`` it also passes
    ``is_mean=True``. Does nothing for models without this method, without a backward, or if neither factor is set."""
    model: Any = unwrapped(chunk)
    weight, transform = work.mean_loss_weight, work.loss_transform
    if not has_backward or (weight is None and transform is None) or not hasattr(model, "set_loss_scale"):
        return
    one = torch.ones((), dtype=torch.float64, device=next(model.parameters()).device)
    scale = one if weight is None else one * weight
    scale = scale if transform is None else transform(scale)
    if weight is None:
        model.set_loss_scale(scale)
    else:
        model.set_loss_scale(scale, is_mean=True)


def check_loss(chunk: nn.Module, num_tokens: Tensor | None) -> None:
    """Pass the number of tokens that the main loss sums over (None: it is a mean) to models with auxiliary losses. The
    model raises UserError if its loss mask contradicts the number. Does nothing for models without ``check_loss``."""
    model: Any = unwrapped(chunk)
    if hasattr(model, "check_loss"):
        model.check_loss(num_tokens)
