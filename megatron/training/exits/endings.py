"""The message by which a process says why it ends: on stderr, and where torchrun looks for it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback

from megatron.core.config.errors import UserError

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def message_of(error: BaseException) -> str:
    """The text for a user: the message of a ``UserError``, for anything else its class too.

    A data loader's worker hands its errors on with its traceback in front of them.
    """
    kind = type(error)
    message = str(error).rpartition(f"{kind.__module__}.{kind.__qualname__}: ")[2].rstrip()
    return message if isinstance(error, UserError) else f"{kind.__name__}: {message}"


def say(message: str, rank: int) -> None:
    """Write one message to stderr. Rank 0 also speaks for all, so it does not name itself."""
    sys.stderr.write(f"error: {message}\n" if rank == 0 else f"error on rank {rank}: {message}\n")
    sys.stderr.flush()


def tell_launcher(message: str, error: BaseException | None = None) -> None:
    """Write the reason where torchrun's report looks for it (torch's own ``record`` decorator would add the stack of a
    user's mistake, and nothing for a process that ends by an exit code). The first reason stays.

    Args:
        error: a bug, whose traceback belongs into the report.
    """
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or os.path.exists(path):
        return
    extra = {"timestamp": str(int(time.time()))}
    if error is not None:
        extra["py_callstack"] = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
