"""Disks, folders and processes that fail during a run, which then stops or continues, and is resumed without the fault.

A case is one training run of a tiny GPT and one fault at a random moment: a full disk, a limit on file sizes, a system
call that fails, a folder that turns read-only or vanishes, one rank or all ranks stopped (SIGSTOP). Under the fault the
run must end within a minute or two: complete, or with a message and an exit code that is not zero; never with a
traceback, or by a signal. Afterwards every checkpoint is whole, and the run resumed without the fault ends with the
metrics and weights of an uninterrupted one, to the last bit. Counts faults by kind and outcome.
"""

import builtins
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.torture import common
from tests.torture.common import Cases, Failure, Ranks
from tests.torture.kills import ITERATIONS, LAYOUTS, Folder, History, await_moment, draw, reference_of

LIMIT = 120.0
MEANT_TO_FAIL = ("fsync", "replace", "rename", "mkdir", "open", "write")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT)


class Fault:
    """One kind: what is done to the ranks at their start, and to the run at a moment; and how it is undone."""

    needs_disk = False
    keeps_records = True
    moments = {"training": 3, "save": 4, "evaluation": 1}
    ranks = (1, 2)

    def __init__(self, random, save, world_size):
        self.random, self.save, self.world_size = random, save, world_size
        self.hit = random.randrange(world_size)

    def before(self, rank):
        """In every rank, before its program."""

    def strike(self, run):
        """Cause the fault in the running program."""

    def undo(self):
        """After the run."""


class Disk(Fault):
    """A small separate file system for --save; root only."""

    needs_disk = True
    size = 4 << 20

    def mount(self, size):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.save], check=True)

    def remount(self, options):
        subprocess.run(["mount", "-o", f"remount,{options}", self.save], check=True)


class FullDisk(Disk):
    def __init__(self, *args):
        super().__init__(*args)
        self.size = self.random.randrange(40 << 10, 500 << 10)

    def undo(self):
        self.remount("size=8m")


class ReadOnlyFolder(Disk):
    def strike(self, run):
        result = subprocess.run(["mount", "-o", "remount,ro", self.save], capture_output=True, check=False)
        if result.returncode:  # a file is just being written: the system refuses
            subprocess.run(["mount", "--bind", "-o", "ro", self.save, self.save], check=False, capture_output=True)

    def undo(self):
        self.remount("rw")


class FileSizeLimit(Fault):
    def before(self, rank):
        limit = self.random.randrange(1 << 10, 80 << 10)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


class FailingCall(Fault):
    """A function of the system raises, once or from some call on, in the files of --save."""

    def before(self, rank):
        if rank != self.hit:
            return
        name, number = self.random.choice(MEANT_TO_FAIL), self.random.choice(ERRORS)
        first = self.random.randrange(60)
        last = first + self.random.choice([1, 1, 3, 10**9])
        module = builtins if name == "open" else os
        real, calls = getattr(module, name), [0]

        def failing(*args, **options):
            where = args[0] if args else ""
            watched = isinstance(where, int) or str(where).startswith(str(self.save))
            if not watched:
                return real(*args, **options)
            calls[0] += 1
            if first <= calls[0] - 1 < last:
                raise OSError(number, os.strerror(number), None if isinstance(where, int) else str(where))
            return real(*args, **options)

        setattr(module, name, failing)


class VanishedFolder(Fault):
    """With all its records: only what is computed can be as if nothing had been."""

    keeps_records = False

    def strike(self, run):
        removed = self.save.with_name("gone")
        self.save.rename(removed)
        shutil.rmtree(removed)


class VanishedCache(Fault):
    moments = {"start": 3, "training": 1}

    def strike(self, run):
        shutil.rmtree(self.save.parent / "cache", ignore_errors=True)


class StoppedRank(Fault):
    moments = {"start": 1, "training": 3, "save": 2, "evaluation": 1}
    ranks = (2,)
    killed_by_others = True

    def strike(self, run):
        run.send(signal.SIGSTOP, [self.hit])

    def await_the_others(self, run):
        """The other ranks must end; they may or may not kill the stopped one, which a scheduler would."""
        remaining = set(run.pids) - {self.hit}
        if not common.wait_until(lambda: run.poll() or remaining <= run.codes.keys(), LIMIT):
            raise Failure(f"StoppedRank: the others are not gone after {LIMIT:g} s:\n{run.output()[-4000:]}")
        self.killed_by_others = common.wait_until(run.poll, 5.0)
        run.end()


