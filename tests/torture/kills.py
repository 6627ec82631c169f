"""Signals to ranks and launchers at random moments, and resumption until the run is finished, as if nothing had been.

A case is one training run of a tiny GPT (``--kind``: BERT, T5). It is started again and again; each start gets a
SIGKILL, SIGTERM or SIGINT, to one rank, to all, or to torchrun, at a moment drawn from: the start, training, a save, an
evaluation. After each signal: no process is left, every checkpoint of the folder reads to the last byte, the newest
equals an uninterrupted run's, the tracker never decreases, and the next start loads the checkpoint it names. At
the end the whole ``metrics.jsonl`` and the last checkpoint equal the uninterrupted run's: bit for bit where the layout
stayed, to 1e-9 in float64 where it changed. Counts signals, by signal, target and moment, and how the processes ended.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.torture import common
from tests.torture.common import Cases, Failure, Ranks

ITERATIONS = 16
LIMIT = 60.0
"""Seconds within which every process of a run must be gone after a signal."""
TOLERANCE = 1e-9
MOST_STARTS = 200
SHARE_OF_LAUNCHERS, SHARE_OF_INTERPRETERS = 0.12, 0.03

ZERO = "--use-distributed-optimizer"
GATHER = f"{ZERO} --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "one": ("", 1),
    "dp2": ("", 2),
    "tp2-sp": ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "pp2": ("--pipeline-model-parallel-size 2", 2),
    "cp2": ("--context-parallel-size 2", 2),
    "zero2": (GATHER, 2),
    "offload": (f"{GATHER} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d", 2),
    "fsdp2": ("--use-torch-fsdp2", 2),
    "tp2-dp2": ("--tensor-model-parallel-size 2", 4),
    "tp2-pp2": ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
    "cp2-zero2": (f"--context-parallel-size 2 {ZERO}", 4),
    "fsdp2-tp2": ("--use-torch-fsdp2 --tensor-model-parallel-size 2", 4),
}
WEIGHTS = [{1: 10.0, 2: 2.0, 4: 0.7}[world] for _, world in LAYOUTS.values()]
MOMENTS = {"start": 3, "training": 3, "save": 4, "evaluation": 2}
SIGNALS = {signal.SIGKILL: 6, signal.SIGTERM: 2, signal.SIGINT: 2}


@dataclass(frozen=True)
class History:
    """One training run."""

    layout: str | None
    """None: another one at each start, in float64."""
    precision: str
    retain: bool
    behind: bool = False
    """Whether checkpoints are written in the background."""

    @property
    def name(self):
        return f"{self.layout or 'changing'}-{self.precision}{'-retain' * self.retain}{'-async' * self.behind}"

    def argv(self, layout, data, cache, save, save_interval=2):
        flags, _ = LAYOUTS[layout]
        precision = {"bf16": ["--bf16"], "fp32": [], "fp64": []}[self.precision]
        retain = ["--save-retain-interval", "8"] if self.retain else []
        return [
            *common.MODEL_FLAGS, *common.data_flags(data), "--data-cache-path", str(cache), "--save", str(save),
            "--load", str(save), "--train-iters", str(ITERATIONS), "--save-interval", str(save_interval),
            "--eval-interval", "5", *precision, *retain, *flags.split(), *["--async-save"] * self.behind,
        ]  # fmt: skip


def draw(random, weights):
    return random.choices(list(weights), list(weights.values()))[0]


def draw_layout(random):
    return random.choices(list(LAYOUTS), WEIGHTS)[0]


def reference_of(history, work, data):
    """The folder of the uninterrupted run, which keeps every checkpoint."""
    layout = history.layout or "one"
    plain = History(history.layout, history.precision, retain=False)
    folder = work / f"reference-{plain.name}"
    with common.made_once(folder) as missing:
        if missing:
            making = folder.with_name(f"{folder.name}.making")
            argv = plain.argv(layout, data, folder.with_name("reference-cache"), making / "save", 1)
            code, output = common.train(argv, LAYOUTS[layout][1], making, fp64=history.precision == "fp64")
            if code:
                raise Failure(f"the uninterrupted run {plain.name} ended with {code}:\n{output[-3000:]}")
            making.rename(folder)
    return folder / "save"


# ---- one start


class Launched:
    """A run of torchrun, real or forked from this process; looks like :class:`Ranks`."""

    def __init__(self, argv, world_size, folder, *, interpreter):
        folder.mkdir(parents=True)
        self.folder, self.code = folder, None
        local = ["--nnodes", "1", "--nproc-per-node", str(world_size), "--redirects", "3", "--log-dir",
               str(folder / "logs"), "--rdzv-backend", "c10d", "--rdzv-endpoint",
               f"127.0.0.1:{common.free_port()}"]  # fmt: skip
        rest = [str(common.ROOT / f"pretrain_{Cases.kind}.py"), *argv]

        def launch():
            os.setpgid(0, 0)
            if interpreter:
                os.environ["PYTHONPATH"] = str(common.ROOT)
                command = [sys.executable, "-m", "torch.distributed.run", *local, *rest]
                os.execv(sys.executable, command)
            from torch.distributed.run import main

            sys.argv = ["torchrun"]
            return main([*local, "--start-method", "fork", "--run-path", *rest])

        self.pid = common.fork(launch, folder / "rank-launcher")

    def logs(self):
        return sorted(self.folder.glob("logs/*/*/*/stdout.log"))

    @property
    def codes(self):
        return {"launcher": self.code}

    def ranks(self):
        """Process ids of the ranks that run."""
        listed = subprocess.run(["pgrep", "-P", str(self.pid)], capture_output=True, text=True, check=False).stdout
        return [int(pid) for pid in listed.split()]

    def poll(self):
        """Whether the launcher and all ranks have ended; the ranks of a dead launcher become our children."""
        try:
            while True:
                finished, status = os.waitpid(-1, os.WNOHANG)
                if not finished:
                    return False
                if finished == self.pid:
                    self.code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return True

    def wait(self, limit):
        return common.wait_until(self.poll, limit) or self.end()

    def end(self):
        while not self.poll():
            for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        return False

    def output(self):
        files = [self.folder / "rank-launcher", *sorted(self.folder.glob("logs/**/*.log"))]
        return "".join(path.read_text(errors="replace") for path in files)


def await_moment(moment, run, random, slow):
    """Waits for the moment; False if the run ended before."""
    if moment == "start":
        return not common.wait_until(run.poll, slow * random.uniform(0.0, 0.6))
    pattern, times, delay = {
        "training": (rb" iteration +\d+/", random.randint(1, 6), 0.03),
        "save": (rb"saving checkpoint at", random.randint(1, 2), 0.025),
        "evaluation": (rb" iteration +(5|10|15)/", 1, 0.02),
    }[moment]
    pattern, size = re.compile(pattern), [0]

    def reached():
        if run.poll():
            return True
        logs = run.logs()
        registered, size[0] = size[0], sum(log.stat().st_size for log in logs)
        return size[0] > registered and sum(len(pattern.findall(log.read_bytes())) for log in logs) >= times

    common.wait_until(reached, LIMIT * slow, 0.004)
    if run.poll():
        return False
    return not common.wait_until(run.poll, random.uniform(0.0, slow * delay), 0.002)


def hit(run, world_size, random, number):
    """Sends the signal; to whom."""
    if isinstance(run, Launched):
        victims = run.ranks()
        target = draw(random, {"torchrun": 2, "a rank of torchrun": 1}) if victims else "torchrun"
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid if target == "torchrun" else random.choice(victims), number)
        return target
    target = draw(random, {"one rank": 5, "all ranks": 4}) if world_size > 1 else "the only rank"
    run.send(number, range(world_size) if target != "one rank" else [random.randrange(world_size)])
    return target


# ---- what must hold afterwards


class Folder:
    """Facts about a run's --save folder between its starts."""

    def __init__(self, save, reference, tolerance):
        self.save, self.reference, self.tolerance = save, reference, tolerance
        self.compared = {}
        self.latest = 0

    def check(self):
        """Every checkpoint is whole and equals the uninterrupted run's, the tracker never goes back."""
        from megatron.core.dist_checkpointing.errors import CheckpointError

        for directory in sorted(self.save.glob("iter_*")):
            stamp = (directory / "metadata.json").stat().st_mtime_ns if (directory / "metadata.json").exists() else 0
            if self.compared.get(directory.name) == stamp != 0:
                continue
            expected = self.reference / directory.name
            try:
                different = (common.compare_checkpoints(directory, expected, self.tolerance) if expected.exists()
                             else common.read_checkpoint(directory) and "")  # fmt: skip
            except CheckpointError as error:
                raise Failure(f"corrupt checkpoint: {error}") from None
            if different:
                raise Failure(f"silent difference: {different}")
            self.compared[directory.name] = stamp
        tracker = self.save / common.TRACKER
        if tracker.exists():
            named = int(tracker.read_text())
            if named < self.latest:
                raise Failure(f"the tracker went back from {self.latest} to {named}")
            if named not in common.saved_iterations(self.save):
                raise Failure(f"the tracker names {named}, there are {common.saved_iterations(self.save)}")
            self.latest = named

    def check_start(self, output, before):
        """The start took what the tracker named; ``before``: that, and what was there."""
        named, saved = before
        result = re.search(r"loading checkpoint from .* at iteration (\d+)", output)
        if result and int(result[1]) != (named or max(saved)):
            raise Failure(f"started from {result[1]}, the tracker named {named}, there were {saved}")
        first = re.search(r" iteration +(\d+)/", output)
        if first and not result and (saved or int(first[1]) != 1):
            raise Failure(f"started from scratch, there were {saved}")


