"""Slices of a parameter under separate names: programs address ``weight0``, ``weight1``, … of a layer's experts, which
this library stores in one parameter.

Modules that inherit from :class:`NamesSlices` name them: ``named_parameters()`` yields slices that share the memory of
the parameter, ``parameters()`` the parameter. The library itself reads :func:`stored_parameters`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class ParameterSlice(Tensor):
    """Slice of a parameter, in its memory. ``grad`` and ``main_grad`` are slices of the parameter's; ``requires_grad``
    and all other attributes are the parameter's. Results of operations are ordinary tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # an instance of it, as Parameter has
    parameter: nn.Parameter
    _select: Any

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        gradient = self.parameter.grad
        return None if gradient is None else self._select(gradient)

    @property
    def main_grad(self) -> Tensor:
        return self._select(self.parameter.main_grad)  # type: ignore[attr-defined]

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.parameter.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> ParameterSlice:
        """Set ``requires_grad`` of the full parameter."""
        self.parameter.requires_grad_(requires_grad)
        return self

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that tensors do not have on the parameter."""
        if name in ("parameter", "_select"):
            raise AttributeError(name)
        return getattr(self.parameter, name)


def name_slices(parameter: nn.Parameter, count: int) -> None:
    """Give each of ``count`` equal ranges of rows of ``parameter`` a name: the parameter's and its number."""
    parameter.num_slices = count  # type: ignore[attr-defined]


def named_slices(name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """Yield the slices of ``parameter`` by name, biases as vectors; without slices, the parameter."""
    count = getattr(parameter, "num_slices", 0)
    if not count:
        yield name, parameter
    for index in range(count):

        def select(tensor: Tensor, index: int = index) -> Tensor:
            rows = tensor.detach().view(count, -1, *tensor.shape[1:])[index]
            return rows.flatten() if name.endswith("bias") else rows

        part = select(parameter).as_subclass(ParameterSlice)  # type: ignore[arg-type]  # typed for Tensor's own methods
        part.parameter, part._select = parameter, select
        yield f"{name}{index}", part


def stored_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return ``module.named_parameters()`` without slices."""
    return nn.Module.named_parameters(module)


class NamesSlices(nn.Module):
    """Base of models and their wrappers: ``named_parameters`` names slices, ``parameters`` yields parameters."""

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and parameters, or slices of parameters where :func:`name_slices` named them."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield from named_slices(name, parameter)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield every parameter, without slices."""
        for _, parameter in nn.Module.named_parameters(self, recurse=recurse):
            yield parameter


class SlicedState(nn.Module):
    """Base of layers whose state dicts name slices, unless ``keep_vars`` asks for the parameters."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        for name, parameter in self._parameters.items():
            if hasattr(parameter, "num_slices"):
                del destination[prefix + name]
                named = named_slices(prefix + name, parameter)  # type: ignore[arg-type]
                destination.update({key: part.as_subclass(Tensor) for key, part in named})  # type: ignore[arg-type]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, parameter in self._parameters.items():
            keys = [f"{prefix}{name}{index}" for index in range(getattr(parameter, "num_slices", 0))]
            if parameter is not None and keys and all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.cat([state_dict.pop(key) for key in keys]).view_as(parameter)
        super()._load_from_state_dict(state_dict, prefix, *args)
