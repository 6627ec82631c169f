"""Programs from a warm start end, fail and stop like programs of a new interpreter."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize("program", [
    "import sys, os; print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ['MARK'])",
    "import sys; print('last words', file=sys.stderr); sys.exit(7)",
    "import sys; sys.exit('a reason')",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "file = open('program.txt', 'w'); file.write('text'); print(1 / 3)",
    "import sys; sys.excepthook = lambda kind, error, trace: print(kind.__name__, error); raise ValueError('odd')",
    "import atexit, threading; atexit.register(print, 'bye'); threading.Thread(target=print, args=['thread']).start()",
])  # fmt: skip
def test_program_ends_as_in_a_separate_interpreter(warm_python, tmp_path, program):
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "MARK": "here"}
    ends = []
    for python in (warm_python, sys.executable):
        end = subprocess.run([python, "program.py", "a", "b c"], cwd=tmp_path, env=environment, capture_output=True)
        files = [path.read_text() for path in tmp_path.glob("*.txt")]
        ends.append((end.returncode, end.stdout, end.stderr, files))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 3), (signal.SIGKILL, -signal.SIGKILL)])
def test_signals_reach_the_program(warm_python, tmp_path, number, code):
    (tmp_path / "program.py").write_text(
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([warm_python, tmp_path / "program.py"], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    stat = Path(f"/proc/{process.stdout.readline().strip()}/stat")
    process.send_signal(number)
    assert process.wait(30) == code
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.stdout.close()
