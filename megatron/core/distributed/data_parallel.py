"""The interface of data-parallel wrappers to the loop, the optimizer and the checkpoint.

``DistributedDataParallel`` (whole weights, optionally a sharded update) and ``TorchFullyShardedDataParallel`` (sharded
weights) are the two. Both sum each gradient over the ranks that hold the same parameter (``data_parallel_groups``) and
never average it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import adopt_declarations
from megatron.core.statistics import StatisticsSum


class DataParallel(nn.Module):
    """``module`` trained on several ranks' data.

    Args:
        module: one model chunk.
        groups: this rank's process groups.
    """

    def __init__(self, module: nn.Module, groups: ProcessGroups) -> None:
        super().__init__()
        adopt_declarations(module, groups)  # programs that build their model themselves come here first
        self.module = module
        self.groups = groups
        self.shares_update = False
        """Whether the ranks of ``DataParallelGroups.shard`` each update a part of a parameter."""
        self.statistics_sum: StatisticsSum | None = None
        """That of all chunks of this rank, which the first of them keeps."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*args, **kwargs)

    def parameter_shards(self) -> dict[nn.Parameter, ParameterShard] | None:
        """What this rank updates, by parameter; None: everything. A parameter of which it updates nothing is absent."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here are of micro-batches before the last."""
        yield

    def start_grad_sync(self, *unused: Any) -> None:
        """Start every sum that has not started."""

    def finish_grad_sync(self, *unused: Any) -> None:
        """``main_grad`` holds the sums of what this rank updates when this returns (on CUDA: in stream order)."""
        raise NotImplementedError

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply every gradient that this rank uses; a 0-d tensor avoids a wait for the device."""
        raise NotImplementedError

    def zero_grad_buffer(self) -> None:
        """Ready for the first micro-batch of an iteration."""
        raise NotImplementedError

    def start_param_sync(self) -> None:
        """After an update of this rank's shards: bring the others' here, at once or behind the next forward pass."""

    def finish_param_sync(self) -> None:
        """The module's weights may be read when this returns; forward passes and ``state_dict`` see to it."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own: names do not change by wrapping."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.load_state_dict(*args, **kwargs)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model itself, wrapped for data parallelism or not."""
    return module.module if isinstance(module, DataParallel) else module
