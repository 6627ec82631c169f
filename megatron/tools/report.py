"""Write a page about a run: losses, speed, memory, timeline, settings, plan against measurement; or compare runs.

    python tools/report.py RUN [--output FILE] [--log FILE]
    python tools/report.py RUN RUN... [--output FILE]

RUN is the directory of --save (or --tensorboard-dir without --save), which holds ``metrics.jsonl`` and
``timing.jsonl``. The page is one HTML file without references to others. The run may still be training. Training
writes the same page when it ends, unless --no-report is given. Several runs are compared on the terminal: figures,
settings, the first iteration that differs; the page has the curves of all runs in each chart."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.core.config.commands import tool_parser
from megatron.training.observe.page.comparison import compare_page, compare_text
from megatron.training.observe.page.page import PAGE_FILE, save_page, write_page
from megatron.training.observe.run_folder import read_run, run_labels


def main(arguments: Sequence[str]) -> int:
    """Raises UserError for a folder without a run, and OSError if the page cannot be written."""
    parser = tool_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory with metrics.jsonl, or the file")
    parser.add_argument(
        "--output", type=Path, help=f"file to write; default: {PAGE_FILE} in RUN, and none for several runs"
    )
    parser.add_argument("--log", type=Path, help="output of the run; its last warnings and errors are listed")
    options = parser.parse_args(arguments)
    first, output = options.runs[0], options.output
    if len(options.runs) == 1:
        output = output or (first if first.is_dir() else first.parent) / PAGE_FILE
        write_page(first, output, options.log)
    else:
        if options.log is not None:
            parser.error(f"--log {options.log}: requires a single run; remove it")
        labels = run_labels(options.runs)
        runs = [replace(read_run(path, time.time()), label=label) for path, label in zip(options.runs, labels)]
        sys.stdout.write(compare_text(runs))
        if output is not None:
            save_page(compare_page(runs), output)
    if output is not None:
        print(f"wrote {output}")
    return 0
