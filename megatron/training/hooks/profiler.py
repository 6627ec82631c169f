"""--profile: profile the iterations after --profile-step-start up to --profile-step-end, by torch or an external
profiler.

--record-memory-history records CUDA allocator events for https://pytorch.org/memory_viz."""

import logging
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import UserError
from megatron.core.safe_files import create_file, make_folder
from megatron.training.exits.conditions import every
from megatron.training.hooks.base import Hook
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import RunInfo
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)


def trace_directory(tensorboard_dir: str | None, save: str | None) -> Path:
    """Return the folder for traces: next to the TensorBoard directory, else in the save directory, else in "."."""
    if tensorboard_dir:
        return Path(tensorboard_dir).resolve().parent / "torch_profile"
    return Path(save or ".") / "torch_profile"


class ProfilerHook(Hook):
    """Profiles after iteration ``start`` until after ``end``; a resume in between starts at once. With ``directory``,
    torch's profiler writes ``rank-<rank>.json.gz`` there, for a browser's trace viewer. Otherwise the range is only
    marked for an external profiler: ``nsys profile --capture-range=cudaProfilerApi``. Both show each iteration as a
    range named ``iteration N``. Raises UserError for an empty range."""

    def __init__(self, start: int, end: int, directory: Path | None):
        if not 0 <= start < end:
            raise UserError(f"--profile-step-end {end} must be larger than --profile-step-start {start} (from 0 on)")
        self.start, self.end, self.directory = start, end, directory
        self.rank = 0
        self.running: Any = None
        self.range: torch.profiler.record_function | None = None

    def on_start(self, run: RunInfo) -> None:
        self.rank = run.rank
        self._update(run.state.iteration)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        self._update(state.iteration)

    def on_end(self) -> None:
        self._stop()

    def _update(self, iteration: int) -> None:
        """Close the range of the finished iteration and, while profiling, open one for the next."""
        if self.running is None and self.start <= iteration < self.end:
            self.running = torch_profiler() if self.directory is not None else CudaRange()
            self.running.start()
        elif self.running is not None and iteration >= self.end:
            self._stop()
        self._close_range()
        if self.running is not None:
            self.range = torch.profiler.record_function(f"iteration {iteration + 1}")
            self.range.__enter__()

    def _close_range(self) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None

    def _stop(self) -> None:
        """Write the trace; a warning if it cannot be written, which does not end training."""
        if self.running is None:
            return
        self._close_range()
        self.running.stop()
        if self.directory is not None:
            path = self.directory / f"rank-{self.rank}.json.gz"
            try:
                self.directory.parent.mkdir(parents=True, exist_ok=True)
                make_folder(self.directory)
                create_file(path).close()  # else torch would follow a link with that name
                self.running.export_chrome_trace(str(path))
                logger.info("wrote the trace of iterations %d to %d to %s", self.start + 1, self.end, path)
            except OSError as error:
                logger.warning("cannot write the trace %s (%s): training continues", path, error.strerror)
        self.running = None


def torch_profiler() -> torch.profiler.profile:
    """Return a torch profiler for CPU and, if available, CUDA activities."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, record_shapes=True)


class CudaRange:
    """Range that an external profiler captures, with NVTX ranges for every operator."""

    def __init__(self) -> None:
        self.markers = torch.autograd.profiler.emit_nvtx(record_shapes=True) if torch.cuda.is_available() else None

    def start(self) -> None:
        if self.markers is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
            self.markers.__enter__()

    def stop(self) -> None:
        if self.markers is not None:
            self.markers.__exit__(None, None, None)
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())


class MemoryHistoryHook(Hook):
    """Dumps the allocator history to ``path`` at every log interval and at the end, also after out-of-memory errors.
    Ranks above 0 append ``-<rank>`` to the file's stem."""

    def __init__(self, path: str, log_interval: int):
        self.path, self.log_interval = path, log_interval

    def on_start(self, run: RunInfo) -> None:
        if run.rank > 0:
            target = Path(self.path)
            self.path = str(target.with_name(f"{target.stem}-{run.rank}{target.suffix}"))
        torch.cuda.memory._record_memory_history(max_entries=100_000)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        if every(self.log_interval, state.iteration):
            torch.cuda.memory._dump_snapshot(self.path)

    def on_end(self) -> None:
        torch.cuda.memory._dump_snapshot(self.path)
        torch.cuda.memory._record_memory_history(enabled=None)
