"""Page about a run, written when the run ends."""

from __future__ import annotations

import logging
from pathlib import Path

from megatron.training.hooks.base import Hook
from megatron.training.observe.page.page import PAGE_FILE, write_page

logger = logging.getLogger(__name__)


class PageHook(Hook):
    """Writes ``report.html`` to the folder of the metrics, also after an error. Use after the file sinks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_end(self) -> None:
        if self.directory.is_dir():
            write_page(self.directory, self.directory / PAGE_FILE)
            logger.debug("report of this run: %s", self.directory / PAGE_FILE)
