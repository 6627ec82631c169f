"""Fixtures shared by the whole suite."""

import gc
import logging
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not os.path.exists("/dev/nvidiactl"):  # without a GPU, Triton kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
else:  # before the first GEMM, so that tests may enable deterministic algorithms
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
from _pytest.runner import runtestprotocol

import tests.test_utils.interpreter  # noqa: F401
from tests.test_utils.gloo_pool import RankPool
from tests.test_utils.warm_python import WarmPython

GLOO_START = "connectFullMesh failed"
"""Text of gloo when ranks cannot connect at the start of a group, which happens on a loaded machine now and then."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Run a test once more if gloo's start failed, in this process or in a program of the test."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed and GLOO_START in str(report.longrepr) for report in reports):
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="session")
def gloo_pool():
    """The warm pool of gloo ranks; ``gloo_pool.run(function, world_size, *args)``."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def nccl_pool():
    """A pool of ranks over NCCL, rank r on GPU r."""
    pool = RankPool("nccl")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory):
    """The path of a ``python`` whose programs start with torch and the suite loaded."""
    warm = WarmPython(tmp_path_factory.mktemp("warm"))
    yield warm.python
    warm.close()


@pytest.fixture(scope="session")
def python_without_torch(tmp_path_factory):
    """The path of a ``python`` whose programs start with the flags, their checks and the console loaded."""
    modules = "multiprocessing.process megatron.console megatron.training.arguments megatron.training.report.dry_run"
    warm = WarmPython(tmp_path_factory.mktemp("warm"), modules=modules.split())
    yield warm.python
    warm.close()


@pytest.fixture(autouse=True)
def used_gpu_memory(request):
    """Free memory is as other work leaves it, here all bits set (NaN, -1): who reads before writing does not find
    zeros."""
    if "gpu" in request.keywords:
        import torch

        pieces = [512] * 2000 + [1 << 16] * 200 + [4 << 20] * 32 + [1 << 26] * 2
        retained = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in pieces]
        del retained
        yield
        torch.cuda.empty_cache()  # other processes test on the same GPU
    else:
        yield


@pytest.fixture(autouse=True)
def process_groups_are_discarded():
    """A test that does not discard its process groups fails, because the next test cannot initialize others. A world of
    one that a library call started ends here: a process with torch.distributed counts as launched."""
    yield
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        return
    discarded = not state.model_parallel_is_initialized()
    state.destroy_model_parallel()
    if state.dist.is_initialized():
        state.dist.destroy_process_group()
    if not discarded:
        pytest.fail("the test did not discard its process groups; call destroy_model_parallel()")


@pytest.fixture(autouse=True)
def loggers_are_restored():
    """Programs set level and handlers of the library's logger for the process."""
    library = logging.getLogger("megatron")
    level, propagate, handlers = library.level, library.propagate, list(library.handlers)
    yield
    library.setLevel(level)
    library.propagate, library.handlers = propagate, handlers


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without garbage collections (4 of 10 CPU seconds), and exclude from later ones what was imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Skip tests marked ``gpu`` where there is no CUDA device, and ``gpus(n)`` where there are fewer than n."""
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    present = torch.cuda.device_count()
    for item in items:
        required = [1] * ("gpu" in item.keywords) + [mark.args[0] for mark in item.iter_markers("gpus")]
        if present < max(required, default=0):
            item.add_marker(pytest.mark.skip(reason=f"needs {max(required)} CUDA GPUs, there are {present}"))
