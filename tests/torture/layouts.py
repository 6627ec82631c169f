"""The complete table of layouts against one rank: every row, also those that the test suite leaves out for speed.

A case is one row of ``tests/test_utils/layout_table.py``, over gloo; rows named in ``THROUGH_COPY_ENGINES`` are cases a
second time, with their messages through copy engines. Counts rows that equal one rank; any other is a failure.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.test_utils import layout_table
from tests.test_utils.gloo_pool import RankPool
from tests.test_utils.layouts import Matrix
from tests.torture.common import Cases, Failure

ROWS = [(name, None) for name in layout_table.TABLE]
ROWS += [(name, "through_copy_engines") for name in layout_table.THROUGH_COPY_ENGINES]


class Worker:
    """This process's pool of ranks, made at the first row."""

    matrix = None


def case(number, random, folder, tally):
    """One row."""
    name, fault = ROWS[number]
    if Worker.matrix is None:
        Worker.matrix = Matrix(RankPool())
    kind = "through copy engines" if fault else "over gloo"
    verdict = Worker.matrix.verdict(layout_table.row(name), fault)
    if not verdict.equal:
        tally.add(kind, "FAILED")
        raise Failure(f"{name} {kind}: " + "\n".join(map(str, verdict.differences[:5])))
    tally.add(kind, "equal to one rank")


def main():
    cases = Cases(__doc__, count=len(ROWS), workers=1)
    return cases.run(case, numbers=range(len(ROWS)), finish=lambda: Worker.matrix and Worker.matrix.pool.close())


if __name__ == "__main__":
    sys.exit(main())
