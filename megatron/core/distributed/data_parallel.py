"""Interface of the data-parallel wrappers to the training loop, the optimizer and the checkpoint.

Implementations: ``DistributedDataParallel`` (full weights, optionally ZeRO-1) and ``TorchFullyShardedDataParallel``
(sharded weights, FSDP2). Both sum each gradient over the ranks that hold the same parameter (``data_parallel_groups``).
Neither divides by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from megatron.core.fp8.recipe import fp8_stacks
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import adopt_declarations
from megatron.core.statistics import StatisticsSum


class DataParallel(nn.Module):
    """Base class of data-parallel wrappers of one model chunk. The constructor derives parameter placements from
    Megatron-LM's attributes (``adopt_declarations``) for parameters that have none, so that hand-written models need no
    other setup.

    Args:
        module: one model chunk.
        groups: this rank's process groups.
    """

    sums_gradients = True
    """Whether the data-parallel reduction is a sum (Megatron-LM's is a mean). The schedules read it to scale losses."""

    def __init__(self, module: nn.Module, groups: ProcessGroups) -> None:
        super().__init__()
        adopt_declarations(module, groups)  # a hand-written model has not passed any earlier setup step
        self.module = module
        self.groups = groups
        self.shards_optimizer = False
        """Whether optimizer state is sharded over ``DataParallelGroups.shard`` (ZeRO-1 or FSDP)."""
        self.fp8_stacks = list(fp8_stacks(module).values())
        """fp8 states of the chunk; ``finalize_model_grads`` ends their step. Empty without fp8."""
        self.statistics_sum: StatisticsSum | None = None
        """Statistics reducer for all chunks of this rank; set on the first chunk only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*args, **kwargs)

    def parameter_shards(self) -> dict[nn.Parameter, ParameterShard] | None:
        """Map each parameter to this rank's shard; None if unsharded. Parameters without a local shard are omitted."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable gradient reduction in backward; use it for all micro-batches but the last. The base class changes
        nothing."""
        yield

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reductions that backward has not started yet; the base class has none. Collective."""

    def finish_grad_sync(self, *unused: Any) -> None:
        """Start all remaining reductions and wait for them (on CUDA: in stream order). Collective. Afterwards
        ``main_grad`` holds the summed gradient, valid at least for the elements that this rank updates."""
        raise NotImplementedError

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply every local gradient in place. A 0-d device tensor as the factor avoids a host sync."""
        raise NotImplementedError

    def zero_grad_buffer(self) -> None:
        """Clear all gradients before the first micro-batch of an iteration."""
        raise NotImplementedError

    def start_param_sync(self) -> None:
        """All-gather updated weights after the optimizer step, now or overlapped with the next forward."""

    def finish_param_sync(self) -> None:
        """Complete the weight all-gathers, so that the weights may be read or written. Forward passes and
        ``state_dict`` wait automatically."""

    def gather_exact_weights(self) -> None:
        """Complete the weight all-gathers, including weights of which only rounded copies were gathered. Collective."""
        self.finish_param_sync()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the wrapped module's state dict, live tensors; names have no ``module.`` prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module; names have no ``module.`` prefix. Does not wait for weight all-gathers, which
        would overwrite loaded weights: call :meth:`finish_param_sync` before it. The optimizer's masters keep the old
        values until ``MegatronOptimizer.reload_model_params``."""
        return self.module.load_state_dict(*args, **kwargs)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside a data-parallel wrapper, or ``module`` itself if it has no wrapper."""
    return module.module if isinstance(module, DataParallel) else module
