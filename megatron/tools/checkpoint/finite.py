"""Search for NaN and infinite values in the tensors of a conversion, as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from megatron.core.config.errors import counted, listed
from megatron.core.sharding.lazy_tensor import LazyTensor


class FiniteCheck:
    """Numbers of NaN and infinite values by tensor. :meth:`watch` counts them in what a saver reads,
    :meth:`read_others` in tensors that it did not read, because an earlier attempt had written them."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[int, int]] = {}
        """Name -> first row of a read -> number of values."""

    def watch(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Return ``tensors`` with reads that also count."""
        return {name: self._watched(name, tensor) for name, tensor in tensors.items()}

    def _watched(self, name: str, tensor: LazyTensor) -> LazyTensor:
        def count(values: Tensor, start: int) -> Tensor:
            wrong = int((~values.float().isfinite()).sum()) if values.is_floating_point() else 0
            self.counts.setdefault(name, {})[start] = wrong
            return values

        return replace(
            tensor,
            read=lambda: count(tensor.read(), 0),
            read_rows=lambda start, stop: count(tensor.rows(start, stop), start),
        )

    def read_others(self, tensors: Mapping[str, LazyTensor]) -> None:
        """Read and count the ``tensors`` that were not read yet."""
        for name, tensor in self.watch(tensors).items():
            if name not in self.counts:
                tensor.read()

    def problem(self) -> str:
        """Return the number of values and tensors that are not finite, with names; empty if all are finite."""
        totals = {name: sum(rows.values()) for name, rows in self.counts.items()}
        wrong = {name: total for name, total in sorted(totals.items()) if total}
        if not wrong:
            return ""
        names = listed([f"{name} ({total:,})" for name, total in wrong.items()])
        values = counted(sum(wrong.values()), "NaN or infinite value")
        return f"{values} in {counted(len(wrong), 'tensor')}: {names}"
