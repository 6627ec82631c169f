"""Common parts of the torture programs: ranks forked from a process that has imported all modules, a tiny run, the
comparison with an uninterrupted run, workers that divide numbered cases, and the summary.

A case draws everything from ``random.Random(f"{seed}/{number}")``, so that ``--seed S --only N`` repeats it.
"""

import argparse
import contextlib
import ctypes
import fcntl
import gc
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TRACKER = "latest_checkpointed_iteration.txt"
PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36  # of prctl
FIRST_PORT = 20000  # below the system's own choices, which start at 32768
PORTS_PER_WORKER = 1000
LISTED, LISTED_FAILURES = 400, 20  # characters of a failure's begin and end; failures in the summary

MODEL_FLAGS = [
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16",
    "--max-position-embeddings", "16", "--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-2",
    "--lr-warmup-iters", "2", "--adam-eps", "1e-5", "--make-vocab-size-divisible-by", "8", "--split", "8,1,1",
    "--eval-iters", "1", "--num-workers", "0", "--log-interval", "1", "--distributed-backend", "gloo",
    "--watchdog-timeout-seconds", "10",
]  # fmt: skip
"""eps: smaller ones blow the rounding noise of a zero gradient up, and layouts differ in that noise."""

KIND = {"choices": ("gpt", "bert", "t5"), "default": "gpt", "help": "whose program runs (default %(default)s)"}
"""The option ``--kind``."""


def import_everything():
    """Import a run's modules once for all ranks that are forked later; hide GPUs from them."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    import torch

    for name in ("torch._dynamo", "torch.distributed.run", f"megatron.training.tasks.{Cases.kind}",
                 f"pretrain_{Cases.kind}", "megatron.training.run"):  # fmt: skip
        importlib.import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def prctl(option, value):
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ---- ranks


def free_port(counter=itertools.count()):  # noqa: B008 (one counter per worker is the purpose)
    """Return a port that no other case of this program gets."""
    while True:
        port = FIRST_PORT + PORTS_PER_WORKER * Cases.worker + next(counter) % PORTS_PER_WORKER
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def fork(action, output):
    """A child that writes to the file ``output`` and leaves with ``action()``'s exit code; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
        code = action()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def program(argv, fp64=False):
    """Run ``pretrain_gpt.py``, or the program of ``--kind``, with ``argv``; ``fp64``: with every number in float64."""

    from megatron.training.arguments import parse_args
    from megatron.training.run import run
    from megatron.training.tasks.language_model import task_class

    sys.argv = [f"pretrain_{Cases.kind}.py", *argv]
    if not fp64:
        return importlib.import_module(f"pretrain_{Cases.kind}").main()
    cfg = parse_args(argv, model_family=Cases.kind)
    return run(cfg.with_settings(fp64=True), task_class(Cases.kind))


class Ranks:
    """The processes of one run, started as a cluster's scheduler does: with an environment and nothing else."""

    def __init__(self, argv, world_size, folder, *, fp64=False, before=None):
        """``before(rank)`` runs in each rank, before anything else."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.codes, self.began = folder, {}, time.monotonic()
        port = free_port()

        def start(rank):
            os.setpgid(0, 0)  # a signal to one run must not reach another
            if world_size > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
                os.environ.update({name: str(value) for name, value in place.items()})
            if before is not None:
                before(rank)
            return program(argv, fp64)

        self.pids = {rank: fork(lambda rank=rank: start(rank), folder / f"rank{rank}") for rank in range(world_size)}

    def logs(self):
        """The file of each rank."""
        return sorted(self.folder.glob("rank*"))

    def poll(self):
        """Whether all have ended."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                finished, status = os.waitpid(pid, os.WNOHANG)
                if finished:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def wait(self, limit):
        """Whether all end within ``limit`` seconds; those that do not are killed."""
        return wait_until(self.poll, limit) or self.end()

    def end(self):
        """Kills what still runs. Returns False."""
        while not self.poll():
            for rank in self.pids.keys() - self.codes.keys():
                os.kill(self.pids[rank], signal.SIGKILL)
            time.sleep(0.01)
        return False

    def send(self, number, ranks):
        """Send a signal to each of ``ranks`` that still runs."""
        self.poll()
        for rank in set(ranks) - self.codes.keys():
            os.kill(self.pids[rank], number)

    def output(self):
        """Return the output of all ranks."""
        return "".join(path.read_text(errors="replace") for path in self.logs())


