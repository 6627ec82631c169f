"""One line of progress a second at most: documents, MB/s, share done, time left."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from megatron.core.datasets.preprocessing.worker import PartRecord

if TYPE_CHECKING:
    from megatron.core.datasets.preprocessing.pipeline import Totals

logger = logging.getLogger(__name__)


class PreprocessingProgress:
    """Counts finished parts against the bytes of all input files."""

    def __init__(self, total_bytes: int, log_interval: int):
        self.total_bytes, self.log_interval = max(total_bytes, 1), log_interval
        self.start = self.last_line = time.monotonic()
        self.documents = self.text_bytes = self.worked = self.skipped = 0
        self.next_documents = log_interval

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def skip(self, weight: int) -> None:
        """A part that an earlier run finished."""
        self.skipped += weight

    def add(self, record: PartRecord) -> None:
        """Add a finished part; log a progress line after every ``log_interval`` documents, at most one per second."""
        self.documents += record.documents
        self.text_bytes += record.text_bytes
        self.worked += record.weight
        now = time.monotonic()
        if self.documents >= self.next_documents and now - self.last_line >= 1.0:
            self.last_line = now
            self.next_documents = self.documents + self.log_interval
            logger.info("%s", self.line())

    def line(self) -> str:
        """Return the progress line: documents, documents/s, MB/s of text, share of the input, and remaining time (0
        before the first part). Parts of an earlier run count as done, not as speed."""
        seconds = max(self.seconds, 1e-9)
        processed = self.worked + self.skipped
        left = seconds * (self.total_bytes - processed) / self.worked if self.worked else 0.0
        return (
            f"processed {self.documents} documents | {self.documents / seconds:.1f} docs/s | "
            f"{self.text_bytes / seconds / 1e6:.2f} MB/s | {100 * min(processed / self.total_bytes, 1):.1f} % | "
            f"time left {format_seconds(max(left, 0))}"
        )

    def finish(self, totals: Totals) -> None:
        """Log the summary of ``totals``."""
        seconds = max(self.seconds, 1e-9)
        logger.info(
            "%d documents, %d sequences, %d tokens in %s (%.2f MB/s); left out: %d empty documents, %d unusable "
            "lines%s",
            totals.documents,
            totals.sentences,
            totals.tokens,
            format_seconds(seconds),
            self.text_bytes / seconds / 1e6,
            totals.empty_documents,
            totals.bad_lines,
            f"; {totals.reused_parts} parts were done by an earlier run" if totals.reused_parts else "",
        )


def format_seconds(seconds: float) -> str:
    """``1:02:03``, or ``12.3 s`` below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    rounded = int(seconds)
    return f"{rounded // 3600}:{rounded // 60 % 60:02d}:{rounded % 60:02d}"
