"""Mutation testing: do the tests notice when a line of the library is wrong?

    python tests/mutate.py --sample 100                     # a hundred changes of numerical code
    python tests/mutate.py --only megatron/core/optimizer   # every change below a path
    python tests/mutate.py --again report.json --tests 0 --rows 0   # survivors of a report, against every test

Changes one line at a time (``tests/test_utils/mutants.py``), runs the tests that execute it, quickest first, until one
fails, and lists the changes that no test noticed. Those that change nothing, for a reason that
``tests/mutants_explained.tsv`` states, are listed apart; any other survivor makes the exit code 1. Your files are not
touched: the program works in temporary copies, which include uncommitted changes.

Which test executes which line is measured once, in about the time of two runs of the suite, and kept in
``--coverage``; later only new and changed tests are measured. Of the tests that execute a line, the ``--tests``
quickest and ``--rows`` rows of the layout table run. A test that hangs has noticed: three times the expected time and
half a minute are the limit. So has a test that needs more memory than ``--memory``.

Why no library: mutmut sees calls in pytest's own process only, where most of our code runs in the ranks of a pool, and
does not change Triton kernels, properties or constants. cosmic-ray starts Python and the whole suite per change.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import py_compile
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from test_utils.line_coverage import Coverage
from test_utils.mutants import Mutant, mutants_of
from test_utils.tree_copies import copy_tree, end, fork, run_pytest

NUMERICAL = [
    *(f"megatron/core/{name}" for name in (
        "tensor_parallel", "attention", "pipeline_parallel", "distributed", "optimizer", "transformer", "models",
        "description", "fusions", "dist_checkpointing", "random", "sharding", "schedules", "groups/process_groups.py",
        "datasets/blended_dataset.py", "datasets/blended_megatron_dataset_builder.py", "datasets/gpt_dataset.py",
        "datasets/megatron_dataset.py", "datasets/utils.py", "datasets/masked_dataset.py", "datasets/bert_dataset.py",
        "datasets/t5_dataset.py",
    )),
    *(f"megatron/data/{name}.py" for name in ("sentence_map", "word_masking")),
    *(f"megatron/training/{name}.py" for name in (
        "trainer", "step", "evaluate", "train_state", "observe/loss_sums", "checks/finite", "data/loader",
        "data/datasets", "data/batch", "config/resolve",
    )),
    "megatron/training/tasks",
]  # fmt: skip
EXPLAINED = "tests/mutants_explained.tsv"
ROWS = "test_layouts.py::"


# -- the campaign -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """The result of a mutant."""

    mutant: Mutant
    status: str
    """caught, timeout, survived, explained."""
    test: str = ""
    """The first test that failed."""
    seconds: float = 0.0
    num_tests: int = 0
    reason: str = ""


class Watcher:
    """A pytest plugin that leaves the name of the first test that fails."""

    def __init__(self, path):
        self.path = path

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed and not self.path.exists():
            self.path.write_text(f"import of {report.nodeid}")


class Campaign:
    """Tries mutants, one in each copy of the tree at a time."""

    def __init__(self, trees, coverage, num_tests, num_rows, memory):
        self.trees, self.coverage = trees, coverage
        self.num_tests, self.num_rows, self.memory = num_tests, num_rows, memory
        self.unreliable = set()

    def selected(self, mutant):
        """Choose among the tests that execute the line: first those of the module's own test file, then one of each
        function before a second one with other parameters; rows from all parts of the layout table. Quickest
        first."""
        local, turns, order = f"test_{Path(mutant.path).stem}", Counter(), {}
        registered = [item for item in self.coverage.tests_of(mutant) if item["test"] not in self.unreliable]
        for item in registered:
            function = item["test"].split("[")[0]
            order[item["test"]] = (local not in function, turns[function], item["seconds"])
            turns[function] += 1
        rows = [item for item in registered if ROWS in item["test"]]
        tests = sorted((item for item in registered if ROWS not in item["test"]), key=lambda item: order[item["test"]])
        if self.num_rows and len(rows) > self.num_rows:
            rows = sorted(rows, key=lambda row: hashlib.sha256(row["test"].encode()).digest())[: self.num_rows]
        return sorted(tests[: self.num_tests or None], key=lambda item: item["seconds"]) + rows

    def run(self, mutants, report=lambda result: None):
        """All results; ``report`` hears of each when it is known."""
        waiting, free, running, results = list(mutants)[::-1], list(self.trees), {}, []
        try:
            while waiting or running:
                while waiting and free:
                    mutant, tree = waiting.pop(), free.pop()
                    tests = self.selected(mutant)
                    pid, folder = self._start(mutant, tree, tests)
                    crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # others want the machine, too
                    limit = crowd * (3 * sum(test["seconds"] for test in tests) + 30)
                    running[pid] = (mutant, tree, folder, tests, time.monotonic(), limit)
                time.sleep(0.02)
                for pid, (mutant, tree, folder, tests, started, limit) in list(running.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    seconds = time.monotonic() - started
                    if not ended and seconds < limit:
                        continue
                    end(pid)
                    if not ended:
                        os.waitpid(pid, 0)
                    results.append(self._result(mutant, folder, ended, status, seconds, len(tests)))
                    report(results[-1])
                    self._restore(mutant, tree, folder)
                    del running[pid]
                    free.append(tree)
        finally:
            for pid in running:
                end(pid)
        return results

    def _start(self, mutant, tree, tests):
        folder = Path(tempfile.mkdtemp(dir=tree.parent))
        file = tree / mutant.path
        shutil.copy2(file, folder / "original")
        file.write_text(mutant.apply(file.read_text()))
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        names = [test["test"] for test in tests]
        return fork(tree, folder, lambda: run_pytest(["-x", *names], Watcher(folder / "failed")), self.memory), folder

    def _restore(self, mutant, tree, folder):
        shutil.copy2(folder / "original", tree / mutant.path)
        py_compile.compile(str(tree / mutant.path))
        shutil.rmtree(folder, ignore_errors=True)

    def _result(self, mutant, folder, ended, status, seconds, num_tests):
        test = (folder / "failed").read_text() if (folder / "failed").exists() else ""
        outcome = "timeout" if not ended else "survived" if status == 0 else "caught"
        if outcome == "caught" and not test:
            test = (folder / "log").read_text()[-300:]
        return Result(mutant, outcome, test, seconds, num_tests)

    def failing_without_a_change(self, results):
        """Find the tests that noticed something and fail on the unchanged tree under the same conditions."""
        names = sorted({result.test for result in results if result.status == "caught"} & set(self.coverage.records))
        folder = Path(tempfile.mkdtemp(dir=self.trees[0].parent))

        class Failures:
            def pytest_runtest_logreport(self, report):
                if report.failed:
                    with open(folder / "failures", "a") as stream:
                        stream.write(report.nodeid + "\n")

        pid = fork(self.trees[0], folder, lambda: run_pytest(names, Failures()), self.memory)
        try:
            os.waitpid(pid, 0)
        finally:
            end(pid)
        return set((folder / "failures").read_text().split("\n")) - {""} if (folder / "failures").exists() else set()


# -- what the user sees -----------------------------------------------------------------------------------------------


def chosen(args, tree, coverage):
    """The mutants to try, one for each of ``--sample`` random lines or all, and the lines that no test executes."""
    tops = [tree / path for path in args.only or NUMERICAL]
    files = sorted({file for top in tops for file in ([top] if top.is_file() else top.rglob("*.py"))})
    texts = {str(file.relative_to(tree)): file.read_text() for file in files}
    by_line, unexecuted = defaultdict(list), defaultdict(set)
    for path, text in texts.items():
        for mutant in mutants_of(path, text):
            if coverage.executes(mutant):
                by_line[path, mutant.line].append(mutant)
            else:
                unexecuted[path].add(mutant.line)
    chance = random.Random(args.seed)
    if args.again:
        rows = json.loads(args.again.read_text())["mutants"]
        expected = {tuple(row["key"]) for row in rows if row["status"] == "survived"}
        result = [[row] for mutants in by_line.values() for row in mutants if row.key in expected]
    elif args.sample:
        lines = chance.sample(sorted(by_line), min(args.sample, len(by_line)))
        result = [chance.sample(by_line[line], len(by_line[line])) for line in lines]
    else:
        result = [[row] for mutants in by_line.values() for row in mutants]
    valid = (next((row for row in mutants if row.apply(texts[row.path])), None) for mutants in result)
    return [mutant for mutant in valid if mutant], unexecuted


def explanations(tree):
    """Key of an equivalent mutant -> why nothing changes."""
    lines = (tree / EXPLAINED).read_text().splitlines() if (tree / EXPLAINED).exists() else []
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return {(path, before, after): reason for path, before, after, reason in rows}


def say(result):
    mutant = result.mutant
    print(f"{result.status:9} {result.seconds:5.1f} s  {mutant.path}:{mutant.line} ({mutant.what})", flush=True)
    if result.status in ("survived", "explained"):
        print(f"    - {mutant.before.strip()}\n    + {mutant.after.strip()}")
        print(f"    {result.num_tests} tests ran. {result.reason}", flush=True)


def summary(results):
    """Counts per file and in all."""
    by_file = defaultdict(Counter)
    for result in results:
        for name in (result.mutant.path, "all"):
            by_file[name][result.status] += 1
    width = max(map(len, by_file), default=0)
    print(f"\n{'file':{width}} mutants caught timeout explained survived")
    for path, counts in sorted(by_file.items(), key=lambda item: (item[0] == "all", item[0])):
        cells = [sum(counts.values()), *(counts[name] for name in ("caught", "timeout", "explained", "survived"))]
        print(f"{path:{width}} {cells[0]:7} {cells[1]:6} {cells[2]:7} {cells[3]:9} {cells[4]:8}")


def save(path, results, unexecuted):
    rows = [{**item.mutant._asdict(), **{k: v for k, v in vars(item).items() if k != "mutant"}, "key": item.mutant.key}
            for item in results]  # fmt: skip
    lines = {path: sorted(numbers) for path, numbers in unexecuted.items()}
    path.write_text(json.dumps({"mutants": rows, "unexecuted": lines}, indent=1))


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sample", type=int, metavar="N", help="one change of each of N random lines (default: all)")
    add("--seed", type=int, default=0, help="of the random lines (default: 0)")
    add("--only", nargs="+", metavar="PATH", help="files or folders to change (default: numerical code)")
    add("--again", type=Path, metavar="REPORT", help="the survivors of a report")
    add("--suite", nargs="+", default=["tests"], metavar="PATH", help="tests to use (default: tests)")
    add("--tests", type=int, default=40, metavar="N", help="tests per change at most, 0: all (default: 40)")
    add("--rows", type=int, default=8, metavar="N", help="rows of the layout table besides, 0: all (default: 8)")
    add("--jobs", type=int, default=2, metavar="N", help="changes tried at a time (default: 2)")
    add("--memory", type=float, default=6.0, metavar="GIB", help="limit of each process of a change (default: 6)")
    add("--report", type=Path, metavar="FILE", help="write every result as JSON")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron-mutate"
    add("--coverage", type=Path, default=cache, metavar="DIR", help=f"what tests execute (default: {cache})")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, which cleans up
    with tempfile.TemporaryDirectory(prefix="mutate") as folder:
        trees = [Path(folder, str(number), "tree") for number in range(args.jobs)]
        copy_tree(trees[0])
        for tree in trees[1:]:
            shutil.copytree(trees[0], tree)
        coverage = Coverage(args.coverage, trees[0], args.suite, args.jobs)
        for name in coverage.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        mutants, unexecuted = chosen(args, trees[0], coverage)
        print(f"{len(mutants)} changes; no test executes {sum(map(len, unexecuted.values()))} other lines", flush=True)
        reasons = explanations(trees[0])

        def known(result):
            result.reason = reasons.get(result.mutant.key, "")
            if result.status == "survived" and result.reason:
                result.status = "explained"
            say(result)

        campaign = Campaign(trees, coverage, args.tests, args.rows, int(args.memory * 2**30))
        results = campaign.run(mutants, known)
        campaign.unreliable = campaign.failing_without_a_change(results)
        if campaign.unreliable:
            print("Fail without a change, too; once more without them:", *sorted(campaign.unreliable), sep="\n  ")
            repeated = [item.mutant for item in results if item.test in campaign.unreliable]
            results = [item for item in results if item.test not in campaign.unreliable] + campaign.run(repeated, known)
    results.sort(key=lambda item: item.mutant)
    summary(results)
    if args.report:
        save(args.report, results, unexecuted)
    return 1 if any(item.status == "survived" for item in results) else 0


if __name__ == "__main__":
    sys.exit(main())
