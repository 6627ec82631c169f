"""When a run logs, evaluates, saves and stops, with and without a resume; what several ranks agree on."""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import compose
from megatron.training.exits.conditions import (
    EXIT_SIGNALS,
    ExitConditions,
    IgnoreExitSignals,
    after_last_batch,
    agree,
    as_signal,
    decide,
    every,
    is_eval_iteration,
    is_log_iteration,
    is_save_iteration,
)
from megatron.training.train_state import TrainState


def flags(**changed):
    values = {
        "train_iters": 10,
        "train_samples": None,
        "exit_interval": None,
        "exit_duration_in_mins": None,
        "save": None,
        "save_on_signal": False,
        "exit_signal_handler": False,
        "exit_signal": signal.SIGTERM,
        "log_interval": 100,
        "eval_interval": None,
        "start_eval_at_iter": None,
        "save_interval": None,
        "micro_batch_size": 1,
        "global_batch_size": 4,
    }
    return compose(FlatConfig(**(values | changed)))


def run(cfg, start=0, batch=4):
    """The loop of the trainer: iterations that log, evaluate and save, the last one, and why it stopped."""
    state = TrainState(iteration=start, consumed_train_samples=start * batch)
    logged, evaluated, saved = [], [], []
    reason = decide(cfg, state, 0.0, None, start + 1)
    while reason is None:
        state.iteration += 1
        state.consumed_train_samples += batch
        if is_log_iteration(cfg.logging.log_interval, state.iteration, start + 1):
            logged.append(state.iteration)
        if is_eval_iteration(cfg.validation.eval_interval, state.iteration, cfg.validation.start_eval_at_iter):
            evaluated.append(state.iteration)
        reason = decide(cfg, state, 0.0, None, start + 1)
        if is_save_iteration(cfg.checkpoint.save_interval, state.iteration, reason):
            saved.append(state.iteration)
    return logged, evaluated, saved, state.iteration, reason.kind


ALL = list(range(1, 11))
# flags, start -> logged, evaluated, saved, last, why
TABLE = [
    ({}, 0, [1], [], [10], 10, "train_iters"),
    ({}, 4, [5], [], [10], 10, "train_iters"),
    ({}, 10, [], [], [], 10, "train_iters"),  # a finished run saves nothing a second time
    ({}, 12, [], [], [], 12, "train_iters"),
    ({"log_interval": 1}, 0, ALL, [], [10], 10, "train_iters"),
    ({"log_interval": 4}, 0, [1, 4, 8], [], [10], 10, "train_iters"),
    ({"log_interval": 4}, 4, [5, 8], [], [10], 10, "train_iters"),
    ({"log_interval": 4}, 7, [8], [], [10], 10, "train_iters"),
    ({"eval_interval": 5}, 0, [1], [5, 10], [10], 10, "train_iters"),
    ({"eval_interval": 5}, 5, [6], [10], [10], 10, "train_iters"),  # not repeated on resume
    ({"eval_interval": 5}, 4, [5], [5, 10], [10], 10, "train_iters"),  # not skipped either
    ({"eval_interval": 3, "start_eval_at_iter": 6}, 0, [1], [6, 9], [10], 10, "train_iters"),
    ({"eval_interval": 0}, 0, [1], [], [10], 10, "train_iters"),
    ({"save_interval": 3}, 0, [1], [], [3, 6, 9, 10], 10, "train_iters"),
    ({"save_interval": 5}, 0, [1], [], [5, 10], 10, "train_iters"),  # the last one once
    ({"save_interval": 5}, 5, [6], [], [10], 10, "train_iters"),
    ({"save_interval": 3}, 9, [10], [], [10], 10, "train_iters"),
    ({"exit_interval": 4}, 0, [1], [], [4], 4, "interval"),
    ({"exit_interval": 4}, 4, [5], [], [8], 8, "interval"),  # a job gets past the multiple it stopped at
    ({"exit_interval": 4}, 8, [9], [], [10], 10, "train_iters"),
    ({"exit_interval": 5}, 5, [6], [], [10], 10, "train_iters"),  # complete: the final evaluation follows
    ({"exit_interval": 4, "save_interval": 2}, 0, [1], [], [2, 4], 4, "interval"),
    ({"exit_interval": 1}, 6, [7], [], [7], 7, "interval"),
    ({"train_iters": None, "train_samples": 22}, 0, [1], [], [5], 5, "train_samples"),
    ({"train_iters": None, "train_samples": 24}, 3, [4], [], [6], 6, "train_samples"),
    ({"train_iters": None, "train_samples": 24}, 6, [], [], [], 6, "train_samples"),
    ({"train_iters": 0}, 0, [], [], [], 0, "train_iters"),
]


