"""Execution of a pipeline schedule: run this rank's F/B/W actions in order, overlapped with p2p sends and receives.

A stage's output is freed as soon as it has been sent: backward needs only its gradient edge in the autograd graph, not
its values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron.core.pipeline_parallel.actions import Action, Schedule
from megatron.core.pipeline_parallel.loss_weights import weighted_sum
from megatron.core.pipeline_parallel.p2p import Message, Messages
from megatron.core.pipeline_parallel.results import MicroBatchResult, logged_pairs
from megatron.core.pipeline_parallel.stage_model import DefersWeightGradients, output_tensors, set_input
from megatron.core.tensor_parallel.linear import WeightGradientStore

ForwardEvent = Literal["reads", "has batch", "done", "generates"]
"""Moments of a forward step: before it reads its micro-batch, after it has read it, and at its end; or before and
after a step of generation."""


@dataclass(frozen=True)
class Work:
    """Model, data and loss functions that the actions of a schedule use."""

    forward_step: Callable
    """``(iterator, chunk) -> (output, loss_func)``, and ``loss_func(output) -> {name: (sum, count)}``."""
    chunks: Sequence[nn.Module]
    iterators: Sequence[Iterator]
    """One iterator per chunk, all over the same micro-batches."""
    loss_weights: Mapping[str, Tensor] | None = None
    """Weights of the losses, 0-d device tensors; losses without a weight are only logged. None: every loss weighs 1."""
    collect_non_loss_data: bool = False
    """Whether to call ``loss_func(output, non_loss_data=True)`` and collect its results instead of losses."""
    on_forward: Callable[[ForwardEvent, bool], None] | None = None
    """Called with every event of a forward step and whether a backward follows."""


def chunk_iterators(data_iterator: Any, num_chunks: int) -> Sequence[Iterator]:
    """Return one iterator per chunk. A list or tuple of ``num_chunks`` iterators is returned as it is; ValueError for
    another length. A single iterator is teed; None gives None for every chunk."""
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
    """Input tensors from the previous stage with gradients, leaves of the graph; None on the first stage."""
    roots: Sequence[object]
    """The loss, or the gradient edges of the output tensors; an entry is None if its tensor requires no gradient."""
    weight_gradients: Sequence[Callable[[], None]] = ()
    """Weight gradient computations that B deferred to W."""


class PipelineRun:
    """Execution of ``schedule`` for one global batch on this rank of the pipeline. ``lookahead``: number of following
    actions whose receives are posted before the current action runs."""

    def __init__(self, schedule: Schedule, rank: int, work: Work, messages: Messages, *, lookahead: int = 1) -> None:
        self.schedule, self.rank, self.work, self.messages = schedule, rank, work, messages
        self.actions, self.lookahead = schedule.actions[rank], lookahead
        self.results: list[MicroBatchResult] = []
        self._stores: Sequence[WeightGradientStore] = ()
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._iterators: Sequence[Iterator] = work.iterators
        if work.on_forward is not None:
            self._iterators = [
                None if iterator is None else notify_reads(iterator, work.on_forward, schedule.has_backward)
                for iterator in work.iterators
            ]
        last = {(action.kind, action.chunk): action for action in self.actions}
        self._final = {action for (kind, _), action in last.items() if kind != "F"}
        """The last B and the last W of each chunk: only in these may data-parallel reduction start."""

    def run(self) -> list[MicroBatchResult]:
        """Run this rank's actions in order; return the results of all micro-batches, empty without the loss. Every rank
        of the pipeline must call it, once. Before each action posts its receive and those of the next ``lookahead``
        actions; waits at the end until all messages have been sent (NCCL: in stream order)."""
        step = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}
        with deferred_weight_gradients(self.work.chunks, self.schedule.splits_backward) as self._stores:
            for index, action in enumerate(self.actions):
                # post before computing: an NCCL transfer starts only with its receive, and so overlaps with this action
                for soon in self.actions[index : index + 1 + self.lookahead]:
                    self.messages.post(soon)
                step[action.kind](action)
            self.messages.finish()
        return self.results

    def _forward(self, action: Action) -> None:
        """Receive, compute, then send, or (last stage) compute the loss. Saves the input and the roots for backward.
        The memory of the output is freed after the send."""
        work, chunk = self.work, self.work.chunks[action.chunk]
        train = self.schedule.has_backward
        received = self.messages.receive(action)
        with_gradients = self.messages.message.with_gradients
        if received is not None and train:
            for tensor in with_gradients(received):
                tensor.requires_grad_()  # a leaf: backward sends its .grad to the previous stage
        set_input(chunk, received)
        roots: Sequence[object]
        with torch.set_grad_enabled(train):
            self._event("reads")
            output, loss_func = work.forward_step(self._iterators[action.chunk], chunk)
            self._event("done")
            if self.schedule.stage(self.rank, action.chunk) == self.schedule.num_stages - 1:
                roots = [self._loss(output, loss_func)]
            else:
                message = output_tensors(output)
                self.messages.send(action, message)
                # a gradient edge keeps the graph but not the output, whose memory is freed after the send
                edges = with_gradients(message)
                roots = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in edges]
        # otherwise the model would keep the input alive until its next forward
        set_input(chunk, None)
        if train:
            leaves = None if received is None else with_gradients(received)
            self._in_flight[action.chunk, action.microbatch] = _InFlight(leaves, roots)

    def _event(self, event: ForwardEvent) -> None:
        if self.work.on_forward is not None:
            self.work.on_forward(event, self.schedule.has_backward)

    def _loss(self, output: Tensor, loss_func: Callable) -> Tensor | None:
        """Append the result and return the weighted sum of losses, None without backward. UserError if the losses are
        not (sum, count) by name."""
        if self.work.collect_non_loss_data:
            self.results.append(MicroBatchResult(non_loss=loss_func(output, non_loss_data=True)))
            return None
        losses = loss_func(output)
        self.results.append(MicroBatchResult(logged_pairs(losses)))
        return weighted_sum(losses, self.work.loss_weights) if self.schedule.has_backward else None

    def _backward(self, action: Action) -> None:
        """Run a B action; unused inputs get zeros as gradients. Frees inputs and roots. If the schedule splits
        backward, keeps the deferred weight gradients for W."""
        key = action.chunk, action.microbatch
        passed = self._in_flight[key] if self.schedule.splits_backward else self._in_flight.pop(key)
        gradients = self.messages.receive(action) or [None]
        pairs = [pair for pair in zip(passed.roots, gradients, strict=True) if pair[0] is not None]
        if pairs:
            with self._grad_sync_context(action):
                roots, gradients_of_roots = zip(*pairs)
                torch.autograd.backward(roots, gradients_of_roots)
        if passed.received is not None:
            # send zeros for unused inputs: the previous stage has posted a receive
            input_gradients = (
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in passed.received
            )
            self.messages.send(action, tuple(input_gradients))
        passed.received, passed.roots = None, ()  # until W, keep only the tensors that weight gradients need
        if self.schedule.splits_backward:
            passed.weight_gradients = self._stores[action.chunk].take()

    def _weight_gradients(self, action: Action) -> None:
        with self._grad_sync_context(action):
            for compute in self._in_flight.pop((action.chunk, action.microbatch)).weight_gradients:
                compute()

    def _grad_sync_context(self, action: Action) -> AbstractContextManager:
        chunk = self.work.chunks[action.chunk]
        # a bucket that is reduced earlier would miss the gradients of later micro-batches
        return nullcontext() if action in self._final else getattr(chunk, "no_sync", nullcontext)()


def notify_reads(iterator: Iterator, on_forward: Callable[[ForwardEvent, bool], None], has_backward: bool) -> Iterator:
    """Yield the micro-batches of ``iterator``; call ``on_forward`` when each has been read."""
    # not a method: a generator that refers to the run it belongs to would keep the run, its batches and the loader's
    # worker processes alive until a garbage collection
    for batch in iterator:
        on_forward("has batch", has_backward)
        yield batch


@contextmanager
def deferred_weight_gradients(chunks: Sequence[nn.Module], split: bool) -> Iterator[Sequence[WeightGradientStore]]:
    """Context in which backward of the chunks' linear layers puts weight gradients into a store instead of computing
    them: sets ``weight_gradient_store`` of all layers, and resets it to None on exit. Yields one store per chunk.
    Without ``split`` the stores stay empty and no layer is changed."""
    stores = [WeightGradientStore() for _ in chunks]
    layers = [
        (module, store)
        for chunk, store in zip(chunks, stores)
        if split
        for module in chunk.modules()
        if isinstance(module, DefersWeightGradients)
    ]
    for module, store in layers:
        module.weight_gradient_store = store
    try:
        yield stores
    finally:
        for module, _ in layers:
            module.weight_gradient_store = None