class StoppedForAWhile(Fault):
    """All ranks, as by Ctrl-Z and fg."""

    moments = {"start": 1, "training": 3, "save": 2, "evaluation": 1}

    def strike(self, run):
        run.send(signal.SIGSTOP, range(self.world_size))
        time.sleep(self.random.choice([0.3, 2.0, 14.0]))
        run.send(signal.SIGCONT, range(self.world_size))


KINDS = {
    FullDisk: 4, FileSizeLimit: 3, FailingCall: 6, ReadOnlyFolder: 2, VanishedFolder: 2, VanishedCache: 1,
    StoppedRank: 2, StoppedForAWhile: 2,
}  # fmt: skip


def judge(kind, run, output):
    """Return the outcome of the run under the fault."""
    codes = sorted(set(run.codes.values()))
    if "Traceback" in output and kind is not StoppedRank:
        raise Failure(f"{kind.__name__}: a traceback, exit codes {codes}:\n{output[-4000:]}")
    if not any(codes):
        return "finished"
    if kind is StoppedForAWhile:
        raise Failure(f"{kind.__name__}: ended with {codes}:\n{output[-4000:]}")
    if kind is StoppedRank:
        reported = "watchdog: rank" in output
    else:
        reported = any(line.startswith("error") or "failed" in line for line in output.splitlines())
    signalled = [code for code in codes if code < 0] if kind is not StoppedRank else []
    if not reported or signalled:
        raise Failure(f"{kind.__name__}: ended with {codes}, no message:\n{output[-4000:]}")
    return "ended with 75" if 75 in codes else "stopped with a message"


def case(number, random, folder, tally):
    """One fault."""
    work, save = folder.parent, folder / "save"
    root = os.geteuid() == 0
    kind = draw(random, {kind: weight for kind, weight in KINDS.items() if root or not kind.needs_disk})
    layout = draw(random, {name: 1 for name, (_, world) in LAYOUTS.items() if world in kind.ranks})
    history = History(layout, random.choice(["fp32", "bf16"]), retain=False, behind=random.random() < 0.5)
    reference = reference_of(history, work, work / "data")
    world_size = LAYOUTS[layout][1]
    argv = history.argv(layout, work / "data", folder / "cache", save)
    save.mkdir()
    fault = kind(random, save, world_size)
    if kind.needs_disk:
        fault.mount(fault.size)
    try:
        run = Ranks(argv, world_size, folder / "under-fault", before=fault.before)
        try:
            if await_moment(draw(random, kind.moments), run, random, 1.0 if world_size == 1 else 3.0):
                fault.strike(run)
            if kind is StoppedRank:
                fault.await_the_others(run)
            elif not run.wait(LIMIT):
                raise Failure(f"{kind.__name__} ({layout}): not gone after {LIMIT:g} s:\n{run.output()[-4000:]}")
        finally:
            run.end()
        fault.undo()
        outcome = judge(kind, run, run.output())
        if kind is StoppedRank and not fault.killed_by_others:
            outcome += f", rank {fault.hit} left standing"
        registered = Folder(save, reference, 0.0)
        registered.check()
        for _ in range(2):  # a complete run that could not save its end needs one start, too
            code, output = common.train(argv, world_size, folder / "resumed", limit=LIMIT)
        if code or "Traceback" in output:
            raise Failure(f"{kind.__name__} ({layout}): resumed, ended with {code}:\n{output[-4000:]}")
        registered.check()
        different = common.compare_runs(save, reference, ITERATIONS, records=fault.keeps_records)
        if different:
            raise Failure(f"{kind.__name__} ({layout}): silent difference: {different}")
        tally.add(kind.__name__, outcome)
    except Failure:
        tally.add(kind.__name__, "FAILED")
        raise
    finally:
        if kind.needs_disk:
            if sys.exc_info()[0] is not None:
                shutil.copytree(save, folder / "copy-of-save", ignore_dangling_symlinks=True)
            while subprocess.run(["umount", save], capture_output=True, check=False).returncode == 0:
                pass


def main():
    return Cases(__doc__, count=200).run_on_data(case)


if __name__ == "__main__":
    sys.exit(main())
