"""The rank that is blamed, the limits of silence, and stacks that wait for other ranks, without any process."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.core.config.errors import UserError
from megatron.training.start.rendezvous import Arrival
from megatron.training.watchdog import watchdog
from megatron.training.watchdog.failure_store import Answer, Failure, FailureStore, Report
from megatron.training.watchdog.listener import Listener
from megatron.training.watchdog.local_ranks import LocalRanks, Process
from megatron.training.watchdog.monitor import Limits, Monitor
from megatron.training.watchdog.progress import (
    COMPUTING,
    DATA,
    EVALUATING,
    EVALUATION_DATA,
    GENERATING,
    ForwardProgress,
    Heartbeat,
    RankProgress,
)
from megatron.training.watchdog.stacks import has_timed_out, is_consequence, waits_for_others


def monitors(count, timeout=0.4):
    """Return monitors of ``count`` ranks on separate hosts, without started threads."""
    store = dist.HashStore()
    arrivals = [Arrival(f"host{rank}", rank, count, f"machine{rank}") for rank in range(count)]
    return [
        Monitor(FailureStore(store, rank, count), arrivals, RankProgress(timeout, 60.0), Limits.of(timeout),
                local_ranks=LocalRanks({}, rank), agent_holds_store=False, folder=None)
        for rank in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("heartbeats", "waits", "culprit"),
    [
        ([(7, COMPUTING), (6, COMPUTING)], [True, True], 1),  # least far
        ([(7, COMPUTING), (7, DATA)], [False, False], 1),  # data before computing
        ([(7, COMPUTING), (7, EVALUATION_DATA)], [True, False], 1),
        ([(7, COMPUTING), (7, COMPUTING), (7, COMPUTING)], [True, False, True], 1),  # not in a collective
        ([(7, COMPUTING), (9, COMPUTING)], [True, None], 1),  # does not answer
    ],
)
def test_the_rank_that_got_least_far_is_blamed(heartbeats, waits, culprit):
    ranks = monitors(len(heartbeats))
    for rank, ((iteration, phase), wait) in enumerate(zip(heartbeats, waits)):
        ranks[rank].store.publish(Heartbeat(1, iteration, 3, phase, silence=9.0, allowed=1.0))
        if wait is not None:
            ranks[rank].store.answer(Answer(wait, f"stack of {rank}"))
    ranks[0]._answer = lambda: Answer(bool(waits[0]), "stack of 0")
    failure = ranks[0]._find_culprit()
    assert failure.rank == culprit and "no progress for 9 s" in failure.reason
    assert failure.detail == ("" if waits[culprit] is None else f"stack of {culprit}")


def test_a_rank_is_gone_if_its_heart_stops_or_never_beats():
    """The others' hosts are out of reach before their first heartbeat, or after one."""
    first, second, third = monitors(3)

    def judge(rank):
        return first._judge(rank, time.monotonic())

    third.store.publish(Heartbeat(1, 5, 9, COMPUTING, silence=0.0, allowed=1.0))
    assert judge(1) is None and judge(2) is None
    first._heard = {rank: (count, since - 10.0) for rank, (count, since) in first._heard.items()}
    assert "before the first iteration: process 1 on host1 is stopped, locked or out of reach" in judge(1).reason
    assert "iteration 6, computing: process 2 on host2" in judge(2).reason
    second.store.publish(Heartbeat(1, 0, 0, COMPUTING, silence=0.0, allowed=1.0))
    third.store.finish()
    assert judge(1) is None and judge(2) is None


def test_a_suspension_during_a_request_is_no_silence():
    first, second = monitors(2)
    for monitor in (first, second):
        monitor._guards_itself = False  # no timer that would end this process
        monitor.progress.mark(COMPUTING)
        monitor._round()
    read = first.store.failure
    first.store.failure = lambda: time.sleep(0.6) or read()
    first._round()
    assert read() is None


def test_an_error_with_the_store_gone_leaves_the_last_word_to_the_monitor():
    """Else a rank would leave by the error of a collective without naming the host that died."""
    monitor = monitors(2)[0]
    for name in ("failure", "others_know", "declare"):
        setattr(monitor.store, name, store_is_gone)
    began = time.monotonic()
    monitor.main_thread_raised(report(0, "reason"), consequence=True, speak=print)
    assert time.monotonic() - began > monitor.limits.heartbeat and monitor.wake.is_set()


def report(rank, what, elsewhere=False):
    return Report(what, Failure(rank, f"iteration 3: {what}", "trace"), elsewhere)


