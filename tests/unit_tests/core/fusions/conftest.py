"""Checks of launches in Triton's interpreter."""

import dataclasses
import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def launches_name_only_what_kernels_take():
    """Raise KeyError for other arguments. The interpreter ignores them, a GPU does not."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.runtime.interpreter import GridExecutor

    options = {field.name for field in dataclasses.fields(CUDAOptions)}
    launch = GridExecutor.__call__

    def checked(executor, *arguments, **keywords):
        unknown = set(keywords) - set(executor.arg_names) - options
        if unknown:
            raise KeyError(f"{executor.fn.__name__} does not take {sorted(unknown)}")
        return launch(executor, *arguments, **keywords)

    GridExecutor.__call__ = checked
    yield
    GridExecutor.__call__ = launch
