"""Final error message of a process: on stderr and in torchrun's error file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback

from megatron.core.config.commands import as_typed
from megatron.core.config.errors import UserError

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def error_message(error: BaseException) -> str:
    """Return the text for a user: the message of a ``UserError``, prefixed by the class for other errors. Removes the
    traceback that a DataLoader worker puts in front of its errors."""
    kind = type(error)
    message = str(error).rpartition(f"{kind.__module__}.{kind.__qualname__}: ")[2].rstrip()
    return as_typed(message) if isinstance(error, UserError) else f"{kind.__name__}: {message}"


def say(message: str, rank: int) -> None:
    """Write one message to stderr. Omits the rank for rank 0, which usually reports for all."""
    sys.stderr.write(f"error: {message}\n" if rank == 0 else f"error on rank {rank}: {message}\n")
    sys.stderr.flush()


def notify_launcher(message: str, error: BaseException | None = None) -> None:
    """Write the reason to torchrun's error file, unless it exists: the first reason is kept. ``error``: a bug whose
    traceback belongs in the report. torch's ``record`` decorator would add the stack of user errors and miss processes
    that end by an exit code."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or os.path.exists(path):
        return
    extra = {"timestamp": str(int(time.time()))}
    if error is not None:
        extra["py_callstack"] = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