def first_of(*reports, late=None):
    """Whom each rank names where all raise at about the same time, the rank ``late`` last."""
    ranks = monitors(len(reports), timeout=20.0)

    def raise_on(monitor):
        time.sleep(0.2 if monitor.rank == late else 0.0)
        return monitor._first_failure(reports[monitor.rank])

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(raise_on, ranks))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_the_rank_of_a_nan_is_named_whoever_raises_first(late):
    local = [report(0, "lm loss (of another rank) is nan", True), report(1, "lm loss is nan"),
           report(2, "lm loss (of another rank) is nan", True)]  # fmt: skip
    assert first_of(*local, late=late) == [local[1].failure] * 3


def test_an_error_that_all_ranks_raise_is_nobodys():
    result = first_of(*(report(rank, "the training data is used up") for rank in range(3)), late=1)
    assert {str(item) for item in result} == {"all ranks failed together: the training data is used up"}


def declared(consequences, *reports):
    """Return what the run declares after all ranks raised, and the seconds until they all knew."""
    ranks = monitors(len(reports), timeout=20.0)

    def raise_on(monitor):
        local, spoken = reports[monitor.rank], []
        monitor.main_thread_raised(local, consequence=monitor.rank in consequences, speak=spoken.append)
        monitor.store.acknowledge()
        return monitor.store.failure()

    for rank in ranks:
        rank._guards_itself = False
    began = time.monotonic()
    with ThreadPoolExecutor(len(ranks)) as pool:
        result = [pool.submit(raise_on, monitor) for monitor in ranks]
        while not all(monitor.store.failure() for monitor in ranks) and time.monotonic() - began < 60.0:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        for monitor in ranks:
            monitor.store.acknowledge()
        return [rank.result() for rank in result], seconds


def test_equal_errors_of_collectives_are_one_failure_without_a_wait():
    """For example a missing communication library: no rank has died, so that no wait is needed."""
    text = "Distributed package doesn't have NCCL built in"
    actual, seconds = declared({0, 1}, report(0, text), report(1, text))
    assert {str(item) for item in actual} == {f"all ranks failed together: {text}"}
    assert seconds < Limits.of(20.0).heartbeat


def test_an_error_of_a_collective_does_not_hide_the_error_that_caused_it():
    actual, _ = declared({0}, report(0, "gloo: connection closed by peer"), report(1, "a bug"))
    assert [item.rank for item in actual] == [1, 1] and "a bug" in actual[0].reason


def test_single_raising_rank_is_named_after_a_moment():
    first, second = monitors(2)
    assert first._first_failure(report(0, "a bug")) == Failure(0, "iteration 3: a bug", "trace")
    second.store.declare(Failure(1, "was first"))
    first.main_thread_raised(report(0, "a bug"), consequence=False, speak=pytest.fail)  # no word of its own


def test_an_error_that_all_ranks_have_heard_of_outlives_the_store(monkeypatch):
    """Rank 0 holds the store and leaves as soon as all know: that is no death which the others must report."""
    second = monitors(2)[1]
    second.error_here = "trace"
    second.store.declare(Failure(0, "the data is damaged", for_user=True, together=True))
    second.local_ranks = SimpleNamespace(dead=lambda: [0])
    second._guards_itself = False  # no timer that would end this process
    second._round()
    monkeypatch.setattr(second, "end", lambda failure: pytest.fail(str(failure)))
    second._store_is_gone(RuntimeError("Connection reset by peer"), 60.0)
    began = time.monotonic()
    second._wait(60.0, store_is_gone)  # as the main thread does
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize(
    ("holder_is_near", "agent", "blamed"), [(True, False, 0), (True, True, None), (False, False, None)]
)
def test_a_silent_store_is_its_holders_fault(holder_is_near, agent, blamed):
    """A stopped rank 0 on this host is ended like any other; on another host no rank can reach it."""
    second = monitors(2)[1]
    second.agent_holds_store = agent
    alive = Process.open(os.getpid())
    second.local_ranks = LocalRanks({0: alive} if holder_is_near else {}, 1)
    failure = second.store_is_silent("no answer for 7 s")
    alive.close()
    assert failure.rank == blamed and "no answer for 7 s" in failure.reason
    assert ("the launcher" in failure.reason) == agent


def store_is_gone(*args):
    raise RuntimeError("Connection reset by peer")


def test_the_first_failure_stays():
    first, second = (monitor.store for monitor in monitors(2))
    first.declare(Failure(0, "was first"))
    second.declare(Failure(1, "was second"))
    assert first.failure() == second.failure() == Failure(0, "was first")
    second.acknowledge()
    assert first.others_know() and not second.others_know()


