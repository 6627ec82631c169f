"""Lines of ``megatron`` and ``tools`` that each test executes: in its process, on the ranks of the pool that it sends
tasks to, and in the programs that it starts. A pytest plugin for ``tests/mutate.py``; without it, nothing here
runs."""

import atexit
import hashlib
import json
import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest

STARTER = """
import importlib.util, sys
if "multiprocessing" not in " ".join(sys.orig_argv):
    spec = importlib.util.spec_from_file_location("line_trace", {tracer!r})
    tracer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tracer)
    tracer.trace_program({root!r}, {folder!r})
"""
"""A ``sitecustomize`` module: Python runs it at the start of every program that a test starts."""


class LineTrace:
    """Notes lines of files below ``root``/megatron and /tools while the context lasts, in this thread and in those
    started in it."""

    def __init__(self, root):
        self.prefixes = tuple(os.path.join(root, name) + os.sep for name in ("megatron", "tools"))
        self.root = root
        self.restart()

    def restart(self):
        """Forget all lines, also for threads that are running: their trace function belongs to this object."""
        self.pending = {}  # code object -> its lines that did not run yet; None for foreign code

    def __enter__(self):
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        threading.settrace(None)

    def _lines(self, code):
        try:
            return self.pending[code]
        except KeyError:
            local = code.co_filename.startswith(self.prefixes)
            self.pending[code] = {line for *_, line in code.co_lines() if line} if local else None
            return self.pending[code]

    def _on_call(self, frame, event, arg):
        return self._on_line if self._lines(frame.f_code) else None  # a function whose every line ran costs nothing

    def _on_line(self, frame, event, arg):
        self._lines(frame.f_code).discard(frame.f_lineno)
        return self._on_line

    def masks(self):
        """Executed lines as ``{path: bits}``, line n as bit n of a hexadecimal number."""
        masks = {}
        for code, pending in list(self.pending.items()):
            if pending is not None:
                path = os.path.relpath(code.co_filename, self.root)
                for line in {line for *_, line in code.co_lines() if line} - pending:
                    masks[path] = masks.get(path, 0) | 1 << line
        return {path: f"{mask:x}" for path, mask in masks.items()}


def trace_program(root, folder):
    """Traces this program to its end and leaves the result in ``folder``."""
    trace = LineTrace(root).__enter__()
    atexit.register(lambda: Path(folder, f"{os.getpid()}.json").write_text(json.dumps(trace.masks())))


def traced_task(rank, world_size, root, function, *args):
    """A task of the pool: ``function``, and what it executed on this rank."""
    with LineTrace(root) as trace:
        value = function(rank, world_size, *args)
    return value, trace.masks()


def add_masks(total, more):
    for path, mask in more.items():
        total[path] = f"{int(total.get(path, '0'), 16) | int(mask, 16):x}"


class Collector:
    """A pytest plugin that writes one line of JSON per test: whether it passed, seconds, ranks, and lines per file."""

    def __init__(self, root, output, registered, share, num_shares):
        """Every ``num_shares``-th test that is not ``known``."""
        self.root, self.output = str(root), output
        self.known, self.share, self.num_shares = registered, share, num_shares
        self.folder = tempfile.TemporaryDirectory(prefix="lines")
        starter = STARTER.format(root=self.root, folder=self.folder.name, tracer=__file__)
        Path(self.folder.name, "sitecustomize.py").write_text(starter)
        os.environ["PYTHONPATH"] = os.pathsep.join([self.folder.name, self.root])
        self.current = None
        self.trace = LineTrace(self.root)  # one for all tests: threads of a server live longer than a test
        self._trace_tasks_of_the_pool()

    def _trace_tasks_of_the_pool(self):
        from tests.test_utils.gloo_pool import RankPool

        plain_run = RankPool.run

        def run(pool, function, world_size, *args):
            sys.settrace(None)  # else workers forked by this process would trace themselves, too
            self.current["ranks"] = max(self.current["ranks"], world_size)
            try:
                replies = plain_run(pool, traced_task, world_size, self.root, function, *args)
            finally:
                sys.settrace(self.trace._on_call)
            for _, masks in replies:
                add_masks(self.current["lines"], masks)
            return [value for value, _ in replies]

        RankPool.run = run

    def pytest_collection_modifyitems(self, items):
        present, files = {item.nodeid for item in items}, {item.nodeid.split("::")[0] for item in items}
        self._write({"gone": [name for name in self.known - present if name.split("::")[0] in files]})
        items[:] = [item for item in items if item.nodeid not in self.known][self.share :: self.num_shares]

    @pytest.hookimpl(wrapper=True)  # before the hook of conftest.py, which runs the test
    def pytest_runtest_protocol(self, item):
        text = item.path.read_bytes()
        self.current = {
            "test": item.nodeid, "passed": False, "seconds": 0.0, "ranks": 0, "lines": {},
            "file": hashlib.sha256(text).hexdigest()[:16],
        }  # fmt: skip
        self.trace.restart()
        self.trace.__enter__()
        return (yield)

    def pytest_runtest_logreport(self, report):
        if report.when != "teardown":
            self.current["seconds"] += report.duration
        if report.when == "call":
            self.current["passed"] = report.passed

    def pytest_runtest_logfinish(self):
        self.trace.__exit__()
        add_masks(self.current["lines"], self.trace.masks())
        for path in Path(self.folder.name).glob("*.json"):
            add_masks(self.current["lines"], json.loads(path.read_text()))
            path.unlink()
        self._write(self.current)

    def pytest_sessionfinish(self):
        """Record the modules of other packages that the tests imported, so that a campaign can import them once."""
        modules = [name for name, module in list(sys.modules.items())
                   if "-packages" + os.sep in str(getattr(module, "__file__", None) or "")]  # fmt: skip
        self._write({"modules": modules})

    def _write(self, record):
        with open(self.output, "a") as stream:
            stream.write(json.dumps(record) + "\n")
