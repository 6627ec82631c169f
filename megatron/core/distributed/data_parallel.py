"""Interface of the data-parallel wrappers to the training loop, the optimizer and the checkpoint.

Implementations: ``DistributedDataParallel`` (full weights, optionally ZeRO-1) and ``TorchFullyShardedDataParallel``
(sharded weights, FSDP2). Both sum each gradient over the ranks that hold the same parameter (``data_parallel_groups``).
Neither divides by the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.weight_updates import WeightUpdates
from megatron.core.fp8.recipe import fp8_stacks
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.named_slices import NamesSlices, stored_parameters
from megatron.core.sharding.parameter_shard import ParameterShard
from megatron.core.sharding.placement import adopt_declarations
from megatron.core.statistics import StatisticsSum


class DataParallel(NamesSlices):
    """Base class of data-parallel wrappers of one model chunk. The constructor derives the placements of parameters
    without one from Megatron-LM's attributes (``adopt_declarations``)."""

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
        self.updates: WeightUpdates | None = None
        """Updates of the weights that may be in flight; set by :meth:`expect_updates`."""
        self.statistics_sum: StatisticsSum | None = None
        """Statistics reducer for all chunks of this rank; set on the first chunk only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module. Afterwards gradients may be written."""
        output = self.module(*args, **kwargs)
        self.finish_updates()
        return output

    @property
    def overlaps_updates(self) -> bool:
        """Whether forward passes can wait for the update of each parameter separately."""
        return False

    def expect_updates(self, updates: WeightUpdates) -> None:
        """Let all users of weights and gradients wait for ``updates``. Call it once, if :attr:`overlaps_updates`."""
        self.updates = updates

    def finish_updates(self) -> None:
        """Wait for all updates of weights, in stream order."""
        if self.updates is not None:
            self.updates.join()

    def parameter_shards(self) -> dict[nn.Parameter, ParameterShard] | None:
        """Map each parameter to this rank's shard; None if unsharded. Parameters without a local shard are omitted."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable gradient reduction in backward, for all micro-batches but the last. No effect here."""
        yield

    reduced_part = "parameter"
    """Values of :meth:`local_gradients`."""

    @contextmanager
    def local_gradients(self) -> Iterator[Callable[[], list[str]]]:
        """Look at the gradients of this rank before their reduction: clears the gradients and yields a function that
        returns the names of parts with NaN or infinite gradients in the backward passes since. Gradients are
        undefined afterwards. The function waits for the device."""
        self.zero_grad_buffer()
        with self.no_sync():
            yield lambda: [
                name
                for name, parameter in stored_parameters(self.module)
                if parameter.requires_grad and not bool(parameter.main_grad.isfinite().all())  # type: ignore[attr-defined]
            ]

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reductions that backward has not started yet. Does nothing in the base class. Collective."""

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

    def gathers_of_updated(self, unfinished: Collection[nn.Parameter]) -> Iterator[None]:
        """Like :meth:`start_param_sync`, for a caller that is queueing updates: yield until the weights whose
        all-gather is next are no longer ``unfinished``. Only if :attr:`overlaps_updates`."""
        raise NotImplementedError

    def finish_param_sync(self) -> None:
        """Complete the weight all-gathers. Forward passes, ``state_dict`` and ``load_state_dict`` wait for them."""

    def finish_gathers(self) -> None:
        """Wait for the weight all-gathers in flight; weights that forward passes do not read may be missing."""
        self.finish_param_sync()

    def gather_exact_weights(self) -> None:
        """Complete the weight all-gathers, also of weights that were gathered as rounded copies only. Collective."""
        self.finish_param_sync()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the wrapped module's state dict, live tensors; names have no ``module.`` prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module, after :meth:`finish_param_sync`; names have no ``module.`` prefix. The
        optimizer's masters keep the old values until ``MegatronOptimizer.reload_model_params``."""
        self.finish_param_sync()
        return self.module.load_state_dict(*args, **kwargs)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside a data-parallel wrapper, or ``module`` itself if it has no wrapper."""
    return module.module if isinstance(module, DataParallel) else module


class UpdatedGathers:
    """All-gathers of the weights of ``chunks``. Each starts once the updates of its ``parameters`` are queued."""

    def __init__(self, chunks: Iterable[DataParallel], parameters: Iterable[nn.Parameter]) -> None:
        self._unfinished = set(parameters)
        self._waiting = [chunk.gathers_of_updated(self._unfinished) for chunk in chunks]

    def advance(self, updated: Iterable[nn.Parameter]) -> None:
        """Start the all-gathers that follow these updates. Collective: in the same order on all ranks."""
        self._unfinished.difference_update(updated)
        for gathers in self._waiting:
            next(gathers, None)


def weight_updates(chunks: Sequence[nn.Module], device: torch.device, *, overlaps: bool) -> WeightUpdates:
    """Build the queue of updates. With ``overlaps`` they run in the next forward pass if all ``chunks`` can wait."""
    can_wait = all(isinstance(chunk, DataParallel) and chunk.overlaps_updates for chunk in chunks)
    updates = WeightUpdates(device, overlaps=overlaps and can_wait)
    for chunk in chunks:
        if updates.overlaps and isinstance(chunk, DataParallel):
            chunk.expect_updates(updates)
    return updates
