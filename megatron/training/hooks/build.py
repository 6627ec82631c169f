"""Create the hooks that a configuration requests, in calling order."""

from __future__ import annotations

import enum
import logging
import os
import sys
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.timers import Timers
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.hooks.base import Hook
from megatron.training.hooks.console import ConsoleHook, MemoryHook
from megatron.training.hooks.plan import PlanHook
from megatron.training.hooks.profiler import MemoryHistoryHook, ProfilerHook, trace_directory
from megatron.training.hooks.progress import ProgressHook
from megatron.training.hooks.sinks import FileSink, PageHook, TensorBoardSink, WandbSink, missing_package
from megatron.training.hooks.timing import TimingHook
from megatron.training.observe.records import RunInfo

logger = logging.getLogger(__name__)


def build_hooks(cfg: PretrainConfig, run: RunInfo, timers: Timers) -> list[Hook]:
    """Return the hooks of this rank in calling order. On the last rank: files of records (with --save or
    --tensorboard-dir), console, measured times, and sinks, which may fail without ending the run. On every rank
    timers; on CUDA ranks of the first replica memory; on rank 0 --log-progress and --save-hf-interval; then profilers;
    last the page of the run, which reads the files.
    Raises UserError on a rank whose hook lacks its package or companion flag."""
    checkpoint = cfg.checkpoint
    folder = checkpoint.save or cfg.logging.tensorboard_dir
    files = FileSink(Path(folder)) if run.is_log_rank and folder else None
    hooks: list[Hook] = [] if files is None else [files]
    if run.is_log_rank:
        hooks.append(console(cfg))
    if run.device == "cuda" and run.data_parallel_rank == 0:
        hooks.append(MemoryHook(cfg.logging.log_memory_interval))
    if run.is_log_rank or cfg.logging.timing_log_level > 0:
        hooks.append(TimingHook(timers))
    if run.is_log_rank:
        hooks += sinks(cfg, files)
        if run.prediction is not None:
            hooks.append(PlanHook(run.prediction, cfg.training.global_batch_size))
    if cfg.logging.log_progress and run.rank == 0:
        if checkpoint.save is None:
            raise UserError("--log-progress writes <save>/progress.txt: give --save too")
        hooks.append(only_for("--log-progress", ProgressHook(checkpoint.save, cfg.data.seq_length or 0)))
    if checkpoint.save and checkpoint.save_hf_interval and run.rank == 0:
        from megatron.training.hooks.hugging_face import HuggingFaceHook

        source = checkpoint.load_hf
        hooks.append(HuggingFaceHook(checkpoint.save, checkpoint.save_hf_interval, source, cfg.model_family))
    hooks += profilers(cfg, run)
    if files and folder and cfg.logging.write_report and run.trains:
        hooks.append(only_for("report.html", PageHook(Path(folder))))
    return hooks


def console(cfg: PretrainConfig) -> Hook:
    """Return the hook that writes to standard output: log lines, or on a terminal the live view (--console). Raises
    UserError for --console live without the rich package."""
    choice = cfg.logging.console
    if choice == "live" or (choice == "auto" and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"):
        try:
            from megatron.training.hooks.live import LiveHook

            return LiveHook()
        except ImportError as error:
            if choice == "live":
                raise missing_package("--console live", "rich", error) from error
    return ConsoleHook()


def only_for(flag: str, hook: Hook) -> Hook:
    """Return ``hook``, marked so that its failure disables only the feature of ``flag``, not the training."""
    hook.only_for = flag
    return hook


def sinks(cfg: PretrainConfig, files: FileSink | None) -> list[Hook]:
    """Return the TensorBoard and wandb hooks that the flags request. Imports their packages only then; a failure later
    disables only that hook. Raises UserError without --wandb-exp-name or a package."""
    hooks: list[Hook] = []
    if cfg.logging.tensorboard_dir:
        hooks.append(only_for(f"--tensorboard-dir {cfg.logging.tensorboard_dir}", TensorBoardSink(cfg.logging, files)))
    if cfg.logging.wandb_project:
        if not cfg.logging.wandb_exp_name:
            raise UserError("--wandb-project needs --wandb-exp-name, the name of the run")
        hooks.append(
            only_for(f"--wandb-project {cfg.logging.wandb_project}", WandbSink(cfg.logging, wandb_options(cfg)))
        )
    return hooks


def wandb_options(cfg: PretrainConfig) -> dict[str, object]:
    """Return the arguments of ``wandb.init``: project, name, entity, ``dir`` (--wandb-save-dir, else <save>/wandb, else
    ./wandb) and ``config``, which holds all settings as JSON types. Creates no folder."""
    default_dir = Path(cfg.checkpoint.save or "") / "wandb"
    return {
        "project": cfg.logging.wandb_project,
        "name": cfg.logging.wandb_exp_name,
        "entity": cfg.logging.wandb_entity,
        "dir": cfg.logging.wandb_save_dir or str(default_dir),
        "config": {name: plain(value) for name, value in cfg.flat.values().items()},
    }


def plain(value: object) -> object:
    """Return ``value`` converted to JSON types: an enum to its name, lists and tuples to lists, anything but None,
    booleans, numbers and text (a dictionary, say) to ``str(value)``."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def profilers(cfg: PretrainConfig, run: RunInfo) -> list[Hook]:
    """Return the hooks of --profile and --record-memory-history, or an empty list on ranks outside --profile-ranks
    (default: rank 0): torch's profiler with --use-pytorch-profiler or on a CPU, else CUDA markers."""
    hooks: list[Hook] = []
    if run.rank not in (cfg.profiling.profile_ranks or [0]):
        return hooks
    if cfg.profiling.profile:
        # on a CPU, an external profiler has no CUDA range to capture: use torch's profiler
        with_torch = cfg.profiling.use_pytorch_profiler or run.device == "cpu"
        directory = trace_directory(cfg.logging.tensorboard_dir, cfg.checkpoint.save) if with_torch else None
        hooks.append(
            only_for(
                "--profile", ProfilerHook(cfg.profiling.profile_step_start, cfg.profiling.profile_step_end, directory)
            )
        )
    if cfg.profiling.record_memory_history:
        if run.device == "cuda":
            history = MemoryHistoryHook(cfg.profiling.memory_snapshot_path, cfg.logging.log_interval)
            hooks.append(only_for("--record-memory-history", history))
        else:
            logger.warning("--record-memory-history follows the CUDA allocator: there is nothing to record on a CPU")
    return hooks