def wait_until(condition, limit, pause=0.01):
    """Whether ``condition()`` came true within ``limit`` seconds."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def train(argv, world_size, folder, *, fp64=False, before=None, limit=120):
    """A run to its end: ``(exit code, what it wrote)``; exit code None for one that did not end."""
    ranks = Ranks(argv, world_size, folder, fp64=fp64, before=before)
    ended = ranks.wait(limit)
    return (max(map(abs, ranks.codes.values())) if ended else None), ranks.output()


# ---- a tiny run and what it leaves


def write_dataset(prefix, vocab_size=63, num_documents=60, seed=0):
    """Documents that count upwards, of 20 to 60 tokens: something to learn."""
    import numpy as np

    from megatron.data.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(num_documents):
        length, start = generator.integers(20, 60), generator.integers(0, vocab_size)
        builder.add_document((start + np.arange(length)) % vocab_size, [length])
    builder.finalize(f"{prefix}.idx")


def write_data(folder):
    """Write the data of a run of ``--kind``: documents, or sentences and a vocabulary."""
    folder.mkdir(exist_ok=True)
    if Cases.kind == "gpt":
        return write_dataset(folder / "data")
    from tests.test_utils import masked_runs

    return masked_runs.write_corpora(folder)


def data_flags(folder):
    """Flags of :func:`write_data`'s files, and the length that only T5 has."""
    if Cases.kind == "gpt":
        return ["--data-path", str(folder / "data"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "63"]
    words = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]
    local = ["--decoder-seq-length", "8", "--vocab-extra-ids", "10"] if Cases.kind == "t5" else []
    return ["--data-path", str(folder / "a"), *words, *local]


def saved_iterations(save):
    return sorted(int(path.name[5:]) for path in save.glob("iter_*"))


def read_checkpoint(directory, with_rng=True):
    """Every tensor and counter of a checkpoint, each byte checked; ``CheckpointError`` for damage."""
    from megatron.core.dist_checkpointing import CheckpointReader

    reader = CheckpointReader(directory)
    reader.verify()
    counters = {name: reader.objects[name] for name in ("iteration", "train_state", "optimizer", "scheduler")}
    names = [name for name in reader.names if with_rng or not name.startswith("rng.")]
    return counters, {name: reader.read(name) for name in names}


def compare_checkpoints(directory, reference, tolerance=0.0):
    """Return the differences as text, empty if equal. Only bit-for-bit comparisons include random states."""
    import torch

    (native, tensors), (foreign, expected) = (read_checkpoint(path, not tolerance) for path in (directory, reference))
    if tensors.keys() != expected.keys():
        return f"{directory.name} holds other names: {sorted(tensors.keys() ^ expected.keys())[:5]}"
    counters = {name: value for name, value in foreign.items() if native[name] != value}
    if counters:
        return f"{directory.name}: {counters} became { {name: native[name] for name in counters} }"
    for name, tensor in tensors.items():
        same = torch.equal(tensor, expected[name])
        if not same and tolerance and tensor.is_floating_point():
            same = torch.allclose(tensor, expected[name], rtol=tolerance, atol=tolerance)
        if not same:
            largest = (tensor.double() - expected[name].double()).abs().max().item()
            return f"{directory.name}: {name} differs by up to {largest:.3g}"
    return ""


def compare_metrics(path, reference, tolerance=0.0):
    """Return the differences of ``metrics.jsonl`` as text, empty if equal."""
    native, foreign = ([json.loads(line) for line in file.read_text().splitlines()] for file in (path, reference))
    if len(native) != len(foreign):
        return f"{path.name} holds {len(native)} records instead of {len(foreign)}"
    for one, other in zip(native, foreign):
        near = one.keys() == other.keys() and all(
            one[name] == value or isinstance(value, float) and abs(one[name] - value) <= tolerance * abs(value)
            for name, value in other.items()
        )
        if not near:
            return f"{path.name}: {other} became {one}"
    return ""


def compare_runs(save, reference, iteration, tolerance=0.0, records=True):
    """Return the differences of two finished runs: of the last checkpoint and of every record."""
    last = f"iter_{iteration:07d}"
    different = compare_checkpoints(save / last, reference / last, tolerance)
    if different or not records:
        return different
    return compare_metrics(save / "metrics.jsonl", reference / "metrics.jsonl", tolerance)


