"""Linear layers in fp8: X, W and dY are cast once per use, and their three products run on fp8 tensor cores.

    Y = X W^T        reads X and W
    dX = dY W        reads dY and the transposed copy of W
    dW = dY^T X      reads the transposed copies of dY and X, and adds to the fp32 gradient

Forward saves only the transposed copy of X (one byte per element). Weights are cast once per step, from the values
after the last update. X and W are cast to e4m3, dY to e4m3 or e5m2."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron.core.fp8.gather import begin_gather
from megatron.core.fp8.products import add_product, multiply, transposed
from megatron.core.fp8.scales import ScaleHistory, current_amax
from megatron.core.fp8.storage import Epoch, WeightCopy, fp8_copy
from megatron.core.fusions.fp8_cast import (
    E4M3,
    LARGEST,
    CastTarget,
    Copies,
    Quantized,
    carried,
    carry,
    cast_in_blocks,
    cast_tensor,
)
from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather
from megatron.core.tensor_parallel.gemms import Gemms, Operand, Operands
from megatron.core.tensor_parallel.layers import ColumnParallelLinear


class Fp8Gemms(Gemms):
    """GEMMs of one layer in fp8; subclasses define the casts. Copies of ``weights`` are made together.
    ``gradient_format``: dtype of dY. ``accumulate``: as of :class:`Gemms`, for weight gradients in higher precision;
    ``weight_gradients``: whether dW is computed in fp8."""

    reads_weight = False
    fast_output = True
    """Whether sums of Y may stay in the tensor cores' registers (14 bits)."""

    def __init__(
        self, weights: Sequence[Tensor], epoch: Epoch, gradient_format: torch.dtype,
        accumulate: Callable[[Tensor, Tensor, Tensor], None], *, weight_gradients: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(accumulate)
        self.weights, self.epoch, self.gradient_format = weights, epoch, gradient_format
        self.dtype = weights[0].dtype
        """Dtype of Y, dX and, without ``main_grad``, dW."""
        self.weight_gradients = weight_gradients
        self.keeps_weights = True
        """Whether copies of weights live until the next step; False if the weights themselves do not (FSDP)."""
        self.keeps_transposed = True
        """Whether the kept copies of weights include transposed ones; else each use makes one and discards it."""
        self._copies: dict[int, Copies] = {}
        self._copied = WeightCopy()

    # ---- casts

    def cast_input(self, x: Tensor, *, columns: bool, observes: bool) -> Copies:
        """Return the copies of X [t, i]; ``columns``: also the transposed one. ``observes``: record its magnitude."""
        raise NotImplementedError

    def cast_gradient(self, grad: Tensor, *, rows: bool, columns: bool) -> Copies:
        """Return the wanted copies of dY [t, o]."""
        raise NotImplementedError

    def cast_weights(self, weights: Sequence[Tensor], *, rows: bool, columns: bool) -> list[Copies]:
        """Return the copies of all weights [o, i] of the layer."""
        raise NotImplementedError

    def matrices(self) -> list[Tensor]:
        """Return the matrices [o, i] of the layer."""
        return [weight.detach() for weight in self.weights]

    def weight_copies(self, weight: Tensor, *, columns: bool) -> Quantized:
        """Return the copy of ``weight``, or with ``columns`` its transposed copy."""
        if not self.keeps_weights and (gathered := fp8_copy(weight)) is not None:
            rows = _present(gathered.quantized)
            return transposed(rows) if columns else rows
        if not self.keeps_weights:
            (copies,) = self.cast_weights([weight], rows=not columns, columns=columns)
            return _present(copies.columns if columns else copies.rows)
        if not self._copied.valid_for(self.epoch, self.weights) or weight.data_ptr() not in self._copies:
            matrices = self.matrices()
            columns_too = self.keeps_transposed
            copies_of_weights = self._gathered_copies() or self.cast_weights(matrices, rows=True, columns=columns_too)
            self._copies = {matrix.data_ptr(): copies for matrix, copies in zip(matrices, copies_of_weights)}
            self._copied.made_for(self.epoch, self.weights)
        copies = self._copies[weight.data_ptr()]
        if columns and copies.columns is None:
            return transposed(_present(copies.rows))
        return _present(copies.columns if columns else copies.rows)

    def _gathered_copies(self) -> list[Copies] | None:
        """Return gathered copies (``storage.py``) with the transposed ones to keep; None without gathered copies."""
        gathered = [None if (copy := fp8_copy(weight)) is None else copy.quantized for weight in self.weights]
        rows = [copy_of_rows for copy_of_rows in gathered if copy_of_rows is not None]
        return (
            [Copies(copy_of_rows, transposed(copy_of_rows) if self.keeps_transposed else None) for copy_of_rows in rows]
            if len(rows) == len(gathered)
            else None
        )

    # ---- operands

    def pack_input(self, x: Tensor, *, for_backward: bool) -> Operands:
        columns = for_backward and self.weight_gradients
        copies = carried(x) or self.cast_input(x, columns=columns, observes=for_backward)
        rows = _present(copies.rows)
        if columns and copies.columns is None:
            copies = copies._replace(columns=transposed(_flat(rows)))
        first = rows._replace(data=rows.data.view(x.shape))
        second: Operand = first if copies.columns is None else copies.columns
        return Operands(first, second if self.weight_gradients or not for_backward else x)

    def pack_gradient(self, grad: Tensor, *, for_input: bool, for_weight: bool) -> Operands:
        columns = for_weight and self.weight_gradients
        if not (for_input or columns):
            return Operands(grad, grad)
        copies = carried(grad) or self.cast_gradient(grad, rows=for_input, columns=columns)
        if columns and copies.columns is None:
            copies = copies._replace(columns=transposed(_flat(_present(copies.rows))))
        first: Operand = grad
        if for_input and copies.rows is not None:
            first = copies.rows._replace(data=copies.rows.data.view(grad.shape))
        return Operands(first, grad if copies.columns is None else copies.columns)

    def begin_gather(self, x: Operand, group: Group, *, second: bool) -> AsyncHandle:
        if isinstance(x, Tensor):
            return begin_all_gather(x, group)
        return begin_gather(x, group, transposed=second)

    # ---- products

    def output(self, x: Operand, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Quantized) and out is None, "the output layer is not in fp8"
        copy = self.weight_copies(weight, columns=False)
        product = multiply(_flat(x), copy, self.dtype, fast=self.fast_output, bias=bias)
        return product.view(*x.data.shape[:-1], -1)

    def input_gradient(self, grad: Operand, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        assert isinstance(grad, Quantized) and out is None, "the output layer is not in fp8"
        product = multiply(_flat(grad), self.weight_copies(weight, columns=True), self.dtype, fast=False)
        return product.view(*grad.data.shape[:-1], -1)

    def weight_gradient(self, grad: Operand, x: Operand) -> Tensor:
        if isinstance(x, Tensor) or isinstance(grad, Tensor):
            return super().weight_gradient(grad, x)
        return multiply(grad, x, self.dtype, fast=False)

    def add_weight_gradient(self, total: Tensor, grad: Operand, x: Operand) -> None:
        if isinstance(x, Tensor) or isinstance(grad, Tensor):
            super().add_weight_gradient(total, grad, x)
        else:
            add_product(total, grad, x)


def _present(x: Quantized | None) -> Quantized:
    assert x is not None, "a copy that was asked for"
    return x


def _flat(x: Quantized) -> Quantized:
    return x._replace(data=x.data.view(-1, x.data.shape[-1]))


class PerTensorGemms(Fp8Gemms):
    """One scale per matrix, over the ranks of ``groups`` (tensor- and context-parallel) or ``weight_groups``
    (tensor-parallel), which hold its parts. ``history``: delayed scales of the layer ``name``; None: each matrix is
    scaled by its values."""

    def __init__(
        self, *arguments: object, groups: Sequence[Group], weight_groups: Sequence[Group],
        history: ScaleHistory | None = None, name: str = "", **options: object,
    ) -> None:  # fmt: skip
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.groups, self.weight_groups, self.history = groups, weight_groups, history
        if history is not None:
            self._input = history.add(f"{name}.input", LARGEST[E4M3])
            self._gradient = history.add(f"{name}.gradient", LARGEST[self.gradient_format])

    def cast_input(self, x: Tensor, *, columns: bool, observes: bool) -> Copies:
        row = None if self.history is None else self._input
        return self._cast(x, row, E4M3, rows=True, columns=columns, observes=observes)

    def cast_gradient(self, grad: Tensor, *, rows: bool, columns: bool) -> Copies:
        row = None if self.history is None else self._gradient
        return self._cast(grad, row, self.gradient_format, rows=rows, columns=columns, observes=True)

    def _target(self, row: int, dtype: torch.dtype, device: torch.device) -> CastTarget | None:
        history = self.history
        if history is None or not self.weight_gradients:  # weight gradients in higher precision read the values
            return None
        scale = history.scale(row, device)
        return None if scale is None else CastTarget(dtype, scale, history.noted(row, device))

    def input_target(self, device: torch.device) -> CastTarget | None:
        """Return the cast of X for its producer; None unless the scale is known before."""
        return None if self.history is None else self._target(self._input, E4M3, device)

    def gradient_target(self, device: torch.device) -> CastTarget | None:
        """Return the cast of dY for its producer; None unless the scale is known before."""
        return None if self.history is None else self._target(self._gradient, self.gradient_format, device)

    def gather_gradient(self, grad: Tensor, group: Group) -> Tensor:
        if not self.weight_gradients:  # these read the values
            return super().gather_gradient(grad, group)
        rows = _present(self.cast_gradient(grad, rows=True, columns=False).rows)
        shard = rows._replace(data=rows.data.view(grad.shape))
        gathered = begin_gather(shard, group, transposed=False).wait()
        return carry(Copies(gathered, None), gathered.data.shape, grad.dtype)

    def _cast(
        self, x: Tensor, row: int | None, dtype: torch.dtype, *, rows: bool, columns: bool, observes: bool
    ) -> Copies:
        """Cast and, if ``observes``, record the magnitude in the same pass. Collective until ``row`` has a scale."""
        history = self.history
        if history is not None and row is not None and (scale := history.scale(row, x.device)) is not None:
            noted = history.noted(row, x.device) if observes else None
            return cast_tensor(x, dtype, scale, rows=rows, columns=columns, noted=noted)
        amax = current_amax(x, self.groups)
        if history is not None and row is not None and observes:
            history.observe(row, amax)
        return cast_tensor(x, dtype, amax, rows=rows, columns=columns)

    def cast_weights(self, weights: Sequence[Tensor], *, rows: bool, columns: bool) -> list[Copies]:
        amaxes = [current_amax(weight, ()) for weight in weights]
        amax = amaxes[0]
        if len(amaxes) > 1 or any(group.size > 1 for group in self.weight_groups):
            amax = current_amax(torch.cat(amaxes), self.weight_groups)
        return [cast_tensor(weight, E4M3, amax, rows=rows, columns=columns) for weight in weights]


def targets_between(first: nn.Module, second: nn.Module, device: torch.device) -> tuple[CastTarget, CastTarget] | None:
    """Return two casts for the operation between two layers: the input of ``second``, and the output gradient of
    ``first``. None unless both layers are in fp8 with scales that are known before."""
    one, other = (getattr(getattr(layer, "traits", None), "gemms", None) for layer in (first, second))
    if not (isinstance(one, PerTensorGemms) and isinstance(other, PerTensorGemms)):
        return None
    gradient, output = one.gradient_target(device), other.input_target(device)
    return None if output is None or gradient is None else (output, gradient)


def target_of_reader(layer: nn.Module, device: torch.device) -> CastTarget | None:
    """Return the cast of the input of ``layer`` for its producer, if ``layer`` is its only reader. None unless it is a
    column-parallel layer with one weight, in fp8 with a scale that is known before: then it only casts its input."""
    if not isinstance(layer, ColumnParallelLinear) or layer.shared_weight is not None:
        return None
    gemms = layer.traits.gemms
    target = gemms.input_target(device) if isinstance(gemms, PerTensorGemms) else None
    if target is None or (torch.is_grad_enabled() and layer.weight.requires_grad):
        return target
    return target._replace(noted=None)  # as a cast by the layer, which records magnitudes for a backward pass only


class BlockwiseGemms(Fp8Gemms):
    """A scale per 1 x 128 block of X and dY and per 128 x 128 block of W, powers of two (DeepSeek-AI 2024)."""

    fast_output = False

    def cast_input(self, x: Tensor, *, columns: bool, observes: bool) -> Copies:
        return cast_in_blocks(x, E4M3, columns=columns)

    def cast_gradient(self, grad: Tensor, *, rows: bool, columns: bool) -> Copies:
        return cast_in_blocks(grad, self.gradient_format, rows=rows, columns=columns)

    def cast_weights(self, weights: Sequence[Tensor], *, rows: bool, columns: bool) -> list[Copies]:
        return [cast_in_blocks(weight, E4M3, rows=rows, columns=columns, square=True) for weight in weights]
