"""Log lines about automatic choices of the library, such as padding a vocabulary."""

from __future__ import annotations

import logging
import os


def notice(logger: logging.Logger, message: str, *args: object) -> None:
    """Logs ``message % args`` on the first rank: as information where the program has set up logging, else as a
    warning, which python then writes to stderr: so that a program of ten lines that uses the library sees it too."""
    if int(os.environ.get("RANK", "0")) == 0:
        logger.log(logging.INFO if logger.hasHandlers() else logging.WARNING, message, *args)
