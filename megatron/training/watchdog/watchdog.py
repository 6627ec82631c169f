"""The watchdog of one rank: a context around everything that a run does."""

from __future__ import annotations

import signal
import traceback
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from megatron.core.config.errors import UserError
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.exits.endings import message_of, say, tell_launcher
from megatron.training.hooks.base import Hook
from megatron.training.start.rendezvous import Arrival, Place, RendezvousError, open_store, roll_call
from megatron.training.tasks.base import Task
from megatron.training.watchdog.failure_store import Failure, FailureStore, Report
from megatron.training.watchdog.listener import Listener
from megatron.training.watchdog.local_ranks import LocalRanks, Presence, find_local_ranks
from megatron.training.watchdog.monitor import Limits, Monitor
from megatron.training.watchdog.progress import Progress, ProgressHook, mark_task
from megatron.training.watchdog.stacks import is_consequence, write_line, write_stacks

LEAVE_SECONDS = 30
"""How long a rank that raised may take to leave: destructors of CUDA and NCCL may wait for a peer that is gone."""


class Watchdog:
    """With --watchdog-timeout-seconds 0, or where the program has set up torch.distributed itself, it does nothing."""

    def __init__(self, cfg: PretrainConfig) -> None:
        self.timeout = cfg.watchdog_timeout_seconds
        works = self.timeout > 0 and not dist.is_initialized()
        self.place = Place.from_environment() if works else None
        self.alone = works and launched_world_size() in (None, 1)
        self.progress = Progress(self.timeout, 60.0 * cfg.distributed_timeout_minutes)
        self.folder = None if cfg.save is None else Path(cfg.save) / "stacks"
        self._presence: Presence | None = None
        handled = cfg.exit_signal_handler and cfg.exit_signal == signal.SIGTERM
        self.catches_sigterm = not (cfg.save_on_signal or handled)
        self.store: dist.Store | None = None
        """For the process groups; None: torch finds its own."""
        self._monitor: Monitor | None = None
        self._listener: Listener | None = None

    def __enter__(self) -> Watchdog:
        if self.alone:
            store = FailureStore(dist.HashStore(), 0, 1)
            self._start(store, [Arrival.of_this_process(1)], LocalRanks({}, 0), agent_holds_store=False)
        elif self.place is not None:
            own, arrivals = self._meet(self.place)
            local_ranks = find_local_ranks(arrivals, self.place)
            store = FailureStore(own, self.place.rank, len(arrivals))
            self._start(store, arrivals, local_ranks, agent_holds_store=self.place.agent_holds_store)
        return self

    def _meet(self, place: Place) -> tuple[dist.Store, list[Arrival]]:
        """Stores for the process groups and for the watchdog itself, and the ranks that have arrived."""
        patience = max(self.timeout, 1.0)
        self._presence = Presence(place)
        try:
            self.store = dist.PrefixStore("groups", open_store(place, patience, holds=place.holds_store))
            own = dist.PrefixStore("watchdog", open_store(place, patience))
            return own, roll_call(own, place, patience)
        except RendezvousError as error:
            self._write_why(str(error))
            raise

    def _start(
        self, store: FailureStore, arrivals: list[Arrival], local_ranks: LocalRanks, *, agent_holds_store: bool
    ) -> None:
        self._monitor = Monitor(
            store, arrivals, self.progress, Limits.of(self.timeout), local_ranks=local_ranks,
            agent_holds_store=agent_holds_store, folder=self.folder,
        )  # fmt: skip
        self._listener = Listener(self._monitor)
        if self.catches_sigterm:
            self._listener.catch_sigterm()
        self._monitor.start()
        self._listener.start()

    def _write_why(self, reason: str) -> None:
        """A rank is missing: the message goes to stderr by itself, the stacks where those of other failures are."""
        if self.folder is not None and self.place is not None:
            path = self.folder / f"rank-{self.place.rank}.txt"
            write_stacks(f"watchdog: {reason}\n", path, also_stderr=False)

    def watch(self, task: Task) -> list[Hook]:
        """Counts the task's micro-batches as progress; the hook that counts the events of the loop."""
        if self._monitor is None:
            return []
        mark_task(task, self.progress)
        return [ProgressHook(self.progress)]

    def failed(self, error: BaseException) -> None:
        """The main thread is about to leave by ``error``: the others hear of it before files and logs are closed."""
        if self._monitor is None or self.alone or self._monitor.own_error or _is_success(error):
            return
        for_user, what = isinstance(error, UserError), message_of(error)
        trace = "".join(traceback.format_exception(error))
        failure = Failure(self._monitor.rank, f"{self.progress.heartbeat().where}: {what}", trace, for_user)
        own = Report(what, failure, isinstance(error, UserError) and error.elsewhere)
        signal.alarm(LEAVE_SECONDS + round(self.timeout))  # in case the store does not answer
        self._monitor.main_thread_raised(
            own, consequence=is_consequence(error), speak=lambda first: self._speak(error, first)
        )
        signal.alarm(LEAVE_SECONDS)

    def _speak(self, error: BaseException, failure: Failure) -> None:
        """This rank's error ends the run. Of an error that all ranks raise, one rank of each host speaks."""
        assert self._monitor is not None
        speaks = self._monitor.local_ranks.is_first or not failure.together
        tell_launcher(message_of(error), None if failure.for_user else error)
        if isinstance(error, UserError):
            error.reported = True
            if speaks:
                say(message_of(error), self._monitor.rank)
        elif failure.together and speaks:
            write_line(f"watchdog: {failure}")

    def finish(self) -> None:
        """The run is complete: from here on, other ranks may leave at any time."""
        if self._monitor is not None:
            self._monitor.finish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._monitor is None or self._listener is None:
            return
        if error is None or _is_success(error):
            self._monitor.finish()
        else:
            self.failed(error)
        self._monitor.stop()
        self._listener.stop()
        self._monitor.local_ranks.close()
        if self._presence is not None:
            self._presence.close()


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and not error.code
