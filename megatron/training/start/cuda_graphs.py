"""CUDA graph of one micro-batch (--cuda-graph-impl local): capture forward and backward once, replay for all others.

A replay launches all kernels with one call, so that the GPU never waits for the host; launch overhead dominates small
models and micro-batches. A graph repeats the same kernels on the same addresses. Therefore:

* Inputs that change are copied into static tensors: the batch, whose sample numbers seed the dropout masks (there is no
  generator state to keep in step). The loss weights, which change with every batch, have fixed addresses.
* Batches reach forward steps on the device, also during warm-up, so that no kernel choice depends on their values;
  padding bounds are tensors that kernels read (``is_on_host`` in ``attention/packed_seq_params.py``).
* Exchanges of tokens between expert-parallel ranks have fixed sizes and go through NCCL, which is captured.
* Captured hook kernels accumulate into ``main_grad``; their host code runs once. The last replay precedes reductions.
* Weights, ``main_grad``, delayed fp8 scales and the graph's memory keep their addresses. Each replay casts fp8 weights.

Each set of shapes has a recording, up to ``MOST_RECORDINGS``; they share one pool of memory. A task may state a number
by which kernels are launched as the shape of a tensor without elements (``full_rows`` of BERT).

The first iterations run eagerly on the capture stream (AccumulateGrad nodes belong to the stream that created them) to
load and tune kernels. Results are bit-identical to eager execution if the same kernels run with and without padding.
Dynamic shapes and other communication inside a micro-batch are rejected (``rules``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.fp8.recipe import fp8_stacks
from megatron.core.fusions.cuda_graphs import Recorder, record_cuda_graph
from megatron.core.pipeline_parallel.loss_weights import LossWeights, weighted_sum
from megatron.core.pipeline_parallel.microbatches import choose_runner
from megatron.core.pipeline_parallel.paired_stage import trained_chunk
from megatron.core.pipeline_parallel.results import MicroBatchResult, logged_pairs
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import to_device

logger = logging.getLogger(__name__)

Outputs = dict[str, Tensor]
"""Losses of a micro-batch for the log, name -> [sum, count]."""

MOST_RECORDINGS = 16
"""Upper bound of the number of graphs. Each takes a second or more to record and some memory for its kernels."""


class _Recording(NamedTuple):
    inputs: dict[str, Tensor]
    replay: Callable[[], Outputs]


class GraphedForwardBackward:
    """Forward-backward function (see ``pipeline_parallel.microbatches``) with CUDA graphs, for a full model on each
    rank.

    Args:
        plain: eager function for the first ``warmup_steps`` calls.
        stream: stream of all work; None on a CPU.
        record: turns a function into its replay; None: CUDA graphs that share memory."""

    def __init__(
        self,
        plain: Callable[..., list[MicroBatchResult]],
        device: torch.device,
        *,
        warmup_steps: int,
        stream: torch.cuda.Stream | None = None,
        record: Recorder | None = None,
    ) -> None:
        self.plain, self.device, self.stream = plain, device, stream
        self._record_function = record
        self.remaining_warmup = warmup_steps
        self._recordings: dict[str, _Recording] = {}

    def __call__(
        self,
        *,
        forward_step_func: Callable,
        data_iterator: Iterator[dict[str, Tensor]],
        model: Sequence[nn.Module],
        num_microbatches: int,
        loss_weights: LossWeights,
        **options: object,
    ) -> list[MicroBatchResult]:
        """Run all micro-batches of one iteration and accumulate local gradients in ``main_grad``, without reducing them
        over data-parallel ranks. The first ``warmup_steps`` calls run ``plain``, with ``options``; then micro-batches
        of one model chunk are replayed, after the first one of each form is recorded. ``loss_weights`` is the same
        object in every call. Raises UserError for one form of micro-batches more than ``MOST_RECORDINGS``."""
        for chunk in map(trained_chunk, model):
            if isinstance(chunk, DataParallel):
                chunk.finish_updates()  # replays call no hooks that would wait
        with nullcontext() if self.stream is None else _on(self.stream):
            if self.remaining_warmup > 0:
                self.remaining_warmup -= 1
                batches = (to_device(batch, self.device) for batch in data_iterator)
                return self.plain(
                    forward_step_func=forward_step_func,
                    data_iterator=batches,
                    model=model,
                    num_microbatches=num_microbatches,
                    loss_weights=loss_weights,
                    **options,
                )
            (chunk,) = model
            results = []
            for _ in range(num_microbatches):
                batch = to_device(next(data_iterator), self.device)
                if (form := _form(batch)) not in self._recordings:
                    if len(self._recordings) == MOST_RECORDINGS:
                        raise UserError(
                            f"--cuda-graph-impl local: a micro-batch holds {form}, and {MOST_RECORDINGS} other forms "
                            f"are recorded, the last one {list(self._recordings)[-1]}; remove the flag for such data"
                        )
                    self._recordings[form] = self._record(batch, forward_step_func, chunk, loss_weights)
                results.append(self._replay(self._recordings[form], batch))
            return results

    def _record(
        self, batch: dict[str, Tensor], forward_step: Callable, chunk: nn.Module, loss_weights: LossWeights
    ) -> _Recording:
        """Capture forward and backward of one micro-batch with a static copy of ``batch`` and the tensors of
        ``loss_weights``. Computes nothing; the first replay does. Backward runs in ``no_sync``."""
        inputs = {name: value.clone() for name, value in batch.items()}
        for state in fp8_stacks(chunk).values():
            state.begin_recording()

        def run() -> Outputs:
            output, loss_func = forward_step(iter([dict(inputs)]), chunk)
            losses = loss_func(output)
            with getattr(chunk, "no_sync", nullcontext)():
                weighted_sum(losses, loss_weights).backward()
            return logged_pairs(losses)

        logger.info("recording the forward and backward pass of a micro-batch (--cuda-graph-impl local)")
        if self._record_function is None:
            self._record_function = partial(record_cuda_graph, pool=torch.cuda.graph_pool_handle())
        return _Recording(inputs, self._record_function(run, self.stream))

    def _replay(self, recording: _Recording, batch: dict[str, Tensor]) -> MicroBatchResult:
        """Copy ``batch`` into the static tensors, replay, and return clones of the logged losses."""
        for name, value in batch.items():
            recording.inputs[name].copy_(value)
        # clone: the next replay overwrites the outputs
        return MicroBatchResult({name: value.clone() for name, value in recording.replay().items()})


def _form(batch: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)} {value.dtype}" for name, value in sorted(batch.items()))


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the body on ``stream``, ordered after earlier and before later work of the current stream."""
    outer = torch.cuda.current_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


def make_forward_backward(cfg: PretrainConfig, device: torch.device) -> Callable[..., list[MicroBatchResult]]:
    """Return the function that runs the micro-batches of an iteration, as selected by --cuda-graph-impl."""
    plain = choose_runner()
    if cfg.training.cuda_graph_impl == "none":
        return plain
    stream, warmup_steps = torch.cuda.Stream(device), max(1, cfg.training.cuda_graph_warmup_steps)
    return GraphedForwardBackward(plain, device, warmup_steps=warmup_steps, stream=stream)
