"""Batches, duration, exits and housekeeping of the training loop."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Batch, Iterations, Minutes, NonNegativeInt, PositiveInt, Range, Samples


def parse_signal(text: str) -> signal.Signals:
    """``"SIGUSR1"`` (or ``usr1``) -> ``signal.SIGUSR1``."""
    name = text.upper()
    name = name if name.startswith("SIG") else "SIG" + name
    if name not in signal.Signals.__members__:
        raise ValueError("must be the name of a signal, such as SIGTERM or SIGUSR1")
    return signal.Signals[name]


@dataclass(kw_only=True)
class TrainingConfig(FlagGroup):
    """Training: batches, duration and exits"""

    micro_batch_size: Batch = flag()
    """Sequences per forward pass and data-parallel rank. Required."""

    global_batch_size: Batch = flag()
    """Sequences per optimizer step over all ranks: a multiple of micro batch size x data-parallel size (default)."""

    rampup_batch_size: list[Annotated[int, Range(0, 2**40)]] | None = flag(
        "--rampup-batch-size", nargs=3, metavar="START INCREMENT SAMPLES"
    )
    """Batch-size ramp: from START to --global-batch-size in steps of INCREMENT, evenly over the first SAMPLES
    samples."""

    step_batch_size_schedule: str | None = None
    """Batch sizes by consumed tokens, such as "0:16 2.4B:320 10B:640"; replaces --global-batch-size."""

    decrease_batch_size_if_needed: bool = False
    """Round a batch size down to a multiple of micro batch size x data-parallel size, instead of rejecting it."""

    train_iters: Iterations = flag()
    """Optimizer steps to train for. Either this or --train-samples."""

    train_samples: Samples | None = None
    """Sequences to train for. Either this or --train-iters."""

    num_epochs: PositiveInt | None = None
    """Passes over the training data, which must be one data set, to train for: sets --train-samples from its size."""

    exit_interval: PositiveInt | None = None
    """Save and stop, with exit code 0, at the first iteration that is a multiple of this number."""

    exit_duration_in_mins: Minutes | None = None
    """Save and stop, with exit code 0, after this many minutes."""

    save_on_signal: bool = True
    """Save and stop after the current iteration on SIGTERM, SIGUSR1 or Ctrl-C, sent to any rank; a second Ctrl-C ends
    the process at once. Disabled, these signals have their default effect."""

    exit_signal_handler: bool = False
    """Save and stop, with exit code 0, on --exit-signal."""

    exit_signal: signal.Signals = flag("--exit-signal", default=signal.SIGTERM, parse=parse_signal, metavar="SIGNAL")
    """Signal that --exit-signal-handler waits for."""

    cuda_graph_impl: Literal["none", "local"] = "none"
    """CUDA graphs. local: record the forward and backward pass of one micro-batch and replay it for the others, so that
    the GPU never waits for the host. Requires the full model on every rank and fixed shapes."""

    cuda_graph_warmup_steps: Annotated[int, Range(0, 2**20)] = 3
    """Iterations without a graph before --cuda-graph-impl records one; kernels are loaded and tuned in them. 0
    counts as 1."""

    iterations_to_skip: list[PositiveInt] = flag("--iterations-to-skip", default_factory=list)
    """Iterations whose data is consumed without an update, for example around a bad batch."""

    check_for_nan_in_loss_and_grad: bool = True
    """Stop, with the iteration and rank, if the loss or gradient norm is NaN or infinite."""

    error_injection_rate: NonNegativeInt = 0
    """Test of the stop at a NaN loss: on average, one in this many iterations of a data-parallel rank takes its loss
    for NaN. 0: off."""

    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = "transient_error"
    """Errors of --error-injection-rate: persistent ones return in the same iteration after a restart, transient ones do
    not, and a correct result is only logged."""

    train_sync_interval: PositiveInt | None = None
    """Iterations between synchronizations with the device, which limit how far the host runs ahead."""

    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """Free cached device memory: 1 once per iteration, 2 also after the optimizer step."""

    manual_gc: bool = False
    """Run Python's garbage collection at the same iteration on every rank, instead of automatically."""

    manual_gc_interval: NonNegativeInt = 0
    """Iterations between manual garbage collections; 0: only at the start."""

    manual_gc_eval: bool = flag("--no-manual-gc-eval", "--disable-manual-gc-eval", default=True)
    """Run manual garbage collection at the start and end of evaluation."""

    recompute_activations: bool = False
    """Alias of --recompute-granularity selective."""


@dataclass(kw_only=True)
class ProfilingConfig(FlagGroup):
    """Profiling"""

    profile: bool = False
    """Profile the iterations from --profile-step-start to --profile-step-end."""

    profile_step_start: Annotated[int, Range(0, 2**31 - 1)] = 10
    """First profiled iteration."""

    profile_step_end: NonNegativeInt = 12
    """Iteration at which profiling stops."""

    use_pytorch_profiler: bool = False
    """Profile with torch's profiler instead of marking the range for an external one; always on CPUs."""

    profile_ranks: list[Annotated[int, Range(0, 2**20)]] = flag("--profile-ranks", default_factory=list)
    """Ranks to profile; default: rank 0."""

    record_memory_history: bool = False
    """Record device memory events for torch's memory viewer."""

    memory_snapshot_path: str = "snapshot.pickle"
    """File for the memory history."""