@pytest.mark.parametrize(("changed", "start", "logged", "evaluated", "saved", "last", "why"), TABLE)
def test_conditions_of_log_eval_save_and_exit(changed, start, logged, evaluated, saved, last, why):
    assert run(flags(**changed), start) == (logged, evaluated, saved, last, why)


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 7, 10, 20])
def test_a_chain_of_jobs_evaluates_and_saves_as_one_job(interval):
    """Jobs that end by --exit-interval, each from the last checkpoint, cover every due iteration exactly once."""
    for due in (1, 3, 4, 5):
        cfg = flags(train_iters=20, eval_interval=due, save_interval=due)
        _, evaluated, saved, _, _ = run(cfg)
        cfg = cfg.with_settings(exit_interval=interval)
        chain_evaluated, chain_saved, start, why = [], [], 0, ""
        while why != "train_iters":
            _, more_evaluated, more_saved, start, why = run(cfg, start)
            chain_evaluated += more_evaluated
            chain_saved += more_saved
        assert chain_evaluated == evaluated
        assert len(set(chain_saved)) == len(chain_saved) and set(saved) <= set(chain_saved)


def test_every_is_never_for_none_and_zero():
    assert not any(every(interval, iteration) for interval in (None, 0) for iteration in range(5))
    assert [iteration for iteration in range(10) if every(3, iteration)] == [3, 6, 9]


@pytest.mark.parametrize(
    ("changed", "elapsed", "received", "kind", "message"),
    [
        ({"exit_signal_handler": True}, 0, signal.SIGTERM, "signal", "exiting program after receiving SIGTERM."),
        ({"exit_signal_handler": True, "exit_signal": signal.SIGUSR1}, 0, signal.SIGUSR1, "signal", "SIGUSR1"),
        ({"exit_signal_handler": True, "train_iters": 5}, 0, signal.SIGTERM, "signal", "TERM"),  # no evaluation
        ({"save": "x", "save_on_signal": True}, 0, signal.SIGINT, "signal", "after receiving SIGINT."),
        ({"exit_duration_in_mins": 2}, 120.1, None, "duration", "exiting program after 2.0"),
        ({"exit_duration_in_mins": 2}, 120.0, None, None, ""),
        ({"exit_duration_in_mins": 2, "train_iters": 5}, 121.0, None, "duration", ""),
        ({"exit_interval": 5}, 0, None, "interval", "exiting program at iteration 5"),
        ({"exit_interval": 5, "train_iters": 5}, 0, None, "train_iters", "complete"),
    ],
)
def test_reasons_their_order_and_words(changed, elapsed, received, kind, message):
    reason = decide(flags(**changed), TrainState(iteration=5), elapsed, received)
    assert (reason.kind if reason else None) == kind
    if reason:
        assert message in reason.message and reason.exit_code == 0
        assert reason.finished == kind.startswith("train")


def test_data_ends_before_a_batch_that_it_cannot_fill():
    assert after_last_batch(42, 34, 8) is None
    reason = after_last_batch(42, 34, 9)
    assert (reason.kind, reason.exit_code, reason.finished) == ("data", 2, False)
    assert reason.message.startswith("the training data is used up: it holds 42 samples. Give --data-path weights")