def test_a_lost_host_is_gone_everywhere_within_the_promise():
    for timeout in (10.0, 60.0, 600.0):
        limits = Limits.of(timeout)
        assert limits.heartbeat + 2 * limits.interval + limits.grace + limits.spreading <= timeout


def test_work_of_unknown_length_is_given_the_time_of_a_collective():
    """The first iteration with its backward pass, also of a resumed run, and the first batch of an evaluation."""
    progress = RankProgress(10.0, 600.0)
    progress.iteration = 40  # as after a checkpoint
    mark = ForwardProgress(progress)

    def forward_step(training):
        result = []
        for event in ("reads", "has batch", "done"):
            mark(event, training)
            result.append((progress.phase, progress.allowed))
        return result

    first = [(DATA, 540.0), (COMPUTING, 540.0), (COMPUTING, 540.0)]
    assert forward_step(True) == forward_step(True) == first  # the next micro-batch of it too
    progress.iteration = 41
    assert forward_step(False) == [(EVALUATION_DATA, 540.0), (EVALUATING, 540.0), (EVALUATING, 10.0)]
    assert forward_step(False) == [(EVALUATION_DATA, 10.0), (EVALUATING, 10.0), (EVALUATING, 10.0)]
    assert forward_step(True) == [(DATA, 10.0), (COMPUTING, 10.0), (COMPUTING, 10.0)]
    mark("generates", False)
    assert (progress.phase, progress.allowed) == (GENERATING, 540.0)


def test_a_process_that_stood_still_is_not_blamed_for_it():
    progress = RankProgress(10.0, 600.0)
    progress.mark(COMPUTING)
    progress.last -= 100.0
    progress.forgive(100.0)
    assert progress.heartbeat().silence < 10.0


def test_a_round_during_which_the_process_stood_still_is_no_silence_of_the_store():
    monitor = monitors(2)[0]
    listener = Listener(monitor)
    listener._looked = monitor.round_began = time.monotonic() - 100.0
    listener._look_at_the_monitor()
    assert monitor.blocked < monitor.limits.heartbeat and not monitor.ending


def test_waits_for_others_is_true_in_torch_distributed_but_not_in_elastic():
    def frame_in(filename):
        code = compile("frame = sys._getframe()", filename, "exec")
        scope = {"sys": sys}
        exec(code, scope)
        return scope["frame"]

    assert waits_for_others(frame_in("/site-packages/torch/distributed/distributed_c10d.py"))
    assert not waits_for_others(frame_in("/site-packages/torch/distributed/elastic/multiprocessing/api.py"))
    assert not waits_for_others(frame_in("my_data.py")) and not waits_for_others(None)


def test_errors_of_collectives_may_be_consequences():
    assert is_consequence(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert is_consequence(dist.DistBackendError("NCCL error in: ..."))
    assert not is_consequence(ValueError("Connection closed by peer")) and not is_consequence(RuntimeError("CUDA OOM"))
    assert has_timed_out("RuntimeError: [unbound_buffer.cc] Timed out waiting 600000ms for recv operation to complete")


CRASH, MISUSE = RuntimeError("a kernel failed"), UserError("--lr 0: too small")


@pytest.mark.parametrize(("error", "together", "is_first", "lines"), [
    (CRASH, True, True, ["watchdog: all ranks failed together: what"]), (CRASH, True, False, []),
    (CRASH, False, True, []), (MISUSE, True, True, ["--lr 0: too small"]), (MISUSE, True, False, []),
    (MISUSE, False, False, ["--lr 0: too small"]),
])  # fmt: skip
def test_an_error_of_all_ranks_is_printed_once_per_host(error, together, is_first, lines, monkeypatch):
    """Every rank writes the launcher's error file. The monitor prints the stack of one rank's crash."""
    messages, launcher = [], []
    monkeypatch.setattr(watchdog, "say", lambda text, rank: messages.append(text))
    monkeypatch.setattr(watchdog, "write_line", messages.append)
    monkeypatch.setattr(watchdog, "notify_launcher", lambda text, error: launcher.append((text, error)))
    one = SimpleNamespace(_monitor=SimpleNamespace(rank=1, local_ranks=SimpleNamespace(is_first=is_first)))
    for_user = isinstance(error, UserError)
    watchdog.Watchdog._speak(one, error, Failure(1, "what", for_user=for_user, together=together))
    assert messages == lines and [item for _, item in launcher] == [None if for_user else error]
    assert not for_user or error.reported