@contextlib.contextmanager
def made_once(folder):
    """Whether ``folder`` is still to be made; one worker makes it while the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not folder.exists()


# ---- cases, workers, summary


class Failure(Exception):
    """A case went as it must not."""


@dataclass
class Tally:
    """The results of a case: counts by kind and outcome."""

    counts: Counter = field(default_factory=Counter)
    failures: list = field(default_factory=list)

    def add(self, kind, outcome):
        self.counts[f"{kind}\t{outcome}"] += 1

    def fail(self, reason):
        """Record a failure; the case continues."""
        self.failures.append(reason)


class Cases:
    """Numbered cases over worker processes; a summary of counts at the end."""

    worker = 0
    kind = "gpt"
    """The model family whose program runs."""

    def __init__(self, description, count, workers=2, **more):
        parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
        parser.add_argument("--count", type=int, default=count, help="what is counted (default %(default)s)")
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--only", type=int, metavar="N", help="repeat the case N of this seed")
        parser.add_argument("--workers", type=int, default=workers)
        parser.add_argument("--minutes", type=float, default=600.0, help="start no case after this time")
        parser.add_argument("--folder", help="where evidence of failures is kept (default: a new one)")
        for name, options in more.items():
            parser.add_argument(f"--{name}", **options)
        self.options = parser.parse_args()
        Cases.kind = vars(self.options).get("kind", "gpt")
        self.folder = Path(self.options.folder or tempfile.mkdtemp(prefix="torture-")).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results = self.folder / "results.jsonl"

    def run(self, case, numbers=None, finish=None):
        """``case(number, random, folder, tally)`` for every number until --count is reached; the exit code.

        ``case`` raises :class:`Failure`; its folder is then kept. ``finish()`` ends each worker.
        """
        numbers = range(10**9) if numbers is None else numbers
        numbers = [self.options.only] if self.options.only is not None else numbers
        self.results.write_text("")
        began = time.monotonic()
        pids = []
        for worker in range(min(self.options.workers, len(numbers))):
            pid = os.fork()
            if pid == 0:
                self._work(worker, case, numbers, finish, began)
            pids.append(pid)
        with contextlib.suppress(KeyboardInterrupt):
            while pids:
                time.sleep(0.2)
                pids = [pid for pid in pids if not os.waitpid(pid, os.WNOHANG)[0]]
        return self._summarize(time.monotonic() - began)

    def run_on_data(self, case):
        """:meth:`run`, with everything imported and a data set in the folder ``data``."""
        import_everything()
        write_data(self.folder / "data")
        return self.run(case)

    def _work(self, worker, case, numbers, finish, began):
        """Every n-th case, for n workers; never returns."""
        Cases.worker = worker
        prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
        prctl(CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in itertools.islice(numbers, worker, None, self.options.workers):
            late = time.monotonic() - began > 60 * self.options.minutes
            if late or sum(self.counts().values()) >= self.options.count:
                break
            folder = self.folder / f"case-{number}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            tally = Tally()
            try:
                case(number, random.Random(f"{self.options.seed}/{number}"), folder, tally)
            except Failure as error:
                tally.fail(str(error))
            except Exception:
                tally.fail(f"the torture itself failed:\n{traceback.format_exc()}")
            if tally.failures:
                (folder / "failures.txt").write_text("\n\n".join(tally.failures))
            else:
                shutil.rmtree(folder, ignore_errors=True)
            record = {"number": number, "counts": tally.counts, "failures": tally.failures}
            with open(self.results, "a") as results:
                results.write(json.dumps(record) + "\n")
        if finish is not None:
            finish()
        os._exit(0)

    def _records(self):
        return [json.loads(line) for line in self.results.read_text().splitlines()]

    def counts(self):
        """All counts so far, by kind and outcome."""
        total = Counter()
        for record in self._records():
            total.update(record["counts"])
        return total

    def _summarize(self, seconds):
        """Counts and failures; the exit code."""
        counts, records = self.counts(), self._records()
        for name, number in sorted(counts.items()):
            print(f"{number:7d}  " + name.replace("\t", ": "))
        print(f"{sum(counts.values()):7d}  in {len(records)} cases, {seconds / 60:.1f} min, seed {self.options.seed}")
        failures = [(record["number"], reason) for record in records for reason in record["failures"]]
        for number, reason in failures[:LISTED_FAILURES]:
            text = reason.strip()
            text = text if len(text) < 2 * LISTED else f"{text[:LISTED]}\n[…]\n{text[-LISTED:]}"
            print(f"FAILED (--seed {self.options.seed} --only {number}): {text}")
        print(f"{len(failures)} failures" + (f"; evidence in {self.folder}/case-*" if failures else ""))
        if not failures and not self.options.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        return 1 if failures or not counts else 0
