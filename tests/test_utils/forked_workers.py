"""Plugin of pytest: runs files of tests in processes that are forked after the collection.

    python -m pytest -p tests.test_utils.forked_workers --workers 4

pytest-xdist collects in each of its workers, which takes 20 CPU seconds, and sends each result through text. Here the
collection and its imports happen once. A worker takes the next file when it reaches the last test of its current one.
"""

import multiprocessing as mp
import os
import traceback
from multiprocessing.connection import wait

import pytest
from _pytest.runner import CallInfo

LONG = ("test_cuda_graphs.py", "test_engine.py", "test_killed_rank.py", "test_real_text.py", "test_cluster.py")
"""Files of unit tests that take minutes. They start first: workers then end at about the same time."""


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0, help="Processes that run files of tests.")


class Sender:
    """Plugin of a worker: sends what its tests report."""

    def __init__(self, session, connection):
        self.session, self.connection = session, connection

    def pytest_runtest_logstart(self, nodeid, location):
        self.connection.send(("start", (nodeid, location)))

    def pytest_runtest_logreport(self, report):
        config = self.session.config
        self.connection.send(("report", config.hook.pytest_report_to_serializable(config=config, report=report)))

    def pytest_runtest_logfinish(self, nodeid, location):
        self.connection.send(("finish", (nodeid, location)))

    def next_file(self):
        self.connection.send(("next", None))
        return self.connection.recv()


def work(session, files, connection):
    """Run files until there is none left; never return."""
    manager, item = session.config.pluginmanager, None
    try:
        capture = manager.getplugin("capturemanager")
        capture.stop_global_capturing()  # forked processes would share its files
        capture.start_global_capturing()
        manager.unregister(name="terminalreporter")
        sender = Sender(session, connection)
        manager.register(sender)
        while (number := sender.next_file()) is not None:
            for following in files[number]:
                if item is not None:
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                item = following
        if item is not None:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        connection.send(("end", None))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    os._exit(0)


def start_worker(session, files):
    """Return the parent's end of the pipe of a new worker, and its process."""
    local, other = mp.Pipe()
    process = os.fork()
    if process == 0:
        local.close()
        work(session, files, other)
    other.close()
    return local, process


def died(item):
    """The report of a test whose process died."""

    def fail():
        pytest.fail("the process of the test died", pytrace=False)

    return pytest.TestReport.from_item_and_call(item, CallInfo.from_call(fail, "call"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    config, hook = session.config, session.config.hook
    if not config.option.workers or config.option.collectonly or session.testsfailed:
        return None  # the loop of pytest
    config._tmp_path_factory.getbasetemp()  # one folder for all
    by_file = {}
    for item in session.items:
        by_file.setdefault(item.path, []).append(item)
    files = [by_file[path] for path in sorted(by_file, key=lambda path: path.name not in LONG)]
    items = {item.nodeid: item for item in session.items}
    numbers = iter(range(len(files)))
    workers = dict(start_worker(session, files) for _ in range(config.option.workers))
    running, num_finished = {}, 0  # worker -> its test
    while workers:
        for worker in wait(list(workers)):
            try:
                kind, value = worker.recv()
            except EOFError:
                kind, value = "died", running.get(worker)
            if kind == "next":
                worker.send(next(numbers, None))
            elif kind == "start":
                running[worker] = value[0]
                hook.pytest_runtest_logstart(nodeid=value[0], location=value[1])
            elif kind == "report":
                report = hook.pytest_report_from_serializable(config=config, data=value)
                hook.pytest_runtest_logreport(report=report)
            elif kind == "finish":
                num_finished += 1
                hook.pytest_runtest_logfinish(nodeid=value[0], location=value[1])
            elif kind == "died" and value is not None:
                hook.pytest_runtest_logreport(report=died(items[value]))
            elif kind == "error":
                raise RuntimeError(f"a worker failed:\n{value}")
            if kind in ("end", "died"):
                os.waitpid(workers.pop(worker), 0)
    if num_finished < len(session.items):
        raise session.Failed(f"{len(session.items) - num_finished} tests did not run")
    return True
