"""Data parallelism around a module: gradients accumulate over micro-batches in contiguous buffers
(:mod:`param_and_grad_buffer`) and are *summed*, never averaged, over the data- and context-parallel ranks. The division
by the number of valid tokens of the global batch comes after, in ``finalize_model_grads``: one rule for any layout.

Left out: sharding of gradients or optimizer state, which belongs to the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer, group_by_dtype
from megatron.core.process_groups import ProcessGroups


class DistributedDataParallel(nn.Module):
    """``module`` with ``parameter.main_grad`` accumulated by hooks and summed over the data-parallel ranks.

    Args:
        config: the model's configuration; not read, kept for callers that pass it first.
        ddp_config: bucket size, overlap, reduction dtype.
        module: one model chunk.
        disable_bucketing: one bucket per buffer, whatever ``ddp_config`` says.
        groups: this rank's process groups; None takes those of ``parallel_state``, or one rank where it has none.
    """

    def __init__(
        self, config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module,
        disable_bucketing: bool = False, groups: ProcessGroups | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.group = _gradient_group(groups)
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        overlap = ddp_config.overlap_grad_reduce and not disable_bucketing
        bucket_size = (ddp_config.bucket_size or max(40_000_000, 1_000_000 * ranks)) if overlap else None
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        kinds = group_by_dtype(trained, ddp_config.grad_reduce_in_fp32).items()
        self.grad_buffers = [ParamAndGradBuffer(kin, dtype, bucket_size, self.group) for (_, dtype), kin in kinds]
        self._buffer_of = {parameter: buffer for buffer in self.grad_buffers for parameter in buffer.parameters}
        self._last_microbatch = True
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._accumulate) for parameter in trained]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*args, **kwargs)

    def _accumulate(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if not parameter.grad_added_to_main_grad and parameter.grad is not None:  # type: ignore[attr-defined]
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
        if self.ddp_config.overlap_grad_reduce and self._last_microbatch:
            self._buffer_of[parameter].gradient_arrived(parameter)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here are of micro-batches before the last: nothing is reduced yet."""
        self._last_microbatch = False
        try:
            yield
        finally:
            self._last_microbatch = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Start every sum that has not started."""
        for buffer in self.grad_buffers:
            buffer.start_sync()

    def finish_grad_sync(self, *unused: Any) -> None:
        """``main_grad`` holds the sum over all ranks when this returns (on CUDA: in stream order)."""
        self.start_grad_sync()
        for buffer in self.grad_buffers:
            buffer.finish_sync()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply every gradient; a zero-dimensional tensor avoids a wait for the device."""
        for buffer in self.grad_buffers:
            buffer.grad_data.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Ready for the first micro-batch of an iteration."""
        for parameter in self._buffer_of:
            parameter.grad = None
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        for buffer in self.grad_buffers:
            buffer.reset()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own: names do not change by wrapping."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.load_state_dict(*args, **kwargs)


def _gradient_group(groups: ProcessGroups | None) -> dist.ProcessGroup | None:
    """The ranks that hold the same parameters and other data: data times context parallel; None for one rank."""
    if groups is None and parallel_state.model_parallel_is_initialized():
        groups = parallel_state.get_process_groups()
    return None if groups is None else groups.dp_cp.handle
