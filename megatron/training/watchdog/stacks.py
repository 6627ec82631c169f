"""Python stacks that a rank writes when a run fails, and what they reveal about the cause."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch.distributed as dist

from megatron.core.safe_files import create_file, make_folder
from megatron.training.watchdog.failure_store import Answer

COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
GPU_WAITS = (".wait(", "synchronize(", ".item(", ".tolist(", ".cpu(")
DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")
CONSEQUENCES = ("gloo", "NCCL", "onnection closed by peer", "onnection reset by peer", "roken pipe")


def standard_error() -> TextIO:
    """Return the original stderr, which has a file descriptor even if ``sys.stderr`` was replaced."""
    return sys.__stderr__ if sys.__stderr__ is not None else open(2, "w", closefd=False)


def write_line(text: str) -> None:
    """Write one line to stderr. Never raises."""
    with contextlib.suppress(OSError, ValueError):
        standard_error().write(text + "\n")
        standard_error().flush()


def write_stacks(head: str, path: Path | None, *, also_stderr: bool = True) -> None:
    """Write ``head`` and the Python stacks of all threads to stderr (unless ``also_stderr`` is False) and to ``path``,
    whose folder is created; None: no file. Ignores files that cannot be written."""
    with contextlib.ExitStack() as opened:
        files = [standard_error()] if also_stderr else []
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.parent.mkdir(parents=True, exist_ok=True)
                make_folder(path.parent)
                files.append(opened.enter_context(io.TextIOWrapper(create_file(path), encoding="utf-8")))
        for file in files:
            with contextlib.suppress(OSError, ValueError):
                file.write(head)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.flush()


def leave_if_locked(seconds: float) -> None:
    """Arm a C-level timer that writes the stacks to stderr and exits the process after ``seconds``; each call re-arms
    it. The timer needs no interpreter: it fires while a C call holds the GIL. Reading the frames of a running thread
    may crash, so use it only if the process ends anyway."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=standard_error())


def thread_stack(thread: int | None) -> Answer:
    """Return the stack of a thread, and whether it waits for other ranks or the GPU."""
    frame = sys._current_frames().get(thread or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    return Answer(waits_for_others(frame), stack)


def is_debugged(thread: int | None) -> bool:
    """Whether a frame of the thread's current stack belongs to pdb, bdb or pydevd, as at a debugger prompt."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        if os.path.basename(frame.f_code.co_filename) in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def waits_for_others(frame: FrameType | None) -> bool:
    """Whether any frame of the stack is in torch's collective functions, or the innermost source line waits for the GPU
    or for asynchronous work (``.wait(``, ``synchronize(``, ``.item(``, ``.tolist(``, ``.cpu(``). False for None."""
    if frame is None:
        return False
    line = traceback.extract_stack(frame, limit=1)[0].line or ""
    while frame is not None:
        if frame.f_code.co_filename.replace(os.sep, "/").endswith(COLLECTIVES):
            return True
        frame = frame.f_back
    return any(word in line for word in GPU_WAITS)


def is_consequence(error: BaseException) -> bool:
    """Whether an error may be a mere consequence of another rank's failure: a ``dist.DistError``, or a RuntimeError
    whose message names gloo, NCCL or a lost connection."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in CONSEQUENCES)
    )


def has_timed_out(reason: str) -> bool:
    """Whether a collective timed out. No process died then: a death would have been detected during the wait."""
    return any(word in reason.lower() for word in ("timed out", "timeout"))
