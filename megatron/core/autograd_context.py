"""Type of the first argument of autograd functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.function import FunctionCtx


class AutogradContext(FunctionCtx):
    """Context of an autograd function, for annotations: torch makes the objects. ``backward`` reads the tensors and the
    attributes that ``forward`` stored; attributes have any name and type."""

    if TYPE_CHECKING:
        saved_tensors: tuple[Any, ...]
        needs_input_grad: tuple[bool, ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...
