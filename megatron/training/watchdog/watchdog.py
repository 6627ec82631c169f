"""Watchdog context manager of one rank, entered around a complete run."""

from __future__ import annotations

import signal
import traceback
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from megatron.core.config.errors import UserError
from megatron.training.components import Components
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.exits.endings import error_message, notify_launcher, say
from megatron.training.hooks.base import Hook
from megatron.training.start.rendezvous import Arrival, LaunchInfo, RendezvousError, open_store, roll_call
from megatron.training.watchdog.failure_store import Failure, FailureStore, Report
from megatron.training.watchdog.listener import Listener
from megatron.training.watchdog.local_ranks import LocalRanks, Presence, find_local_ranks
from megatron.training.watchdog.monitor import Limits, Monitor
from megatron.training.watchdog.progress import ForwardProgress, RankProgress, WatchdogHook
from megatron.training.watchdog.stacks import is_consequence, write_line, write_stacks

LEAVE_SECONDS = 30
"""Seconds that a rank may take to exit after it raised; destructors of CUDA and NCCL may wait for a dead peer."""


class Watchdog:
    """Context manager that detects failures of any rank and ends the run with the cause. Inactive with
    --watchdog-timeout-seconds 0, or if the program initialized torch.distributed itself. Entering performs the
    rendezvous of all ranks and starts the monitor and listener threads. Leaving on an error reports it to all ranks."""

    def __init__(self, cfg: PretrainConfig) -> None:
        """Read the settings and the launcher's variables (RendezvousError or ValueError for bad ones); start nothing.
        SIGTERM is caught unless --save-on-signal or --exit-signal-handler for it handle it."""
        self.timeout = cfg.checks.watchdog_timeout_seconds
        works = self.timeout > 0 and not dist.is_initialized()
        self.place = LaunchInfo.from_environment() if works else None
        self.is_single = works and launched_world_size() in (None, 1)
        self.progress = RankProgress(self.timeout, 60.0 * cfg.distributed.distributed_timeout_minutes)
        self.folder = None if cfg.checkpoint.save is None else Path(cfg.checkpoint.save) / "stacks"
        self._presence: Presence | None = None
        handled = cfg.training.exit_signal_handler and cfg.training.exit_signal == signal.SIGTERM
        self.catches_sigterm = not (cfg.training.save_on_signal or handled)
        self.store: dist.Store | None = None
        """Store for the process groups; None if torch must create one."""
        self._monitor: Monitor | None = None
        self._listener: Listener | None = None

    def __enter__(self) -> Watchdog:
        """Meet the other ranks (blocks until all have arrived) and start monitor and listener. A single process needs
        no rendezvous and watches only itself. Does nothing if the watchdog is inactive. Raises ``RendezvousError``."""
        if self.is_single:
            store = FailureStore(dist.HashStore(), 0, 1)
            self._start(store, [Arrival.of_this_process(1)], LocalRanks({}, 0), agent_holds_store=False)
        elif self.place is not None:
            store_of_ranks, arrivals = self._meet(self.place)
            local_ranks = find_local_ranks(arrivals, self.place)
            store = FailureStore(store_of_ranks, self.place.rank, len(arrivals))
            self._start(store, arrivals, local_ranks, agent_holds_store=self.place.agent_holds_store)
        return self

    def _meet(self, place: LaunchInfo) -> tuple[dist.Store, list[Arrival]]:
        """Also set ``self.store`` for the process groups. Blocks until all ranks have arrived; ``RendezvousError``,
        after writing this rank's stacks, if one is missing."""
        patience = max(self.timeout, 1.0)
        self._presence = Presence(place)
        try:
            self.store = dist.PrefixStore("groups", open_store(place, patience, holds=place.holds_store))
            store = dist.PrefixStore("watchdog", open_store(place, patience))
            return store, roll_call(store, place, patience)
        except RendezvousError as error:
            self._write_why(str(error))
            raise

    def _start(
        self, store: FailureStore, arrivals: list[Arrival], local_ranks: LocalRanks, *, agent_holds_store: bool
    ) -> None:
        """Catch SIGTERM first, unless the configuration handles it (--save-on-signal, --exit-signal-handler)."""
        self._monitor = Monitor(
            store,
            arrivals,
            self.progress,
            Limits.of(self.timeout),
            local_ranks=local_ranks,
            agent_holds_store=agent_holds_store,
            folder=self.folder,
        )
        self._listener = Listener(self._monitor)
        if self.catches_sigterm:
            self._listener.catch_sigterm()
        self._monitor.start()
        self._listener.start()

    def _write_why(self, reason: str) -> None:
        """The error itself prints the message to stderr."""
        if self.folder is not None and self.place is not None:
            path = self.folder / f"rank-{self.place.rank}.txt"
            write_stacks(f"watchdog: {reason}\n", path, also_stderr=False)

    def watch(self, parts: Components) -> list[Hook]:
        """Set ``parts.on_forward`` so that forward steps mark progress; return the hooks that mark loop events. Does
        nothing and returns [] if inactive."""
        if self._monitor is None:
            return []
        parts.on_forward = ForwardProgress(self.progress)
        return [WatchdogHook(self.progress)]

    def failed(self, error: BaseException) -> None:
        """Report the main thread's ``error`` to all ranks before files and logs are closed; blocks until they know.
        Does nothing if inactive, for a successful exit, a single process or a second call. Sets SIGALRM, which ends a
        process that hangs here or has not exited 30 s later."""
        if self._monitor is None or self.is_single or self._monitor.error_here or _is_success(error):
            return
        for_user, what = isinstance(error, UserError), error_message(error)
        trace = "".join(traceback.format_exception(error))
        failure = Failure(self._monitor.rank, f"{self.progress.heartbeat().where}: {what}", trace, for_user)
        report = Report(what, failure, isinstance(error, UserError) and error.elsewhere)
        signal.alarm(LEAVE_SECONDS + round(self.timeout))  # ends the process if the store does not answer
        self._monitor.main_thread_raised(
            report, consequence=is_consequence(error), speak=lambda first: self._speak(error, first)
        )
        signal.alarm(LEAVE_SECONDS)

    def _speak(self, error: BaseException, failure: Failure) -> None:
        """Write this rank's error to the launcher's file, with the traceback unless it is a ``UserError``; print that,
        or for another error a line if all ranks raised it. An error of all ranks is printed once per host."""
        assert self._monitor is not None
        speaks = self._monitor.local_ranks.is_first or not failure.together
        notify_launcher(error_message(error), None if failure.for_user else error)
        if isinstance(error, UserError):
            error.reported = True
            if speaks:
                say(error_message(error), self._monitor.rank)
        elif failure.together and speaks:
            write_line(f"watchdog: {failure}")

    def finish(self) -> None:
        """Mark the run as complete: other ranks may exit at any time from now on."""
        if self._monitor is not None:
            self._monitor.finish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Mark this rank as finished, or report its error to the other ranks (see `failed`, blocks). Then stop both
        threads and close their descriptors. Counts ``SystemExit`` with code 0 or None as success."""
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
