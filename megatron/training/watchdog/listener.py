"""The thread for what cannot wait for the monitor's next round, or cannot be seen by it.

A launcher ends the other ranks by SIGTERM as soon as one is gone: they say why before they follow. A local rank's
death is worth a round at once: NCCL would otherwise be first to notice, and would abort the process with its own words.
And a round never ends while the host of the store is out of reach, because a request to it is never answered.
"""

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
"""On a busy host, a number of seconds would say nothing about whether a failure can have been read."""


class Listener(threading.Thread):
    """Wakes the monitor, or ends the process in its place."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(name="watchdog-listener", daemon=True)
        self.monitor = monitor
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._catching = False
        self._terminated: float | None = None
        self._rounds_until_leaving = 0
        self._looked = time.monotonic()

    def catch_sigterm(self) -> None:
        """In the main thread only; leaves a handler of the program's own alone."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._catching = True
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._listen()
            os.register_at_fork(before=self._be_deaf, after_in_parent=self._listen, after_in_child=self._forget)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Runs when the main thread comes back to Python; the wake-up descriptor does not wait for that."""
        os.write(self._writer, bytes([number]))

    def _listen(self) -> None:
        if self._catching and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def _be_deaf(self) -> None:
        """During a fork, so that a signal to the child is not read as one to this process."""
        if self._catching and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    def _forget(self) -> None:
        """Let SIGTERM end the process again: a forked child (of a data loader) must die of it."""
        if self._catching:
            self._be_deaf()
            self._catching = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def stop(self) -> None:
        """Ends the thread; called by the main thread."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")
        self.join(5.0)
        self._forget()

    def run(self) -> None:
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
        now = time.monotonic()
        if now - self._looked > self.monitor.limits.heartbeat / 2 and self.monitor.round_began is not None:
            self.monitor.round_began = now  # this process itself stood still, in the middle of a round
        self._looked = now
        blocked = self.monitor.blocked
        if blocked > self.monitor.limits.heartbeat and not self.monitor.finishing and not self.monitor.ending:
            self.monitor.end(self.monitor.store_is_silent(f"no answer for {blocked:.0f} s"))

    def _terminate(self, seconds: float) -> None:
        """SIGTERM: either a rank failed and a launcher cleans up, or the run is to end."""
        self.monitor.wake.set()
        heard = self.monitor.rounds >= self._rounds_until_leaving or self.monitor.blocked > self.monitor.limits.interval
        if seconds < self.monitor.limits.grace or not heard or self.monitor.ending:
            return
        blocked = self.monitor.blocked
        if blocked > self.monitor.limits.interval and not self.monitor.finishing:
            self.monitor.end(self.monitor.store_is_silent(f"no answer for {blocked:.0f} s; terminated by the launcher"))
        os._exit(128 + signal.SIGTERM)
