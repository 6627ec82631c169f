"""Logging of a training process."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import logging, sys
from megatron.training.initialize import configure_logging
configure_logging()
for number in range(20000):
    logging.getLogger("megatron").info("line %d of a log", number)
sys.stderr.write("trained\\n")
"""


def test_a_reader_that_closes_stdout_ends_the_log_and_not_the_program(warm_python, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [warm_python, str(tmp_path / "program.py")]
    program = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout.readline() == "line 0 of a log\n"
    program.stdout.close()
    assert program.stderr.read() == "trained\n" and program.wait() == 0
