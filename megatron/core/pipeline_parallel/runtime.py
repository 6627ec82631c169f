"""Runs any schedule: one loop over this rank's actions, with the messages between stages in flight meanwhile.

An output is let go as soon as it has been sent: what backward needs is its edge in the autograd graph, not its values.
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
    """The model and data behind the actions of a schedule."""

    forward_step: Callable
    """``(iterator, chunk) -> (output, loss_func)``."""
    chunks: Sequence[nn.Module]
    iterators: Sequence[Iterator]
    """One per chunk, over the same micro-batches."""
    loss_transform: Callable[[Tensor], Tensor] | None = None
    collect_non_loss_data: bool = False


def iterators_of_chunks(data_iterator: Any, num_chunks: int) -> Sequence[Iterator]:
    """One iterator per chunk. A single one is read once and shared, so that all chunks see the same micro-batches."""
    if isinstance(data_iterator, list | tuple):
        if len(data_iterator) == num_chunks:
            return data_iterator
        raise ValueError(f"{len(data_iterator)} data iterators for {num_chunks} model chunks: give one, or one each")
    if num_chunks == 1 or data_iterator is None:
        return [data_iterator] * num_chunks
    return itertools.tee(data_iterator, num_chunks)


@dataclass
class _Passed:
    """The part of a forward pass that backward needs."""

    received: Message | None
    roots: Sequence[Any]
    """The loss, or the gradient edges of the tensors of the output; None for one that needs no gradient."""
    weight_gradients: Sequence[Callable[[], None]] = ()
    """Weight gradients that B delayed until W."""


class PipelineRun:
    """One run of ``schedule`` on this rank.

    Args:
        lookahead: actions whose inputs are asked for before the current one is computed.
    """

    def __init__(self, schedule: Schedule, rank: int, work: Work, messages: Messages, *, lookahead: int = 1) -> None:
        self.schedule, self.rank, self.work, self.messages = schedule, rank, work, messages
        self.actions, self.lookahead = schedule.actions[rank], lookahead
        self.results: list[MicroBatchResult] = []
        self._stores: Sequence[WeightGradientStore] = ()
        self._passed: dict[tuple[int, int], _Passed] = {}
        last = {(action.kind, action.chunk): action for action in self.actions}
        self._final = {action for (kind, _), action in last.items() if kind != "F"}
        """After these a chunk's gradients are complete: those that B computes after its last B, the others after its
        last W."""

    def run(self) -> list[MicroBatchResult]:
        """The results of all micro-batches, in order; empty where this rank has no loss."""
        for chunk in self.work.chunks:
            set_loss_scale(chunk, self.work.loss_transform if self.schedule.has_backward else None)
        with weight_gradients_put_off(self.work.chunks, self.schedule.splits_backward) as self._stores:
            self._run()
        return self.results

    def _run(self) -> None:
        step = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}
        for index, action in enumerate(self.actions):
            # before computing: over NCCL a message moves once its receive is posted, so it moves beside this action
            for soon in self.actions[index : index + 1 + self.lookahead]:
                self.messages.post(soon)
            step[action.kind](action)
        self.messages.finish()

    def _forward(self, action: Action) -> None:
        work, chunk = self.work, self.work.chunks[action.chunk]
        train = self.schedule.has_backward
        received = self.messages.receive(action)
        if received is not None and train:
            for tensor in received:
                tensor.requires_grad_()  # a leaf: its .grad is what backward sends to the stage before
        set_input_tensor(chunk, received)
        roots: Sequence[Any]
        with torch.set_grad_enabled(train):
            output, loss_func = work.forward_step(work.iterators[action.chunk], chunk)
            if self.schedule.stage(self.rank, action.chunk) == self.schedule.num_stages - 1:
                roots = [self._loss(output, loss_func)]
            else:
                message = tensors_of(output)
                self.messages.send(action, message)
                # an edge holds the graph but not the output's memory, which is free once it has been sent
                roots = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in message]
        # else the model keeps the input alive until its next forward pass
        set_input_tensor(chunk, None)
        if train:
            self._passed[action.chunk, action.microbatch] = _Passed(received, roots)

    def _loss(self, output: Tensor, loss_func: Callable) -> Tensor | None:
        """Keeps the micro-batch's result; what to differentiate."""
        if self.work.collect_non_loss_data:
            kept = loss_func(output, non_loss_data=True)
            self.results.append(MicroBatchResult(num_tokens=torch.zeros(()), non_loss=kept))
            return None
        returned = loss_func(output)
        loss, num_tokens, logged = split_loss(returned)
        if self.schedule.has_backward:
            check_loss(self.work.chunks[-1], num_tokens if len(returned) == 3 else None)
        self.results.append(MicroBatchResult(num_tokens=num_tokens, logged=logged))
        return loss if self.work.loss_transform is None else self.work.loss_transform(loss)

    def _backward(self, action: Action) -> None:
        key = action.chunk, action.microbatch
        passed = self._passed[key] if self.schedule.splits_backward else self._passed.pop(key)
        gradients = self.messages.receive(action) or [None]
        pairs = [each for each in zip(passed.roots, gradients, strict=True) if each[0] is not None]
        if pairs:
            with self._gradients_follow(action):
                roots, theirs = zip(*pairs)
                torch.autograd.backward(roots, theirs)
        if passed.received is not None:
            # where nothing needs a tensor, the stage before waits for a message all the same
            found = (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in passed.received)
            self.messages.send(action, tuple(found))
        passed.received, passed.roots = None, ()  # where W is still to come, only what it needs stays alive
        if self.schedule.splits_backward:
            passed.weight_gradients = self._stores[action.chunk].take()

    def _weight_gradients(self, action: Action) -> None:
        with self._gradients_follow(action):
            for compute in self._passed.pop((action.chunk, action.microbatch)).weight_gradients:
                compute()

    def _gradients_follow(self, action: Action) -> AbstractContextManager:
        """Data-parallel sums may start with the gradients of the chunk's last micro-batch only."""
        chunk = self.work.chunks[action.chunk]
        # a bucket that is reduced early would miss the gradients of later micro-batches
        return nullcontext() if action in self._final else getattr(chunk, "no_sync", nullcontext)()