@pytest.fixture
def restored():
    """Set the signal handlers of a foreground program (a shell starts background programs with Ctrl-C ignored); restore
    the handlers of the test process after the test."""
    before = {number: signal.getsignal(number) for number in EXIT_SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_set_a_flag_however_often_they_come(restored):
    with ExitConditions(flags(exit_signal_handler=True, exit_signal=signal.SIGUSR1)) as exits:
        state = TrainState()
        assert exits.check(state) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)  # while saving
        state.iteration = 1
        assert exits.signalled and exits.check(state).kind == "signal"
        assert exits.check(state).kind == "signal"
    os.kill(os.getpid(), signal.SIGUSR1)  # while the process ends: the exit code stays 0


def test_every_later_run_of_the_process_catches_the_signals_that_an_interrupted_one_left_ignored(restored):
    for is_sent in (True, False, True, False, False, True):
        with ExitConditions(flags(save="x", save_on_signal=True)) as exits:
            if is_sent:
                os.kill(os.getpid(), signal.SIGUSR1)
            assert exits.signalled == is_sent
        after = signal.SIG_IGN if is_sent else signal.SIG_DFL
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == [after] * 2
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_returns_after_the_run_that_follows_an_interrupted_one(restored):
    signal.signal(signal.SIGUSR1, print)
    for is_sent in (True, True, False):
        with ExitConditions(flags(save="x", exit_signal_handler=True, exit_signal=signal.SIGUSR1)):
            if is_sent:
                os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == (signal.SIG_IGN if is_sent else print)


def test_an_unsignalled_run_puts_the_handler_back():
    before = signal.getsignal(signal.SIGUSR1)
    with ExitConditions(flags(exit_signal_handler=True, exit_signal=signal.SIGUSR1)):
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("handles", [True, False])
def test_loader_workers_outlive_the_signal_only_if_the_trainer_catches_it(restored, handles):
    cfg = flags(exit_signal_handler=handles)
    with ExitConditions(cfg):
        loader = DataLoader(range(100), num_workers=1, worker_init_fn=IgnoreExitSignals())
        batches = iter(loader)
        next(batches)
        (worker,) = batches._workers
        os.kill(worker.pid, signal.SIGTERM)
        if handles:
            assert len(list(batches)) == 99
        else:
            worker.join(10)
            assert not worker.is_alive()
            # torch's shutdown would wait for a lock, for ever if the signal came while the worker held it
            batches._index_queues[0].cancel_join_thread()
            batches._shutdown = True


@pytest.mark.parametrize("number", EXIT_SIGNALS)
def test_by_default_a_signal_saves_and_stops_and_says_so_in_one_line(restored, capfd, number):
    with ExitConditions(flags(save="x", save_on_signal=True)) as exits:
        state = TrainState()
        assert exits.check(state) is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # of a terminal and of a launcher, at once
        reason = exits.check(state)
    assert reason.kind == "signal" and reason.exit_code == 0 and not reason.finished
    assert capfd.readouterr().err == (
        f"received {number.name}: saving and stopping after this iteration; a further Ctrl-C ends the process at once\n"
    )


def test_a_run_that_saves_nothing_ends_with_the_code_of_the_signal():
    reason = decide(flags(save_on_signal=True), TrainState(iteration=5), 0.0, signal.SIGINT)
    assert reason.exit_code == 130


def interrupted_twice():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ExitConditions(flags(save="x", save_on_signal=True))
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.7)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_ends_the_process_at_once(capfd):
    child = mp.get_context("fork").Process(target=interrupted_twice)  # has no children: they would be killed, too
    child.start()
    child.join()
    assert child.exitcode == 130
    assert capfd.readouterr().err.splitlines()[1:] == ["ended by a second Ctrl-C"]


def test_handlers_of_the_program_and_ignored_signals_stay(restored):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    signal.signal(signal.SIGUSR1, print)
    with ExitConditions(flags(save_on_signal=True)):
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN and signal.getsignal(signal.SIGUSR1) == print
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL


def test_children_of_the_program_are_ended_by_the_signals(restored):
    with ExitConditions(flags(save_on_signal=True)):
        child = mp.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM


