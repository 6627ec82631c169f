"""Names that existing entry scripts import from ``megatron.core.utils``. Nothing in the suite itself needs them."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import nn

from megatron.core.config.model_parallel_config import ModelParallelConfig

__all__ = ["StragglerDetector", "divide", "get_attr_wrapped_model", "get_model_config"]


class StragglerDetector:
    """No-op: ``--timing-log-level`` shows slow ranks."""

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """``bdata`` marks the loading of a batch."""
        return self

    def __enter__(self) -> StragglerDetector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def get_attr_wrapped_model(model: nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """Return attribute ``attr`` of ``model``, else of the first ``.module`` below it that has it (with
    ``return_model_obj`` the module that has it). Raises AttributeError if no module has it.

    Args:
        allow_none: an attribute that is None counts as found; else the search continues below."""
    module: object = model
    while module is not None:
        if hasattr(module, attr) and (allow_none or getattr(module, attr) is not None):
            return module if return_model_obj else getattr(module, attr)
        module = getattr(module, "module", None)
    raise AttributeError(f"neither {type(model).__name__} nor what it wraps has an attribute {attr!r}")


def get_model_config(model: nn.Module) -> ModelParallelConfig:
    """The configuration of a model, wrapped or not."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def divide(numerator: int, denominator: int) -> int:
    """The quotient of a division that must have no remainder."""
    quotient, remainder = divmod(numerator, denominator)
    if remainder:
        raise ValueError(f"{numerator} is not a multiple of {denominator}")
    return quotient
