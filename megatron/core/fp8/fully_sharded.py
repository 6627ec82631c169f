"""All-gathers of weights in fp8 by ``fully_shard`` (--fp8-param-gather with --use-torch-fsdp2), through the extension
points of torch (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``): one byte per weight instead of two.

The weights that a rank stores become a :class:`ShardedWeight`. Once per step its rows are cast with the scale of the
full weight, for all gathers; afterwards the module has a :class:`GatheredWeight`, which has fp8 bytes and no values.
Results are bit-identical to gathers of bf16 weights, which would be cast with the same scale. Weights whose rows the
ranks do not divide are gathered in bf16: ``fully_shard`` moves padded shards to other memory at the first forward
pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from megatron.core.fp8.storage import Epoch, GatheredCopy, WeightCopy, exchange_scales, fp8_copy
from megatron.core.groups.process_groups import Group
from megatron.core.sharding.flat_pieces import flat_range

_aten = torch.ops.aten
_KEEPING = {
    _aten.detach.default, _aten.alias.default, _aten.split.Tensor, _aten.slice.Tensor, _aten.new_zeros.default,
    _aten.view.default,
}  # fmt: skip
"""Operations by which ``fully_shard`` makes the stored weights; results of others are plain tensors."""


class ShardedWeight(torch.Tensor):
    """Rows of a weight [o, i] in the dtype of its master, which are gathered in fp8. Wraps ``plain``, the tensor with
    the memory, which optimizer and checkpoints use (``flat_range``)."""

    plain: Tensor
    fp8_copy: GatheredCopy

    @staticmethod
    def __new__(cls, plain: Tensor, copy: GatheredCopy) -> ShardedWeight:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
        wrapper.plain, wrapper.fp8_copy = plain, copy
        return wrapper

    def __repr__(self, **unused: object) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.plain})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = function(*tree_map_only(cls, _plain, args), **tree_map_only(cls, _plain, kwargs or {}))
        if function is _aten.copy_.default:
            return args[0]
        if function not in _KEEPING:
            return result
        return tree_map_only(torch.Tensor, lambda plain: cls(plain, args[0].fp8_copy), result)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: object, outer_stride: object, module: nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], None]:  # fmt: skip
        """Return this rank's rows in fp8, uint8."""
        assert self.fp8_copy.rows is not None, "scales come before gathers"
        return (self.fp8_copy.rows.view(self.shape),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the weight that GEMMs read; with ``out`` it exists already and its bytes have changed."""
        copy = self.fp8_copy
        (copy.payload,) = outputs
        return None if out is not None else (GatheredWeight(copy, dtype, self.device), ())


class GatheredWeight(torch.Tensor):
    """Weight [o, i] of a gathered unit that has an fp8 copy and no values; only fp8 layers can read it."""

    fp8_copy: GatheredCopy

    @staticmethod
    def __new__(cls, copy: GatheredCopy, dtype: torch.dtype, device: torch.device) -> GatheredWeight:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, copy.shape, dtype=dtype, device=device)
        wrapper.fp8_copy = copy
        return wrapper

    def __repr__(self, **unused: object) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        weight = args[0]
        if function in (_aten.as_strided.default, _aten.detach.default, _aten.alias.default):
            return cls(weight.fp8_copy, weight.dtype, weight.device)
        raise RuntimeError(
            f"{function}: the weight is gathered in fp8, and only fp8 layers can read it; remove --fp8-param-gather"
        )


def _plain(weight: ShardedWeight) -> Tensor:
    return weight.plain


def shard_in_fp8(module: nn.Module, num_ranks: int) -> list[str]:
    """Let ``fully_shard`` over ``num_ranks`` ranks gather weights of ``module`` in fp8: those with an ``fp8_copy`` and
    equally many rows on all ranks. Call it before; returns their names."""
    names = []
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            copy = fp8_copy(parameter)
            if copy is not None and copy.shape[0] % num_ranks == 0:
                setattr(owner, name, nn.Parameter(ShardedWeight(parameter.detach(), copy), parameter.requires_grad))
                names.append(f"{path}.{name}" if path else name)
    return names


class ScalesOfShards:
    """Scales of the ``weights`` of one module that are gathered in fp8, DTensor parameters by their copies. ``dtype``:
    that of the computation. ``group``: ranks that hold the other rows."""

    def __init__(self, weights: Sequence[tuple[GatheredCopy, nn.Parameter]], dtype: torch.dtype, group: Group) -> None:
        self._weights, self._dtype, self._group = list(weights), dtype, group
        self.epoch, self._scaled = Epoch(), WeightCopy()
        """The epoch advances on all ranks, because the next :meth:`refresh` is collective then."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Exchange largest magnitudes, set the scales and cast this rank's rows, if weights may have changed."""
        if self._scaled.valid_for(self.epoch):
            return
        self._scaled.made_for(self.epoch)
        parts = []
        for copy, parameter in self._weights:
            local, start, _ = flat_range(parameter)
            parts.append(copy.amax(local.to(self._dtype).view(-1), start))
        exchange_scales([copy for copy, _ in self._weights], parts, self._group)
        for copy, parameter in self._weights:
            local, start, _ = flat_range(parameter)
            copy.rows = copy.cast(local.to(self._dtype).view(-1), start)
