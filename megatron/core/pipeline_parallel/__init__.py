"""Schedules of forward and backward passes. The schedules themselves import without torch; what runs them does not."""

from typing import Any

__all__ = ["get_forward_backward_func"]


def __getattr__(name: str) -> Any:
    if name != "get_forward_backward_func":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    return get_forward_backward_func
