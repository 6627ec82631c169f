"""A rank that raises, dies, hangs, is stopped or never arrives ends the run: soon, with its name and reason first.

All runs of this file are started together at its first test, and mostly wait. docs/guides/failures.md is the table of
what is seen here.
"""

import functools
import multiprocessing as mp
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.test_utils import failures
from tests.test_utils.failures import Fault
from tests.test_utils.gloo_pool import PRELOADED
from tests.test_utils.gpt_runs import losses

PROMISE = 60.0
"""Seconds until every process has exited, also on a busy machine; the watchdog's limit is 10 here."""
AT_ONCE = 7
LONGEST = ("is killed in the second save", "stands still", "hangs", "never", "holds", "loses", "leaves")

OTHER_SAYS = {
    # what the first line of the surviving rank says
    Fault("raises", 1, "torchrun"): "rank 1 failed first: iteration 2, waiting for data: ZeroDivisionError: a bug",
    Fault("raises", 0, "ranks"): "rank 0 failed first: iteration 2, waiting for data: ZeroDivisionError: a bug",
    Fault("is killed", 0, "torchrun"): "rank 0 failed first: its process",
    Fault("is killed", 0, "ranks"): "rank 0 failed first: its process",
    Fault("leaves", 1, "torchrun"): "rank 1 failed first: its process",
    Fault("segfaults", 1, "ranks"): "rank 1 failed first: its process",
    Fault("hangs in data loading", 1, "ranks"): "rank 1 failed first: iteration 2, waiting for data: no progress for",
    Fault("hangs in a collective", 1, "torchrun"): "rank 1 failed first: iteration 2, waiting for data: no progress",
    Fault("hangs in evaluation", 1, "ranks"): "rank 1 failed first: iteration 4, waiting for evaluation data: no progr",
    Fault("hangs in a save", 1, "ranks", collective_minutes=0.25): "rank 1 failed first: iteration 5, saving a checkp",
    Fault("hangs before the first iteration", 1, "ranks", collective_minutes=0.15): "rank 1 failed first: before the f",
    Fault("holds the interpreter", 1, "ranks"): "is stopped, locked or out of reach: no sign of life for",
    Fault("is stopped", 1, "ranks"): "is stopped, locked or out of reach: no sign of life for",
}
MENDED_BY_THE_USER = {
    Fault("finds bad data", 1, "torchrun"): "error on rank 1: --data-path x: document 7 is damaged; make it again",
    Fault("runs out of memory", 1, "torchrun"): "error on rank 1: out of memory for 2.00 GiB in iteration 2\n",
    Fault("runs out of memory in evaluation", 1, "ranks"): "error on rank 1: out of memory for 2.00 GiB in",
    Fault("computes NaN", 1, "ranks"): "error on rank 1: rank 1, iteration 2 (samples from 8 on): lm loss is nan",
    Fault("hangs in a background save", 1, "ranks", collective_minutes=0.25): (
        "error on rank 1: the background save of iteration 5: no progress for"
    ),
}
TWO_BATCHES = "--micro-batch-size 4"
"""An iteration of one rank: the third batch, which goes wrong, is then of the second iteration here too."""
ALONE = {
    Fault("hangs in data loading", 0, "alone", ranks=(0,), layout=TWO_BATCHES): (
        "rank 0 failed first: iteration 2, waiting for data: no progress for", " in hang\n"),
    Fault("segfaults", 0, "alone", ranks=(0,), layout=TWO_BATCHES): (
        "Fatal Python error: Segmentation fault", " in segfault\n"),
}  # fmt: skip
OTHER_HOST_SAYS = {
    Fault("loses the network", 0, "hosts"): "the run's store failed first: rank 0 on host0 holds it and is gone or out",
    Fault("leaves", 1, "hosts"): "rank 1 failed first: ",
    Fault("holds the interpreter", 1, "hosts"): "rank 1 failed first: ",
}
MISSING = {
    Fault("never arrives", 1, "torchrun"): "1 of 2 ranks did not arrive within 10 s: 1.",
    Fault("never arrives", 1, "ranks", ranks=(0,)): "1 of 2 ranks did not arrive within 10 s: 1.",
    Fault("never arrives", 0, "ranks", ranks=(1,)): "rank 0 did not answer within 10 s",
}
NO_FAULT = [Fault("stands still", "all", "ranks"), Fault("ends a child", 1, "ranks")]
KILLED_IN_A_SAVE = Fault("is killed in the second save", 0, interpreter=True, timeout=60.0)
THE_SAME_AGAIN = Fault("nothing", "none", interpreter=True, timeout=60.0)
UNDISTURBED = Fault("nothing", "none", "ranks")


