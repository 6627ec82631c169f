"""--cuda-graph-impl local: the forward and backward pass of one micro-batch, recorded once and replayed for all others.

A replay launches everything with one call, so that the GPU never waits for the host: what small models and small
micro-batches lose most of their time with. A recording repeats the same kernels on the same addresses, so

* what differs between micro-batches is copied into the recording's own input tensors: the batch, in which the samples'
  numbers stand that dropout masks depend on (there is no generator state to keep in step), and the constant that the
  loss is multiplied with, which ramp-ups and loss scales change;
* batches come to forward steps on the device, also before the recording, so that no step or kernel is chosen by their
  values: bounds of padding are numbers that kernels read (``host_may_read`` in ``attention/packed_seq_params.py``);
* gradients are added to ``main_grad`` by the hooks' kernels, which are recorded like all others; what hooks do on the
  host happens once, while recording. The sums over data-parallel ranks start after the last replay;
* weights, ``main_grad`` and the recording's own memory stay where they are.

The first iterations run without a recording, on the stream that records later (the nodes that accumulate gradients
belong to the stream that made them), and load and tune the kernels. The numbers are those of plain execution, bit for
bit where the same kernels serve without padding and with it. What has no fixed shape, or waits for other ranks inside
a micro-batch, is refused (``rules/backends.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.results import MicroBatchResult, split_loss
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import to_device

logger = logging.getLogger(__name__)

Outputs = tuple[Tensor, dict[str, Tensor]]
"""Number of tokens and logged values of a micro-batch."""
Recorder = Callable[[Callable[[], Outputs], Any], Callable[[], Outputs]]
"""From a function and a stream to what repeats the function; recording computes nothing."""


def record_cuda_graph(run: Callable[[], Outputs], stream: Any) -> Callable[[], Outputs]:
    """A function that replays ``run`` as a CUDA graph; the outputs are the same tensors every time, with new values."""
    graph = torch.cuda.CUDAGraph()
    # other threads (loaders that pin memory, watchdogs) may call CUDA meanwhile
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = run()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


class _Recording(NamedTuple):
    inputs: dict[str, Tensor]
    gradient: Tensor
    """Gradient of the transformed loss with respect to the loss."""
    replay: Callable[[], Outputs]


class GraphedForwardBackward:
    """A forward-backward function (as of ``pipeline_parallel.schedules``) for a model that is whole on this rank.

    Args:
        plain: the function that runs the first ``warmup_steps`` calls.
        stream: where everything runs; None (CPU): the only one there is.
        record: turns a function into its replay.
    """

    def __init__(
        self, plain: Callable[..., list[MicroBatchResult]], device: torch.device, *, warmup_steps: int,
        stream: Any = None, record: Recorder = record_cuda_graph,
    ) -> None:  # fmt: skip
        self.plain, self.device, self.record, self.stream = plain, device, record, stream
        self.remaining_warmup = warmup_steps
        self._recording: _Recording | None = None

    def __call__(
        self, *, forward_step_func: Callable, data_iterator: Iterator[dict[str, Tensor]], model: Sequence[nn.Module],
        num_microbatches: int, loss_transform: Callable[[Tensor], Tensor] | None = None, **shapes: Any,
    ) -> list[MicroBatchResult]:  # fmt: skip
        """All micro-batches of one iteration; gradients are in ``main_grad``."""
        with nullcontext() if self.stream is None else _on(self.stream):
            if self.remaining_warmup > 0:
                self.remaining_warmup -= 1
                batches = (to_device(batch, self.device) for batch in data_iterator)
                return self.plain(
                    forward_step_func=forward_step_func, data_iterator=batches, model=model,
                    num_microbatches=num_microbatches, loss_transform=loss_transform, **shapes,
                )  # fmt: skip
            (chunk,) = model
            factor = self._factor(chunk, loss_transform)
            results = []
            for _ in range(num_microbatches):
                batch = to_device(next(data_iterator), self.device)
                if self._recording is None:
                    self._recording = self._record(batch, forward_step_func, chunk, factor)
                results.append(self._replay(self._recording, batch, factor))
            return results

    def _factor(self, chunk: nn.Module, loss_transform: Callable[[Tensor], Tensor] | None) -> Tensor:
        """The factor of a linear ``loss_transform``, in the dtype of losses."""
        wide = any(parameter.dtype == torch.float64 for parameter in chunk.parameters())
        one = torch.ones((), dtype=torch.float64 if wide else torch.float32, device=self.device)
        return one if loss_transform is None else loss_transform(one)

    def _record(
        self, batch: dict[str, Tensor], forward_step: Callable, chunk: nn.Module, factor: Tensor
    ) -> _Recording:
        inputs = {name: value.clone() for name, value in batch.items()}
        gradient = factor.clone()

        def run() -> Outputs:
            output, loss_func = forward_step(iter([dict(inputs)]), chunk)
            loss, num_tokens, logged = split_loss(loss_func(output))
            with getattr(chunk, "no_sync", nullcontext)():
                torch.autograd.backward([loss], [gradient])
            return num_tokens, logged

        logger.info("recording the forward and backward pass of a micro-batch (--cuda-graph-impl local)")
        return _Recording(inputs, gradient, self.record(run, self.stream))

    def _replay(self, recording: _Recording, batch: dict[str, Tensor], factor: Tensor) -> MicroBatchResult:
        if (found := _form(batch)) != (recorded := _form(recording.inputs)):
            raise UserError(
                f"--cuda-graph-impl local: a micro-batch holds {found}, the recorded one {recorded}; leave the flag "
                "out for such data"
            )
        for name, value in batch.items():
            recording.inputs[name].copy_(value)
        recording.gradient.copy_(factor)
        num_tokens, logged = recording.replay()
        # the next replay overwrites them
        return MicroBatchResult(num_tokens.clone(), {name: value.clone() for name, value in logged.items()})


def _form(batch: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)} {value.dtype}" for name, value in sorted(batch.items()))


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Work inside runs on ``stream``, after what was before and before what comes after."""
    outer = torch.cuda.current_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


def make_forward_backward(cfg: PretrainConfig, device: torch.device) -> Callable[..., list[MicroBatchResult]]:
    """The function that runs the micro-batches of an iteration, as --cuda-graph-impl says."""
    plain = get_forward_backward_func()
    if cfg.cuda_graph_impl == "none":
        return plain
    stream = torch.cuda.Stream(device)
    return GraphedForwardBackward(plain, device, warmup_steps=cfg.cuda_graph_warmup_steps, stream=stream)
