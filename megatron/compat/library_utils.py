"""Small functions that programs import from ``megatron.core``: groups, views, ranges of profilers, initial values,
answers of a library without fp8."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.recompute import recompute, recompute_from_split_input

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., object])


# ---- optimizers


def get_megatron_muon_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    *args: Any,
    layer_wise_distributed_optimizer: bool = False,
    **kwargs: Any,
) -> MegatronOptimizer:
    """Build the optimizer of ``config`` with Muon for hidden matrices; further arguments as for
    ``get_megatron_optimizer``. ``layer_wise_distributed_optimizer`` has no effect: ranks always deal matrices. Raises
    UserError if the shards of a distributed optimizer cut a matrix: call ``declare_update_rules`` before wrapping."""
    return get_megatron_optimizer(replace(config, optimizer="muon"), model_chunks, *args, **kwargs)


# ---- groups


def get_pg_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks of a torch group; 1 for None and without torch.distributed."""
    return group.size() if group is not None and dist.is_initialized() else 1


def get_pg_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in a torch group; 0 for None and without torch.distributed."""
    return group.rank() if group is not None and dist.is_initialized() else 0


def get_tensor_model_parallel_group_if_none(
    tp_group: dist.ProcessGroup | None = None, is_expert: bool = False, check_initialized: bool = True
) -> Any:
    """Return ``tp_group``, or if None the running program's tensor-parallel group (``is_expert``: the experts' group);
    that fails outside a program if ``check_initialized``, else gives None."""
    if tp_group is not None:
        return tp_group
    getter = (
        parallel_state.get_expert_tensor_parallel_group if is_expert else parallel_state.get_tensor_model_parallel_group
    )
    return getter(check_initialized=check_initialized)


def is_pp_first_stage(pp_group: dist.ProcessGroup | None) -> bool:
    """Whether this process is the first of a torch group of pipeline stages."""
    return get_pg_rank(pp_group) == 0


def is_pp_last_stage(pp_group: dist.ProcessGroup | None) -> bool:
    """Whether this process is the last of a torch group of pipeline stages."""
    return get_pg_rank(pp_group) == get_pg_size(pp_group) - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether ``vp_stage`` is the first of ``vp_size`` chunks; True without chunks."""
    return vp_size is None or vp_size <= 1 or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether ``vp_stage`` is the last of ``vp_size`` chunks; True without chunks."""
    return vp_size is None or vp_size <= 1 or vp_stage == vp_size - 1


# ---- tensors


class WrappedTensor:
    """A tensor that its caller lets go; :meth:`unwrap` gives it out once."""

    def __init__(self, tensor: Tensor) -> None:
        self._wrapper: list[Tensor] = [tensor]

    def unwrap(self) -> Tensor:
        """Return the tensor and forget it; RuntimeError the second time."""
        if not self._wrapper:
            raise RuntimeError("WrappedTensor: the tensor was unwrapped before")
        return self._wrapper.pop()


def to_local_if_dtensor(tensor: object) -> Any:
    """Return this rank's part of a DTensor, any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a tensor with N(0, sigma^2)."""
    return partial(nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a tensor with N(0, sigma^2 / (multiplier * num_layers))."""
    return partial(nn.init.normal_, mean=0.0, std=sigma / math.sqrt(multiplier * num_layers))


def checkpoint(function: Callable[..., object], distribute_saved_activations: bool, *args: object) -> Any:
    """Recompute ``function(*args)`` in backward: only the arguments are saved, each tensor-parallel rank a part of them
    with ``distribute_saved_activations``. The random tracker's states are restored from the first run."""
    tracker, runs = get_cuda_rng_tracker(), 0
    before = tracker.get_states()

    def run(*inputs: object) -> Any:
        nonlocal runs
        runs += 1
        if runs == 1:
            return function(*inputs)
        now = tracker.get_states()
        tracker.set_states(before)
        try:
            return function(*inputs)
        finally:
            tracker.set_states(now)

    tp = parallel_state.get_process_groups().tp
    if distribute_saved_activations and tp.size > 1:
        return recompute_from_split_input(tp, run, *args)
    return recompute(run, *args)


# ---- profilers, logs, compilers


def configure_nvtx_profiling(enabled: bool) -> None:
    """Accepted: ranges are recorded wherever there is a GPU."""


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Open a range for NVIDIA's profilers, where there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(".".join(part for part in (msg, suffix) if part) or "range")


def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
    """Close the last range."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def nvtx_decorator(message: str | None = None, color: str | None = None) -> Callable[[AnyFunction], AnyFunction]:
    """Record each call as an NVTX range, also if it raises; ``color`` is ignored."""

    def decorate(function: AnyFunction) -> AnyFunction:
        @wraps(function)
        def recorded(*args: object, **kwargs: object) -> Any:
            nvtx_range_push(message or function.__name__)
            try:
                return function(*args, **kwargs)
            finally:
                nvtx_range_pop()

        return recorded  # type: ignore[return-value]

    return decorate


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """``logger.log(*args)`` on one rank."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        logger.log(*args, **kwargs)


def set_experimental_flag(flag: bool) -> None:
    """Reject experimental features of Megatron-LM; accept to leave them off."""
    if flag:
        raise UserError("set_experimental_flag(True): experimental features are not available here; pass False")


# ---- fp8, which layers apply by themselves


HAVE_TE_FP8_TENSOR_CLASS = False
FP8_TENSOR_CLASS = type("FP8_TENSOR_CLASS", (), {"__doc__": "Class without instances; see is_float8tensor."})


def is_float8tensor(tensor: object) -> bool:
    """False: parameters stay in the model's dtype, and fp8 copies are separate."""
    return False


def get_fp8_context(config: object = None, *_: object, **__: object) -> AbstractContextManager[None]:
    """Return a context that changes nothing: layers read fp8 settings when they are built."""
    return nullcontext()


class MultiStorageClientFeature:
    """Access to object stores through ``multistorageclient``, which is off."""

    @staticmethod
    def is_enabled() -> bool:
        """False."""
        return False

    @staticmethod
    def enable() -> None:
        """Reject the feature."""
        raise UserError("MultiStorageClientFeature.enable(): not available here; use paths of a file system")

    @staticmethod
    def disable() -> None:
        """Nothing to do."""
