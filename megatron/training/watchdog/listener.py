"""Listener thread: events that cannot wait for the monitor's next round, or that the monitor cannot see.

A launcher sends SIGTERM to the remaining ranks as soon as one has exited; they report the cause before they exit. The
death of a local rank starts a round at once, before NCCL notices it and aborts the process with its own message. A
round never ends while the store's host is unreachable, because requests then stay unanswered."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType

from megatron.training.watchdog.monitor import Monitor

HURRY_SECONDS = 0.05
ROUNDS_AFTER_SIGTERM = 5
"""Rounds after SIGTERM before the process exits. On a busy host, no time limit ensures that a failure is read."""


class Listener(threading.Thread):
    """Daemon thread that wakes the monitor early, or ends the process if the monitor is blocked."""

    def __init__(self, monitor: Monitor) -> None:
        """Create the thread, which must be started, and its pipe; `catch_sigterm` sets the signal handler."""
        super().__init__(name="watchdog-listener", daemon=True)
        self.monitor = monitor
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._catching = False
        self._terminated: float | None = None
        self._rounds_until_leaving = 0
        self._looked = time.monotonic()

    def catch_sigterm(self) -> None:
        """Install a SIGTERM handler, a wake-up descriptor and fork hooks that keep both out of child processes. Does
        nothing outside the main thread, or if SIGTERM already has a handler. `stop` restores SIGTERM."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._catching = True
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._set_wakeup()
            os.register_at_fork(
                before=self._remove_wakeup, after_in_parent=self._set_wakeup, after_in_child=self._restore_sigterm
            )

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Write to the pipe too, in case the wake-up descriptor was changed. Python runs this later."""
        os.write(self._writer, bytes([number]))

    def _set_wakeup(self) -> None:
        if self._catching and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def _remove_wakeup(self) -> None:
        """During a fork: a signal to the child must not reach this process."""
        if self._catching and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    def _restore_sigterm(self) -> None:
        """Forked children (data-loader workers) die of SIGTERM."""
        if self._catching:
            self._remove_wakeup()
            self._catching = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def stop(self) -> None:
        """Stop the thread, join it for at most 5 s and restore SIGTERM; call from the main thread."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")
        self.join(5.0)
        self._restore_sigterm()

    def run(self) -> None:
        """Wait for SIGTERM and exits of local ranks, and start the monitor's next round at once. Also end the process
        if the monitor is blocked, or, after SIGTERM, once the monitor has had its rounds. Wakes at least once per
        monitor interval. Returns when the monitor is stopped."""
        poll = select.poll()
        for descriptor in (self._reader, *self.monitor.local_ranks.descriptors):
            poll.register(descriptor, select.POLLIN)
        while not self.monitor.stopped:
            hurry = self._terminated is not None
            for descriptor, _ in poll.poll(1000 * (HURRY_SECONDS if hurry else self.monitor.limits.interval)):
                if descriptor != self._reader:
                    poll.unregister(descriptor)
                elif signal.SIGTERM in os.read(self._reader, 64):
                    self._rounds_until_leaving = self.monitor.rounds + ROUNDS_AFTER_SIGTERM
                    self._terminated = self._terminated or time.monotonic()
                self.monitor.wake.set()
            self._look_at_the_monitor()
            if self._terminated is not None:
                self._terminate(time.monotonic() - self._terminated)

    def _look_at_the_monitor(self) -> None:
        """End the process, blaming the store, if the current round has waited for it longer than ``limits.heartbeat``.
        A suspension of this process restarts the measured wait."""
        now = time.monotonic()
        if now - self._looked > self.monitor.limits.heartbeat / 2 and self.monitor.round_began is not None:
            self.monitor.round_began = now  # this process was suspended in the middle of a round
        self._looked = now
        blocked = self.monitor.blocked
        if blocked > self.monitor.limits.heartbeat and not self.monitor.finishing and not self.monitor.ending:
            self.monitor.end(self.monitor.store_is_silent(f"no answer for {blocked:.0f} s"))

    def _terminate(self, seconds: float) -> None:
        """Wake the monitor ``seconds`` after a SIGTERM. After the grace time and ``ROUNDS_AFTER_SIGTERM`` rounds, in
        which a failure can be read, exit with code 143, or report the lost store."""
        self.monitor.wake.set()
        heard = self.monitor.rounds >= self._rounds_until_leaving or self.monitor.blocked > self.monitor.limits.interval
        if seconds < self.monitor.limits.grace or not heard or self.monitor.ending:
            return
        blocked = self.monitor.blocked
        if blocked > self.monitor.limits.interval and not self.monitor.finishing:
            self.monitor.end(self.monitor.store_is_silent(f"no answer for {blocked:.0f} s; terminated by the launcher"))
        os._exit(128 + signal.SIGTERM)
