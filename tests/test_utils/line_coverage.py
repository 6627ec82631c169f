"""Tests that execute a line: records of ``line_trace``, stored in a folder and updated when the tree changes."""

import contextlib
import difflib
import hashlib
import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path

from test_utils.tree_copies import end, fork, run_pytest

LEFT_OUT = ("torture", "benchmarks", "test_watchdog", "test_docs_commands", "test_architecture",
            "test_packaging", "test_mutate")  # fmt: skip
"""Tests that are slow, or about the text of the tree."""
MEASURED = (0, 1, 5)
"""Exit codes of pytest if collection succeeded: all passed, some failed, no tests to run."""


class Coverage:
    """Records by test, and the lookup of tests that execute the lines that a mutant changes."""

    def __init__(self, folder, tree, suite, num_processes):
        self.folder, self.tree, self.suite = folder, tree, suite
        folder.mkdir(parents=True, exist_ok=True)
        self.records, self.modules = {}, []
        self._read()
        files = [path for top in ("megatron", "tools") for path in sorted(tree.glob(f"{top}/**/*.py"))]
        sources = {str(path.relative_to(tree)): path.read_text() for path in files}
        texts = [path.read_bytes() for path in sorted(tree.glob("tests/**/*.py"))]
        tests = hashlib.sha256(b"".join([*texts, *map(str.encode, suite)])).hexdigest()
        state = folder / "state.json"
        old = json.loads(state.read_text()) if state.exists() else {"sources": sources, "tests": ""}
        self._follow_lines(old["sources"], sources)
        self._drop_changed_tests()
        self._write()
        state.write_text(json.dumps({"sources": sources, "tests": ""}))
        if old["tests"] != tests:
            self._collect(num_processes)
            self._read()
            self._drop_changed_tests()
            self._write()
            state.write_text(json.dumps({"sources": sources, "tests": tests}))
        self.by_path, self.executed = defaultdict(list), defaultdict(int)
        for record in self.records.values():
            if record["passed"]:
                for path, mask in record["lines"].items():
                    self.by_path[path].append((int(mask, 16), record))
                    self.executed[path] |= int(mask, 16)

    def _read(self):
        for path in sorted(self.folder.glob("lines*.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last line of an interrupted run
                    record = json.loads(line)
                    if "test" in record:
                        self.records[record["test"]] = record
                    self.modules += [name for name in record.get("modules", ()) if name not in self.modules]
                    for removed in record.get("gone", ()):
                        self.records.pop(removed, None)

    def _write(self):
        new = self.folder / "new"
        new.write_text("\n".join(json.dumps(record) for record in [{"modules": self.modules}, *self.records.values()]))
        for path in self.folder.glob("lines*.jsonl"):
            path.unlink()
        new.rename(self.folder / "lines.jsonl")

    def _follow_lines(self, old, new):
        """Renumbers what was recorded for former versions of files; a new line counts as run like the one above it."""
        for path in [path for path, text in old.items() if text != new.get(path)]:
            place = new_lines(old[path].split("\n"), new.get(path, "").split("\n"))
            for record in self.records.values():
                if path in record["lines"]:
                    mask = int(record["lines"].pop(path), 16)
                    record["lines"][path] = f"{sum(1 << at for at, was in place.items() if mask >> was & 1):x}"

    def _drop_changed_tests(self):
        for test, record in list(self.records.items()):
            file = self.tree / test.split("::")[0]
            if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest()[:16] != record["file"]:
                del self.records[test]

    def _collect(self, num_processes):
        print(f"What tests execute is known of {len(self.records)}; measuring the others ...", flush=True)
        left_out = [f"--ignore-glob=*{name}*" for name in LEFT_OUT]
        pids = []
        for share in range(num_processes):
            local = Path(tempfile.mkdtemp(dir=self.tree.parent))
            output = self.folder / f"lines.{os.getpid()}.{share}.jsonl"

            def work(share=share, output=output):
                from tests.test_utils.line_trace import Collector

                plugin = Collector(self.tree, output, set(self.records), share, num_processes)
                return run_pytest([*left_out, *self.suite], plugin)

            pids.append((fork(self.tree, local, work), local / "log"))
        try:
            for pid, log in pids:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if status not in MEASURED:
                    raise SystemExit(f"pytest ended with {status}:\n{log.read_text()[-2000:]}")
        finally:
            for pid, _ in pids:
                end(pid)

    def executes(self, mutant):
        """The lines, as bits, whose execution shows that a test can see the mutant; 0 if no test executes them."""
        first, last = mutant.lines
        exactly, statement = 1 << mutant.line, (1 << last + 1) - (1 << first)
        executed = self.executed.get(mutant.path, 0)
        return exactly if exactly & executed and not mutant.on_import else statement & executed

    def tests_of(self, mutant):
        """Records of the tests that execute what the mutant changes, quickest first."""
        bits = self.executes(mutant)
        result = [record for mask, record in self.by_path[mutant.path] if mask & bits]
        return sorted(result, key=lambda record: record["seconds"])


def new_lines(old, new):
    """Line numbers (from 1) of a new text, each with the line of the old one that it is or follows."""
    place, last = {}, 1
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for at in range(j1, j2):
            last = i1 + at - j1 + 1 if tag == "equal" else min(i1 + 1, max(i2, 1)) if tag == "replace" else last
            place[at + 1] = last
    return place
