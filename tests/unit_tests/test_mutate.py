"""The mutation tester: lines that it changes or skips, moved lines, and one small campaign."""

import json
import os
import queue
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.test_utils.line_trace import LineTrace
from tests.test_utils.mutants import mutants_of
from tests.test_utils.tree_copies import fork

ROOT = Path(__file__).resolve().parents[2]
TOY = '''"""A module: 1 + 1."""
LIMIT = 3


def scaled(x: int | None, groups, weight=2.0) -> float:
    """x * 2"""
    if x is None or x < 0:
        raise ValueError(f"x is {x + 1}")
    if x > LIMIT and not groups.tp.is_last:
        x += 1
    logger.info("scaling by %d", 7)
    return reduce(x, group=groups.dp_cp) * weight


def __repr__(self):
    return 4 * 5
'''


def changes_of(source):
    return {(item.line, item.after.strip()) for item in mutants_of("toy.py", source)}


def test_a_change_replaces_one_thing_in_one_line():
    expected = {
        (2, "LIMIT = 4"),
        (5, "def scaled(x: int | None, groups, weight=4.0) -> float:"),
        (9, "if x >= LIMIT and not groups.tp.is_last:"),
        (9, "if x > LIMIT or not groups.tp.is_last:"),
        (9, "if x > LIMIT and groups.tp.is_last:"),
        (9, "if x > LIMIT and not groups.cp.is_last:"),
        (9, "if not (x > LIMIT and not groups.tp.is_last):"),
        (10, "x -= 1"),
        (10, "pass"),
        (12, "return x * weight"),
        (12, "return reduce(x) * weight"),
        (12, "return reduce(x, group=groups.dp) * weight"),
        (12, "return reduce(x, group=groups.dp_cp) / weight"),
        (12, "return reduce(x, group=groups.dp_cp)"),
    }
    assert expected <= changes_of(TOY)


def test_settings_without_effect_on_results_are_not_compared():
    assert {line for line, _ in changes_of(TOY)} == {2, 5, 9, 10, 12}


def test_every_change_is_of_one_line_and_applies():
    lines = TOY.split("\n")
    for item in mutants_of("toy.py", TOY):
        assert item.before == lines[item.line - 1] != item.after
        assert item.apply(TOY).split("\n") == [*lines[: item.line - 1], item.after, *lines[item.line :]]


def test_campaign_separates_detected_from_undetected_mutants(tmp_path):
    """A real one, on a module and the tests of it that need neither torch nor other processes."""
    command = [sys.executable, "tests/mutate.py", "--jobs", "1", "--coverage", str(tmp_path / "coverage")]
    command += ["--suite", "tests/unit_tests/core/schedules/test_batch_size.py"]
    command += ["--only", "megatron/core/schedules/batch_size.py"]
    command += ["--sample", "3", "--seed", "1", "--report", str(tmp_path / "report.json")]
    before = (ROOT / "megatron/core/schedules/batch_size.py").read_bytes()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    rows = json.loads((tmp_path / "report.json").read_text())["mutants"]
    survived = [row for row in rows if row["status"] == "survived"]
    assert len(rows) == 3 and len(survived) < 3, finished.stdout + finished.stderr
    assert finished.returncode == (1 if survived else 0)
    assert all("test_batch_size.py::" in row["test"] for row in rows if row["status"] == "caught")
    assert (ROOT / "megatron/core/schedules/batch_size.py").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["coverage", "report.json"]


def allocate(gibibytes):
    """Touch every page of that much memory in this process; raise if there is not as much."""
    size = int(gibibytes * 2**30)
    assert np.ones(size, dtype=np.uint8)[-1] == 1
    return 0


def start_process_that_allocates(gibibytes):
    pid = os.fork()
    if not pid:
        try:
            os._exit(allocate(gibibytes))
        except MemoryError:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("gibibytes", "statuses"), [(0.25, (0, 0)), (3.0, (98, 7))])
def test_a_change_that_allocates_without_end_fails_at_the_limit(tmp_path, gibibytes, statuses):
    """The limit holds for the process and for those that it starts, not for this one."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    for work, expected in zip((allocate, start_process_that_allocates), statuses):
        pid = fork(ROOT, tmp_path, lambda work=work: work(gibibytes), memory=used + (1 << 30))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


def test_lines_of_a_thread_count_for_the_test_during_which_they_run(tmp_path):
    """Such as the thread of a server that a module's tests share."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "toy.py").write_text(
        "def first():\n    return 1\n\ndef second():\n    return 2\n\n"
        "def loop(tasks, done):\n    while (task := tasks.get()):\n        done.put(globals()[task]())\n"
    )
    names = {}
    exec(compile((tmp_path / "megatron" / "toy.py").read_text(), str(tmp_path / "megatron" / "toy.py"), "exec"), names)
    tasks, finished, trace, lines = queue.Queue(), queue.Queue(), LineTrace(str(tmp_path)), []
    for name in ("first", "second", "first"):
        trace.restart()
        with trace:
            if not lines:
                thread = threading.Thread(target=names["loop"], args=(tasks, finished))
                thread.start()
            tasks.put(name)
            finished.get(timeout=20)
        mask = int(trace.masks()["megatron/toy.py"], 16)
        lines.append({line for line in (2, 5) if mask >> line & 1})
    tasks.put(None)
    thread.join(20)
    assert lines == [{2}, {5}, {2}]


def test_explanations_are_of_lines_that_exist():
    rows = (ROOT / "tests" / "mutants_explained.tsv").read_text().splitlines()[1:]
    assert len(rows) > 10
    for row in rows:
        file, line, changed, reason = row.split("\t")
        source = {item.strip() for item in (ROOT / file).read_text().splitlines()}
        assert line in source and changed != line and reason, row
