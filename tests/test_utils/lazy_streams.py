"""Copy streams that copy as late as their events allow: what a GPU may do, seen on a CPU."""

from megatron.core.host_memory import CopyStream


class _Copy:
    """Queued copy; the event of its completion."""

    def __init__(self, pairs, after):
        self.pairs, self.after = pairs, after

    def run(self):
        for earlier in self.after:
            if earlier is not None:
                earlier.run()
        for target, source in self.pairs:
            target.copy_(source)
        self.pairs, self.after = [], []


class LazyStream(CopyStream):
    """In place of :class:`CopyStream` on a CPU. A copy runs when a stream or the host waits for it, or for a later copy
    of the same stream."""

    def __init__(self, device):
        super().__init__(device)
        self.last = None

    def copy(self, pairs, after=()):
        self.last = _Copy(list(pairs), [self.last, *after])
        return self.last

    def wait(self, event):
        if event is not None:
            event.run()

    def synchronize(self):
        self.wait(self.last)