@contextmanager
def weight_gradients_put_off(chunks: Sequence[nn.Module], split: bool) -> Iterator[Sequence[WeightGradientStore]]:
    """While it lasts, backward through a linear layer leaves the weight gradient in the store of its chunk."""
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
    """The model inside data-parallel and precision wrappers."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def tensors_of(output: Any) -> Message:
    """The tensors of what a stage puts out: a tensor, or a tuple of them in which None stands for none."""
    return (output,) if isinstance(output, Tensor) else tuple(each for each in output if each is not None)


def set_input_tensor(chunk: nn.Module, message: Message | None) -> None:
    """Hands a stage what the stage before it sent: a tensor, or a tuple where there are several."""
    model: Any = unwrapped(chunk)
    if hasattr(model, "set_input_tensor"):
        model.set_input_tensor(message[0] if message is not None and len(message) == 1 else message)
    elif message is not None:
        raise ValueError(f"{type(model).__name__} is a later pipeline stage: it needs set_input_tensor(tensor)")


def set_loss_scale(chunk: nn.Module, transform: Callable[[Tensor], Tensor] | None) -> None:
    """Tells a model with losses of its own, beside the one that the schedule differentiates, what that is multiplied
    by."""
    model: Any = unwrapped(chunk)
    if transform is not None and hasattr(model, "set_loss_scale"):
        one = torch.ones((), dtype=torch.float64, device=next(model.parameters()).device)
        model.set_loss_scale(transform(one))


def check_loss(chunk: nn.Module, num_tokens: Tensor | None) -> None:
    """Tells a model with losses of its own how many tokens the main loss sums up; None: it is a mean."""
    model: Any = unwrapped(chunk)
    if hasattr(model, "check_loss"):
        model.check_loss(num_tokens)
