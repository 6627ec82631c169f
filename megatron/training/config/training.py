"""Batches, duration, exits and housekeeping of the training loop."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.ranges import Batch, Iterations, Minutes, NonNegativeInt, PositiveInt, Range, Samples


def parse_signal(text: str) -> signal.Signals:
    """``"SIGUSR1"`` (or ``usr1``) -> ``signal.SIGUSR1``."""
    name = text.upper()
    name = name if name.startswith("SIG") else "SIG" + name
    if name not in signal.Signals.__members__:
        raise ValueError("must be the name of a signal, such as SIGTERM or SIGUSR1")
    return signal.Signals[name]


@dataclass(kw_only=True)
class TrainingConfig:
    """Training: batches, duration and exits"""

    micro_batch_size: Batch = flag()
    """Sequences per forward pass and data-parallel rank. Required."""

    global_batch_size: Batch = flag()
    """Sequences per update over all ranks: a multiple of micro batch size x data-parallel size, which is also the
    default."""

    rampup_batch_size: list[Annotated[int, Range(0, 2**40)]] | None = flag(
        "--rampup-batch-size", nargs=3, metavar="START INCREMENT SAMPLES"
    )
    """Grow the batch from START to --global-batch-size in steps of INCREMENT, spread evenly over the first SAMPLES
    samples."""

    step_batch_size_schedule: str | None = None
    """Batch sizes by consumed tokens, such as "0:16 2.4B:320 10B:640"; replaces --global-batch-size."""

    decrease_batch_size_if_needed: bool = False
    """Round a batch that does not divide by micro batch size x data-parallel size down instead of refusing it."""

    train_iters: Iterations = flag()
    """Updates to train for. Either this or --train-samples."""

    train_samples: Samples | None = None
    """Sequences to train for. Either this or --train-iters."""

    exit_interval: PositiveInt | None = None
    """Save and stop, with exit code 0, at the first iteration that is a multiple of this number."""

    exit_duration_in_mins: Minutes | None = None
    """Save and stop, with exit code 0, after this many minutes."""

    save_on_signal: bool = True
    """Leave SIGTERM, SIGUSR1 and Ctrl-C alone. By default each of them, sent to any rank, makes all ranks save after
    the iteration and stop; a second Ctrl-C ends the process at once."""

    exit_signal_handler: bool = False
    """Save and stop, with exit code 0, on --exit-signal."""

    exit_signal: signal.Signals = flag("--exit-signal", default=signal.SIGTERM, parse=parse_signal, metavar="SIGNAL")
    """Signal that --exit-signal-handler waits for."""

    cuda_graph_impl: Literal["none", "local"] = "none"
    """CUDA graphs: local records the forward and backward pass of one micro-batch and replays it for the others, so
    that the GPU never waits for the host. Needs one whole model per rank and fixed shapes."""

    cuda_graph_warmup_steps: Annotated[int, Range(1, 2**20)] = 3
    """Iterations without a graph before --cuda-graph-impl records one, in which kernels are loaded and tuned."""

    iterations_to_skip: list[PositiveInt] = flag("--iterations-to-skip", default_factory=list)
    """Iterations whose data is consumed without an update, for example around a bad batch."""

    check_for_nan_in_loss_and_grad: bool = True
    """Go on when the loss is NaN or infinite, instead of stopping with the iteration and rank."""

    train_sync_interval: PositiveInt | None = None
    """Iterations between waits for the device, which bound how far the host runs ahead."""

    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """Return cached device memory: 1 once per iteration, 2 also after the optimizer step."""

    manual_gc: bool = False
    """Collect Python garbage at the same iteration on every rank instead of whenever it happens."""

    manual_gc_interval: NonNegativeInt = 0
    """Iterations between those collections; 0: only at the start."""

    manual_gc_eval: bool = flag("--no-manual-gc-eval", "--disable-manual-gc-eval", default=True)
    """No collection at the start and end of evaluation."""

    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""


@dataclass(kw_only=True)
class ProfilingConfig:
    """Profiling"""

    profile: bool = False
    """Profile the iterations from --profile-step-start to --profile-step-end."""

    profile_step_start: Annotated[int, Range(0, 2**31 - 1)] = 10
    """First profiled iteration."""

    profile_step_end: NonNegativeInt = 12
    """Iteration at which profiling stops."""

    use_pytorch_profiler: bool = False
    """Profile with torch's profiler instead of marking the range for an external one; on a CPU always."""

    profile_ranks: list[Annotated[int, Range(0, 2**20)]] = flag("--profile-ranks", default_factory=list)
    """Ranks that are profiled; default: rank 0."""

    record_memory_history: bool = False
    """Record device memory events, for torch's memory viewer."""

    memory_snapshot_path: str = "snapshot.pickle"
    """File that the memory history goes to."""
