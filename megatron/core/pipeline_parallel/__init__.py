"""Pipeline parallelism: stage layout, schedules, p2p and runtime. Layout and schedules are torch-free."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]


def __getattr__(name: str) -> object:
    if name != "get_forward_backward_func":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    return get_forward_backward_func