def interrupted_run(rank, world_size, folder, where):
    """Run with SIGUSR1 for the last rank; return (exit code, iterations made, checkpoints)."""
    from megatron.training.tasks.gpt import GPTTask
    from tests.test_utils import gpt_runs

    get_batch, calls = GPTTask.get_batch, {True: 0, False: 0}

    def get_batch_and_signal(self, data_iterator):
        training = torch.is_grad_enabled()
        calls[training] += 1
        if rank == world_size - 1 and (training, calls[training]) == where:
            os.kill(os.getpid(), signal.SIGUSR1)
        return get_batch(self, data_iterator)

    with mock.patch.object(GPTTask, "get_batch", get_batch_and_signal):
        code = gpt_runs.train(rank, world_size, ["--mock-data", "--save", folder, "--micro-batch-size", "4"])
    return code, calls, sorted(path.name for path in Path(folder).glob("iter_*"))


@pytest.mark.parametrize(
    ("where", "batches", "evaluated", "saved"),
    [((True, 3), 3, 0, ["iter_0000003"]), ((False, 1), 8, 2, ["iter_0000008"])],
    ids=["in-training", "in-the-final-evaluation"],
)
def test_a_signal_to_one_rank_makes_all_save_and_stop_by_default(gloo_pool, tmp_path, where, batches, evaluated, saved):
    outcomes = gloo_pool.run(interrupted_run, 2, str(tmp_path), where)
    assert outcomes == [(0, {True: batches, False: evaluated}, saved)] * 2


def test_without_the_flag_no_handler_is_installed():
    before = signal.getsignal(signal.SIGTERM)
    with ExitConditions(flags()):
        assert signal.getsignal(signal.SIGTERM) == before


def test_the_clock_does_not_go_back(monkeypatch):
    exits = ExitConditions(flags(exit_duration_in_mins=1))
    monkeypatch.setattr("time.time", lambda: 0.0)  # somebody sets the clock
    assert exits.check(TrainState()) is None
    exits.start_time -= 61
    assert exits.check(TrainState(iteration=1)).kind == "duration"


def test_exit_signal_by_name_or_number_and_refusal():
    assert as_signal("SIGUSR1") == as_signal("USR1") == as_signal(signal.SIGUSR1.value) == signal.SIGUSR1
    with pytest.raises(ValueError, match="--exit-signal: 'SIGNOPE'"):
        as_signal("SIGNOPE")


def check_with_one_signalled_rank(rank, world_size, signalled_rank):
    cfg = flags(exit_signal_handler=True, exit_signal=signal.SIGUSR2)
    with ExitConditions(cfg) as exits:
        if rank == signalled_rank:
            os.kill(os.getpid(), signal.SIGUSR2)
        reason = exits.check(TrainState(iteration=3))
        return reason.kind if reason else None


def agreed_values(rank, world_size):
    return agree(10.0 + rank, signal.SIGUSR1 if rank == 0 else 0)


@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_a_signal_to_any_rank_stops_all_at_the_same_step(gloo_pool, signalled_rank):
    assert gloo_pool.run(check_with_one_signalled_rank, 2, signalled_rank) == ["signal", "signal"]


def test_no_signal_stops_nobody(gloo_pool):
    assert gloo_pool.run(check_with_one_signalled_rank, 2, -1) == [None, None]


def test_ranks_agree_on_the_longest_time(gloo_pool):
    assert gloo_pool.run(agreed_values, 2) == [(11.0, signal.SIGUSR1)] * 2


LEAVES_A_LOADER = """
import signal
from torch.utils.data import DataLoader
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import compose
from megatron.training.exits.conditions import ExitConditions, IgnoreExitSignals

flags = compose(FlatConfig(save="x"))
with ExitConditions(flags):
    kept = iter(DataLoader(range(100), num_workers=1, worker_init_fn=IgnoreExitSignals()))
    assert next(kept) == 0
    kept._workers[0].terminate()  # as a batch system does: the worker lives on
    assert [int(next(kept)) for _ in range(20)] == list(range(1, 21))
import builtins
builtins.kept = kept  # still there when Python ends its children, as where a profiler holds on to it
"""


def test_a_process_ends_although_its_loader_is_still_there():
    """Python waits at exit for children that it has sent a SIGTERM: workers that ignore it would be waited for."""
    ended = subprocess.run([sys.executable, "-c", LEAVES_A_LOADER], timeout=90, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
