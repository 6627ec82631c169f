"""Side streams that work as late as their events allow: what a GPU may do, seen on a CPU."""

from megatron.core.host_memory import SideStream


class _Work:
    """Queued work; the event of its completion."""

    def __init__(self, work, after):
        self.work, self.after = work, after

    def run(self):
        for earlier in self.after:
            if earlier is not None:
                earlier.run()
        work, self.work, self.after = self.work, None, []
        if work is not None:
            work()


class LazyStream(SideStream):
    """In place of :class:`SideStream` on a CPU. Work runs when a stream or the host waits for it, or for later work of
    the same stream."""

    def __init__(self, device, **options):
        super().__init__(device, **options)
        self.last = None

    def run(self, work, after=()):
        self.last = _Work(work, [self.last, *after])
        return self.last

    def copy(self, pairs, after=()):
        return super().copy(list(pairs), after)  # of now: tensors may be replaced until the copy runs

    def wait(self, event):
        if event is not None:
            event.run()

    def synchronize(self):
        self.wait(self.last)