class Case:
    """One run, from its first start to its end."""

    def __init__(self, random, folder, tally):
        changing = random.random() < 0.5
        self.random, self.folder, self.tally = random, folder, tally
        self.history = History(
            layout=None if changing else draw_layout(random),
            precision="fp64" if changing else random.choice(["fp32", "bf16"]), retain=random.random() < 0.25,
            behind=random.random() < 0.5,
        )  # fmt: skip
        self.save, self.data = folder / "save", folder.parent / "data"
        self.reference = reference_of(self.history, folder.parent, self.data)
        self.known = Folder(self.save, self.reference, TOLERANCE if changing else 0.0)

    def launch(self, number):
        """``(run, layout, how slow it starts)``; some by torchrun."""
        random, fp64 = self.random, self.history.precision == "fp64"
        layout = self.history.layout or draw_layout(random)
        argv = self.history.argv(layout, self.data, self.folder / "cache", self.save)
        world_size, folder = LAYOUTS[layout][1], self.folder / f"start{number}"
        launcher = 1.0 if fp64 or world_size == 1 else random.random()
        if launcher < SHARE_OF_INTERPRETERS:
            return Launched(argv, world_size, folder, interpreter=True), layout, 12.0
        if launcher < SHARE_OF_LAUNCHERS:
            return Launched(argv, world_size, folder, interpreter=False), layout, 3.0
        return Ranks(argv, world_size, folder, fp64=fp64), layout, 1.0 if world_size == 1 else 3.0

    def start(self, number):
        """One start and one signal; whether the run is finished."""
        random, known = self.random, self.known
        if number and random.random() < 0.15:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
        before = known.latest, common.saved_iterations(self.save)
        run, layout, slow = self.launch(number)
        moment, sent, target = draw(random, MOMENTS), draw(random, SIGNALS), None
        try:
            if await_moment(moment, run, random, slow):
                target = hit(run, LAYOUTS[layout][1], random, sent)
            what = f"start {number} ({layout}), " + (f"{sent.name} to {target} at {moment}" if target else "no signal")
            if not run.wait(LIMIT):
                raise Failure(f"{what}: not gone after {LIMIT:g} s:\n{run.output()[-3000:]}")
        finally:
            run.end()
        output, codes = run.output(), sorted(set(run.codes.values()), key=str)
        known.check_start(output, before)
        known.check()
        finished = not any(codes) and known.latest == ITERATIONS and "evaluation is not complete" not in output
        if finished and "Traceback" in output or not finished and not target:
            raise Failure(f"{what}: ended with {codes}:\n{output[-3000:]}")
        if target:
            if not any(codes) and known.latest <= before[0] and not re.search(f"receiv(ed|ing) {sent.name}", output):
                raise Failure(f"{what}: left with 0 and saved nothing:\n{output[-3000:]}")
            outcome = "finished all the same" if finished else "ended" if any(codes) else "saved and left with 0"
            if sent != signal.SIGKILL and "Traceback" in output:
                outcome += ", with a traceback"
            self.tally.add(f"{sent.name} to {target} at {moment}", outcome)
        return finished

    def run(self):
        for number in range(MOST_STARTS):
            if self.start(number):
                break
        else:
            raise Failure(f"not finished after {MOST_STARTS} starts")
        different = common.compare_runs(self.save, self.reference, ITERATIONS, self.known.tolerance)
        if different:
            raise Failure(f"silent difference after {number} signals: {different}")


def case(number, random, folder, tally):
    Case(random, folder, tally).run()


def main():
    return Cases(__doc__, count=1000, kind=common.KIND).run_on_data(case)


if __name__ == "__main__":
    sys.exit(main())
