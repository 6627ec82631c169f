"""Short runs of planned layouts on this machine, through the training program in new processes. Torch-free."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.models.registry import programs
from megatron.training.observe.run_folder import Series, read_run
from megatron.training.report.plan.search import Layout

ITERATIONS, WARMUP = 8, 3


def trial_command(layout: Layout, ranks: int, program: str, flags: Sequence[str], folder: str) -> list[str]:
    """Return the command of a trial. The layout follows the user's flags and mock data replaces data sets."""
    name = next((key for key, (_, entry) in programs().items() if program in (entry.script, key)), program)
    length = f"--train-iters {ITERATIONS} --lr 1e-5 --lr-decay-style constant --eval-iters 0 --log-interval 1".split()
    data = ["--mock-data", "--tensorboard-dir", folder]
    names = {word.split("=")[0] for word in flags if word.startswith("--")}
    if "--tokenizer-type" not in names:
        data += ["--tokenizer-type", "NullTokenizer"]
    if not names & {"--bf16", "--fp16", "--fp64"} and layout.cfg.model.bf16:
        data.append("--bf16")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    words = [*launcher, "-m", "megatron", "pretrain", name, *flags, *layout.flags.split(), *length, *data]
    return [sys.executable, *words]


def try_layout(layout: Layout, ranks: int, program: str, flags: Sequence[str], timeout: float = 1800.0) -> float | None:
    """Run a layout for :data:`ITERATIONS` iterations; return the median seconds per iteration after the warm-up, or
    None if the run fails, such as for lack of memory. Raises UserError if no layout could have started."""
    with tempfile.TemporaryDirectory() as folder:
        command = trial_command(layout, ranks, program, flags, folder)
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return None
        except OSError as error:
            raise UserError(f"--try: cannot start {command[0]}: {error}") from None
        if result.returncode:
            sys.stderr.write("".join(result.stderr.splitlines(keepends=True)[-5:]))
            return None
        seconds = read_run(Path(folder), 0.0).timing.get("seconds_per_iteration", Series()).y
    return statistics.median(seconds[WARMUP:]) if len(seconds) > WARMUP else None
