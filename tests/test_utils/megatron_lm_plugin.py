"""Pytest plugin of ``tests/megatron_lm_unit_tests.py``: runs tests written for GPUs on one CPU process, replaces names
that do not exist here, and writes {test: [outcome, message]} to the file ``$RESULTS``.

CUDA devices become the CPU, NCCL becomes gloo. A name of ``megatron`` that a test file imports and that is missing
becomes a class that raises :class:`MissingName` when it is called; its attributes are such classes too.
"""

import builtins
import json
import os
import signal
import types

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

SECONDS = 30
CHECKOUT = os.environ["TESTS"]
RESULTS = {}


class OnCpu(TorchFunctionMode):
    """Operations with CUDA devices run on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "cpu" if isinstance(kwargs["device"], int) else to_cpu(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(map(to_cpu, args))
        return func(*args, **kwargs)


def to_cpu(value):
    is_cuda = isinstance(value, str | torch.device) and torch.device(value).type == "cuda" if value != "meta" else False
    return torch.device("cpu") if is_cuda else value


class MissingName(Exception):
    """A test called a name that does not exist here."""


class Missing(type):
    """Class of missing names."""

    def __call__(cls, *_, **__):
        raise MissingName(cls.__qualname__)

    def __iter__(cls):
        raise MissingName(cls.__qualname__)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{cls.__qualname__}.{name}")


def missing(path):
    return Missing(path.rpartition(".")[2], (), {"__qualname__": path})


def import_with_missing_names(name, globals=None, locals=None, fromlist=(), level=0):
    """``__import__``; files of the checkout get missing names instead of errors."""
    importer = (globals or {}).get("__file__") or ""
    if level or not fromlist or not name.startswith("megatron") or not importer.startswith(CHECKOUT):
        return real_import(name, globals, locals, fromlist, level)
    try:
        module = real_import(name, globals, locals, fromlist, level)
    except ImportError:
        module = None
    absent = [entry for entry in fromlist if entry != "*" and not hasattr(module, entry)]
    if module is not None and not absent:
        return module
    substitute = types.ModuleType(name)
    for entry in fromlist:
        setattr(substitute, entry, missing(f"{name}.{entry}") if entry in absent else getattr(module, entry, None))
    return substitute


def failure_message(report):
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr or "")[-400:]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    def stop(*_):
        raise TimeoutError(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_runtest_logreport(report):
    entry = RESULTS.setdefault(report.nodeid, ["passed", ""])
    if report.outcome != "passed" and entry[0] == "passed":
        RESULTS[report.nodeid] = [report.outcome, failure_message(report)]


def pytest_collectreport(report):
    if report.outcome != "passed" and report.nodeid.endswith(".py"):
        RESULTS[report.nodeid] = [report.outcome, failure_message(report)]


def pytest_sessionfinish():
    with open(os.environ["RESULTS"], "w", encoding="utf-8") as file:
        json.dump(RESULTS, file)


real_import, real_init = builtins.__import__, dist.init_process_group
builtins.__import__ = import_with_missing_names
dist.init_process_group = lambda backend=None, *args, **kwargs: real_init("gloo", *args, **kwargs)
torch.nn.Module.cuda = lambda self, *_, **__: self
torch.cuda.device_count, torch.cuda.current_device = (lambda: 1), (lambda: torch.device("cpu"))
for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
    setattr(torch.cuda, name, lambda *_, **__: None)  # one function each: torch's compiler lists them
torch.cuda.memory.empty_cache = lambda: None
mode = OnCpu()
mode.__enter__()
