"""Create the hooks that a configuration requests, in calling order."""

from __future__ import annotations

import dataclasses
import enum
import logging
from pathlib import Path
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.timers import Timers
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.hooks.console import ConsoleHook, MemoryHook
from megatron.training.hooks.profiler import MemoryHistoryHook, ProfilerHook, trace_directory
from megatron.training.hooks.progress import ProgressHook
from megatron.training.hooks.recorder import MetricsRecorder, TimingRecorder
from megatron.training.hooks.scalars import Tags
from megatron.training.hooks.timing import Clock, TimersHook
from megatron.training.observe.metrics import METRICS_FILE, TIMING_FILE, MetricsFile, metrics_directory
from megatron.training.observe.throughput import Throughput

logger = logging.getLogger(__name__)


def build_hooks(cfg: PretrainConfig, run: RunInfo, timers: Timers) -> list[Hook]:
    """Return the hooks of this rank: ``metrics.jsonl`` first, then console, values gathered over ranks, and sinks,
    which may fail without ending the run. Raises UserError for a flag whose package or companion flag is missing."""
    clock = Clock(Throughput(run.world_size, run.device_name), timers, run.device)
    directory = metrics_directory(cfg.save, cfg.tensorboard_dir)
    files = [MetricsFile(directory / name) for name in (METRICS_FILE, TIMING_FILE)] if directory else []
    hooks: list[Hook] = []
    if run.is_log_rank:
        if files:
            hooks.append(MetricsRecorder(files[0], trains=not cfg.skip_train))
        hooks.append(ConsoleHook(clock.throughput if cfg.log_throughput else None))
    if run.device == "cuda" and run.data_parallel_rank == 0:
        hooks.append(MemoryHook(cfg.log_memory_interval))
    if cfg.timing_log_level > 0:
        hooks.append(TimersHook(timers))
    if run.is_log_rank:
        if files:
            hooks.append(TimingRecorder(files[1], clock, trains=not cfg.skip_train))
        hooks += sinks(cfg, run, clock, files)
    if cfg.log_progress and run.rank == 0:
        if cfg.save is None:
            raise UserError("--log-progress writes <save>/progress.txt: give --save too")
        hooks.append(only_for("--log-progress", ProgressHook(cfg.save, cfg.seq_length or 0)))
    if cfg.save and cfg.save_hf_interval and run.rank == 0:
        from megatron.training.hooks.hugging_face import HuggingFaceHook

        hooks.append(HuggingFaceHook(cfg.save, cfg.save_hf_interval, cfg.load_hf))
    return hooks + profilers(cfg, run)


def only_for(flag: str, hook: Hook) -> Hook:
    """Return ``hook``, marked so that its failure disables only the feature of ``flag``, not the training."""
    hook.only_for = flag
    return hook


def sinks(cfg: PretrainConfig, run: RunInfo, clock: Clock, files: list[MetricsFile]) -> list[Hook]:
    """Return the TensorBoard and wandb hooks that --tensorboard-dir and --wandb-project request, TensorBoard first.
    Imports their packages only if requested; a failure later disables only that hook. Raises UserError without
    --wandb-exp-name or a package. Does not check the rank."""
    hooks: list[Hook] = []
    tags = Tags(
        loss_scale=cfg.log_loss_scale_to_tensorboard,
        validation_perplexity=cfg.log_validation_ppl_to_tensorboard,
        throughput=cfg.log_throughput,
        timers=cfg.log_timers_to_tensorboard,
        memory=cfg.log_memory_to_tensorboard,
        world_size=run.world_size if cfg.log_world_size_to_tensorboard else None,
    )
    if cfg.tensorboard_dir:
        from megatron.training.hooks.tensorboard import TensorBoardHook

        tensorboard = TensorBoardHook(
            {"log_dir": cfg.tensorboard_dir, "max_queue": cfg.tensorboard_queue_size},
            tags,
            clock,
            point_interval=cfg.tensorboard_log_interval,
            history=files,
        )
        hooks.append(only_for(f"--tensorboard-dir {cfg.tensorboard_dir}", tensorboard))
    if cfg.wandb_project:
        if not cfg.wandb_exp_name:
            raise UserError("--wandb-project needs --wandb-exp-name, the name of the run")
        from megatron.training.hooks.wandb_ import WandbHook

        wandb = WandbHook(wandb_options(cfg), tags, clock, point_interval=cfg.tensorboard_log_interval)
        hooks.append(only_for(f"--wandb-project {cfg.wandb_project}", wandb))
    return hooks


def wandb_options(cfg: PretrainConfig) -> dict[str, Any]:
    """Return the arguments of ``wandb.init``: project, name, entity, ``dir`` (--wandb-save-dir, else <save>/wandb, else
    ./wandb) and ``config``, which holds all settings as JSON types. Creates no folder."""
    default_dir = Path(cfg.save) / "wandb" if cfg.save else Path("wandb")
    return {
        "project": cfg.wandb_project,
        "name": cfg.wandb_exp_name,
        "entity": cfg.wandb_entity,
        "dir": cfg.wandb_save_dir or str(default_dir),
        "config": {field.name: plain(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)},
    }


def plain(value: Any) -> Any:
    """Return ``value`` converted to JSON types."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def profilers(cfg: PretrainConfig, run: RunInfo) -> list[Hook]:
    """Return the hooks of --profile and --record-memory-history, or an empty list on ranks outside --profile-ranks
    (default: rank 0). Uses torch's profiler with --use-pytorch-profiler or on a CPU, else CUDA markers for an external
    profiler. On a CPU, warn that memory history is not recorded."""
    hooks: list[Hook] = []
    if run.rank not in (cfg.profile_ranks or [0]):
        return hooks
    if cfg.profile:
        # on a CPU, an external profiler has no CUDA range to capture: use torch's profiler
        with_torch = cfg.use_pytorch_profiler or run.device == "cpu"
        directory = trace_directory(cfg.tensorboard_dir, cfg.save) if with_torch else None
        hooks.append(only_for("--profile", ProfilerHook(cfg.profile_step_start, cfg.profile_step_end, directory)))
    if cfg.record_memory_history:
        if run.device == "cuda":
            history = MemoryHistoryHook(cfg.memory_snapshot_path, cfg.log_interval)
            hooks.append(only_for("--record-memory-history", history))
        else:
            logger.warning("--record-memory-history follows the CUDA allocator: there is nothing to record on a CPU")
    return hooks