@functools.cache
def hosts_are_possible():
    return failures.can_have_hosts()


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """The outcome of a fault; the faults of all selected tests run together."""
    expected = {item.callspec.params["fault"]: None for item in request.session.items
              if item.path == request.path and hasattr(item, "callspec")}  # fmt: skip
    if any("resumes" in item.name for item in request.session.items if item.path == request.path):
        expected = {KILLED_IN_A_SAVE: None, UNDISTURBED: None} | expected

    def run(fault):
        first = failures.run(fault, folder / str(fault))
        return (first, failures.run(THE_SAME_AGAIN, first.folder)) if fault == KILLED_IN_A_SAVE else first

    expected = sorted(expected, key=lambda fault: not fault.what.startswith(LONGEST))  # they wait while others compute
    if not hosts_are_possible():
        expected = [fault for fault in expected if fault.launcher != "hosts"]
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {fault: pool.submit(run, fault) for fault in expected}
        yield lambda fault: futures[fault].result()


def check_end(run):
    assert run.code != 0 and not run.left, (run.code, run.left, run.errors)
    assert run.seconds < PROMISE


@pytest.mark.parametrize("fault", OTHER_SAYS, ids=str)
def test_a_failing_rank_ends_the_run_and_is_named_first(outcome, fault):
    run, other = outcome(fault), 1 - fault.rank
    check_end(run)
    first = run.first_word(other)
    assert first.startswith(f"watchdog: rank {fault.rank} failed first: ") and OTHER_SAYS[fault] in first, run.errors
    assert first in run.stacks[f"rank-{other}"] and "Current thread" in run.stacks[f"rank-{other}"]


@pytest.mark.parametrize("fault", OTHER_HOST_SAYS, ids=str)
def test_a_failing_host_ends_the_run_on_the_others(outcome, fault):
    if not hosts_are_possible():
        pytest.skip("needs the ip command and namespaces")
    run, other = outcome(fault), 1 - fault.rank
    check_end(run)
    assert run.first_word(other).startswith(f"watchdog: {OTHER_HOST_SAYS[fault]}"), run.errors[other]
    assert run.first_word(other) in run.stacks[f"rank-{other}"]


@pytest.mark.parametrize("fault", MENDED_BY_THE_USER, ids=str)
def test_user_error_is_reported_once_and_without_stacks(outcome, fault):
    """The rank that has the cause says it; under torchrun its report, too, ends in the message."""
    run, message = outcome(fault), MENDED_BY_THE_USER[fault]
    check_end(run)
    assert run.errors[1].count(message) == 1 and not run.first_word(0), run.errors
    assert "error on" not in run.errors[0] and not run.stacks
    assert "Traceback" not in run.errors[0] + run.errors[1]
    if fault.launcher == "torchrun":
        assert message.partition(": ")[2] in run.output.partition("Root Cause")[2] and "N/A" not in run.output


@pytest.mark.parametrize("fault", ALONE, ids=str)
def test_single_process_reports_why_it_ends(outcome, fault):
    run = outcome(fault)
    check_end(run)
    for words in ALONE[fault]:
        assert words in run.errors[0]


HANGS = [fault for fault in [*OTHER_SAYS, *OTHER_HOST_SAYS] if fault.what.startswith(("hangs", "holds"))]


@pytest.mark.parametrize("fault", HANGS, ids=str)
def test_a_rank_that_hangs_says_where(outcome, fault):
    """Also one whose interpreter is locked, and which therefore cannot say it itself."""
    if fault.launcher == "hosts" and not hosts_are_possible():
        pytest.skip("needs the ip command and namespaces")
    function = {"hangs in a collective": "hang_in_collective", "holds the interpreter": "hold_the_interpreter"}
    assert f" in {function.get(fault.what, 'hang')}\n" in outcome(fault).errors[fault.rank]


@pytest.mark.parametrize("fault", MISSING, ids=str)
def test_a_rank_that_never_arrives_is_named(outcome, fault):
    run, other = outcome(fault), 1 - fault.rank
    check_end(run)
    assert MISSING[fault] in run.errors[other] and MISSING[fault] in run.stacks[f"rank-{other}"]


@pytest.mark.parametrize("fault", NO_FAULT, ids=str)
def test_watchdog_ignores_runs_without_a_failure(outcome, fault):
    run = outcome(fault)
    assert run.code == 0 and not run.stacks, run.errors


def test_the_same_command_resumes_from_the_last_checkpoint_after_a_failure(outcome):
    (run, repeated), undisturbed = outcome(KILLED_IN_A_SAVE), outcome(UNDISTURBED)
    check_end(run)
    assert run.first_word(1).startswith("watchdog: rank 0 failed first: its process"), run.errors[1]
    assert repeated.code == 0 and "successfully loaded checkpoint" in repeated.errors[0], repeated.output
    assert losses(run.folder / "save") == losses(undisturbed.folder / "save")
