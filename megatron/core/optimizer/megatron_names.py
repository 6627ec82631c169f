"""Optimizer members that Megatron-LM programs use: chained optimizers, per-parameter state, gradient checks."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.core.config.errors import UserError

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer


class ParameterState(MutableMapping[str, Any]):
    """Mutable mapping with the state of one parameter: its moments by kind, and ``step``, shared by all parameters. An
    assigned moment replaces the tensor by reference. Deletion raises TypeError."""

    def __init__(self, optimizer: MegatronOptimizer, name: str) -> None:
        self._optimizer, self._name = optimizer, name

    def _kinds(self) -> list[str]:
        return [kind for kind, tensors in self._optimizer.moments.items() if self._name in tensors]

    def __getitem__(self, kind: str) -> Tensor:
        self._optimizer.host_state.settle()  # the caller may read or change it
        return self._optimizer._steps if kind == "step" else self._optimizer.moments[kind][self._name]

    def __setitem__(self, kind: str, value: Any) -> None:
        """Replace the moment ``kind`` by reference, unchecked; ``step`` sets the count of all parameters."""
        if kind == "step":
            self._optimizer._steps.fill_(float(value))
        elif kind in self._kinds():
            self._optimizer.host_state.settle()
            self._optimizer.moments[kind][self._name] = value
        else:
            raise KeyError(kind)

    def __delitem__(self, kind: str) -> None:
        raise TypeError(f"the state {kind!r} of a parameter cannot be removed; assign zeros")

    def __iter__(self) -> Iterator[str]:
        return iter([*self._kinds(), "step"])

    def __len__(self) -> int:
        return len(self._kinds()) + 1


class InnerOptimizer:
    """View returned by ``optimizer.optimizer``, with a torch optimizer's members ``param_groups`` and ``state``."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer (same list); ``params`` holds only parameters with a local shard."""
        return self._optimizer.param_groups

    @property
    def state(self) -> dict[nn.Parameter, ParameterState]:
        """State by model parameter, for parameters with a shard on this rank."""
        owner = self._optimizer
        return {owner.model_params[name]: ParameterState(owner, name) for name in owner.storage}


class MegatronNames:
    """Base class of :class:`MegatronOptimizer` with members of Megatron-LM's optimizers."""

    is_stub_optimizer = False

    @property
    def chained_optimizers(self: Any) -> list[Any]:
        """List with this optimizer only, which updates dense and expert parameters."""
        return [self]

    @property
    def optimizer(self: Any) -> InnerOptimizer:
        """View with ``param_groups`` and ``state`` like a torch optimizer."""
        return InnerOptimizer(self)

    @property
    def shard_fp32_from_float16_groups(self: Any) -> list[list[Tensor]]:
        """Live fp32 copies of half-precision weights, by parameter group; empty lists if 16-bit remainders are stored.
        A change reaches the model weights only with the next update."""
        self.host_state.settle()
        masters = ([self.storage[name] for name in group["names"]] for group in self.param_groups)
        return [[master.kept for master in group if master.kept_dtype == torch.float32] for group in masters]

    def get_parameters(self: Any) -> list[nn.Parameter]:
        """Return the model parameters with a shard on this rank, in the order of the parameter groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def prepare_grads(self: Any) -> bool:
        """Return whether any gradient is not finite, if a loss scale is used; else False. Changes no gradients:
        ``step`` unscales them itself. With a loss scale it is collective and waits for the device."""
        return self.grad_scaler is not None and not bool(self._norm(self.local_gradients()).isfinite())

    def get_grad_norm(self: Any) -> float:
        """Return the global L2 norm of the gradients before clipping, unscaled. Collective; waits for the device."""
        return float(self._norm(self.local_gradients())) / self.get_loss_scale()

    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any = None, is_loading: bool = False, *unused: Any, **ignored: Any
    ) -> dict[str, Any]:
        """Return moments and main parameters (as ``ShardedTensor``), step and loss scale in one flat dictionary with
        keys ``optimizer.…``, for ``dist_checkpointing.save`` and ``load``. ``load`` fills these tensors; then pass its
        result to ``load_state_dict``, which sets weights and step. Ignores the arguments."""
        self._lent_state = state = self.state_dict()
        scalars = {f"{_PREFIX}{name}": state[name] for name in ("step", "grad_scaler")}
        return {**self.sharded_tensors(prefix=_PREFIX, state=state), **scalars}

    def plain_state(self: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert to the format of ``state_dict()``. A state in that format is returned as it is. A result of
        ``dist_checkpointing.load`` is replaced by the state that the last ``sharded_state_dict()`` returned and
        ``load`` filled. Raises UserError without an earlier ``sharded_state_dict()``."""
        if not all(name.startswith(_PREFIX) for name in state_dict):
            return state_dict
        lent = getattr(self, "_lent_state", None)
        if lent is None:
            raise UserError("optimizer state: call dist_checkpointing.load with this optimizer's sharded_state_dict()")
        return {**lent, **{name: state_dict[f"{_PREFIX}{name}"] for name in ("step", "grad_scaler")}}


_PREFIX = "optimizer."
