"""Write a page about a run: losses, speed, memory, timeline, settings, plan against measurement.

    python tools/report.py RUN [--output FILE] [--log FILE]

RUN is the directory of --save (or --tensorboard-dir without --save), which holds ``metrics.jsonl`` and
``timing.jsonl``. The page is one HTML file without references to others. The run may still be training. Training
writes the same page when it ends, unless --no-report is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.core.config.commands import HelpFormatter, as_typed
from megatron.training.observe.page.page import PAGE_FILE, write_page


def main(arguments: Sequence[str]) -> int:
    """Raises UserError for a folder without a run, and OSError if the page cannot be written."""
    parser = argparse.ArgumentParser(
        description=as_typed(__doc__ or ""), formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="directory with metrics.jsonl, or the file")
    parser.add_argument("--output", type=Path, help=f"file to write; default: {PAGE_FILE} in RUN")
    parser.add_argument("--log", type=Path, help="output of the run; its last warnings and errors are listed")
    options = parser.parse_args(arguments)
    folder = options.run if options.run.is_dir() else options.run.parent
    output = options.output or folder / PAGE_FILE
    write_page(options.run, output, options.log)
    print(f"wrote {output}")
    return 0
