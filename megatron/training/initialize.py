"""Process initialization: logging, devices, process groups, seeds, determinism. Importing it has no effects."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import random
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron import serve_other_names
from megatron.core import parallel_state
from megatron.core.fusions.cuda_graphs import release_cuda_graphs
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.training.config.launcher import launched_rank, launched_world_size, local_rank
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import rank_order


class _RankFilter(logging.Filter):
    """Passes all records on rank 0; on other ranks only warnings and errors, prefixed by the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop records below WARNING on ranks other than 0, and put the rank in front of the message of those that
        pass, in place and once. Rank 0 passes all records unchanged."""
        if self.rank and record.levelno < logging.WARNING:
            return False
        if self.rank and not getattr(record, "rank_marked", False):
            record.msg = f"[rank {self.rank}] {record.msg}"
            record.rank_marked = True
        return True


class _StdoutHandler(logging.StreamHandler):
    """Handler for stdout that drops the log once the reader has closed it, as in ``| head``; the program continues."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Redirect stdout to the null device after a broken pipe; report other errors as logging does."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())  # the stream's buffer is flushed there too
        os.close(null)


def show_crashes() -> None:
    """Make crashes in native code (SIGSEGV, abort, SIGBUS of a truncated data file) write the stacks to stderr."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, OSError):  # stderr has no file descriptor
            faulthandler.enable(sys.__stderr__)


def configure_logging(level: int | None = None) -> None:
    """Send the log of the ``megatron`` loggers to stdout at ``level`` (None: INFO): rank 0 in full, other ranks only
    warnings and errors with a rank prefix. Replaces the handler of an earlier call."""
    library = logging.getLogger("megatron")
    library.setLevel(logging.INFO if level is None else level)
    library.propagate = False
    for handler in [h for h in library.handlers if getattr(h, "megatron_stdout", False)]:
        library.removeHandler(handler)
    handler = _StdoutHandler(sys.stdout)
    handler.megatron_stdout = True  # type: ignore[attr-defined]
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(_RankFilter(launched_rank()))
    library.addHandler(handler)


def training_device() -> torch.device:
    """Return the GPU of this local rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def seed_everything(seed: int) -> None:
    """Seed the global generators of python, numpy and torch; only user code draws from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def make_deterministic() -> None:
    """Enable --deterministic-mode: operators without a deterministic implementation raise an error that names them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def set_cuda_defaults() -> None:
    """Set environment defaults that must be set before CUDA starts; existing values are kept. 32 hardware queues
    (default: 8) keep streams that wait for a peer from blocking others. Expandable allocator segments avoid
    fragmentation when sizes vary, as with recomputed layers."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if "PYTORCH_ALLOC_CONF" not in os.environ and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def start_distributed(cfg: PretrainConfig, store: dist.Store | None = None) -> None:
    """Initialize torch.distributed with --distributed-backend if torchrun started this process and it is not
    initialized. ``store`` connects the ranks; None: torch opens one from the environment. Collective over all ranks."""
    if dist.is_initialized() or "RANK" not in os.environ:
        return
    timeout = timedelta(minutes=cfg.distributed.distributed_timeout_minutes)
    rank, world_size = launched_rank(), launched_world_size() or 1
    if store is None:
        rank = world_size = -1  # torch reads them from the environment
    dist.init_process_group(
        cfg.distributed.distributed_backend, timeout=timeout, store=store, rank=rank, world_size=world_size
    )


def start_process(cfg: PretrainConfig, store: dist.Store | None = None) -> None:
    """Set the CUDA device, environment defaults and deterministic mode, and start torch.distributed (with ``store``;
    None: from the environment). Collective over all ranks; a second call has no effect."""
    if cfg.model.deterministic_mode and not torch.are_deterministic_algorithms_enabled():
        make_deterministic()
    set_cuda_defaults()
    device = training_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    start_distributed(cfg, store)


def initialize_megatron(cfg: PretrainConfig, store: dist.Store | None = None) -> ProcessGroups:
    """Start the process (:func:`start_process`), create all process groups, then seed python, numpy and torch. Return
    this rank's groups. Collective over all ranks."""
    model = cfg.model
    start_process(cfg, store)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if (chunks := virtual_pipeline_size(cfg.model)) > 1 else None,
        context_parallel_size=model.context_parallel_size,
        expert_model_parallel_size=model.expert_model_parallel_size,
        expert_tensor_parallel_size=model.expert_tensor_parallel_size,
        order=rank_order(cfg),
        nccl_communicator_config_path=cfg.distributed.nccl_communicator_config_path,
        distributed_timeout_minutes=cfg.distributed.distributed_timeout_minutes,
        num_distributed_optimizer_instances=cfg.distributed.num_distributed_optimizer_instances,
        hierarchical_context_parallel_sizes=model.hierarchical_context_parallel_sizes,
        hybrid_context_parallel=model.hybrid_context_parallel,
        copy_engines=model.copy_engines and cfg.training.cuda_graph_impl == "none",  # replays repeat their numbers
        group_of_one=False,  # a single process needs neither torch.distributed nor a network
    )
    seed_everything(model.seed)
    return parallel_state.get_process_groups()


def shut_down() -> None:
    """Synchronize all ranks, then destroy the process groups, so that no rank reports a peer that finished first."""
    if dist.is_initialized():
        dist.barrier()
        release_cuda_graphs()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


serve_other_names(__name__)
