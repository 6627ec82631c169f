"""Files of every kind that a program reads, damaged at random, many at a time, and read.

A case takes the valid files of one row of ``tests/test_utils/crafted_files.py`` (checkpoints of all formats,
tokenizers, data sets, settings, records), changes one to three of them and reads them as a program does. Verdicts:

* value: they are still read; formats with checksums must give the valid files' value
* error: one message for the user, within seconds
* a traceback, a hang, a message with control characters or a silent difference is a failure
"""

import contextlib
import io
import logging
import shutil
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.test_utils import crafted_files
from tests.torture import common
from tests.torture.common import Cases, Failure

PER_CASE = 20
VALID = {}


def valid_files(name, work):
    """A folder of valid files of this worker, and what reading them gives."""
    if name not in VALID:
        folder = work / f"valid-{Cases.worker}-{name.replace(' ', '-')}"
        folder.mkdir()
        crafted_files.KINDS[name].write(folder)
        shutil.copytree(folder, f"{folder}-read")
        VALID[name] = folder, crafted_files.outcome(crafted_files.KINDS[name], Path(f"{folder}-read"))
    return VALID[name]


def read_changed(name, random, folder, work):
    """Change files of one kind in ``folder``; the verdict of reading them."""
    kind = crafted_files.KINDS[name]
    valid, expected = valid_files(name, work)
    shutil.copytree(valid, folder)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        crafted_files.change(random.choice(crafted_files.files_of(folder)), random)
    try:
        actual = crafted_files.outcome(kind, folder)
    except Exception as error:
        raise Failure(f"{name}: {type(error).__name__}:\n{traceback.format_exc()[-3000:]}") from None
    if actual[0] == "value" and kind.checksums and actual != expected:
        raise Failure(f"{name}: a silent difference")
    return actual[0]


def case(number, random, folder, tally):
    """Twenty folders of damaged files, one at a time."""
    for index in range(PER_CASE):
        name = random.choice(list(crafted_files.KINDS))
        place = folder / f"{index}"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                outcome = read_changed(name, random, place, folder.parent)
            except Failure as failure:
                tally.add(name, "FAILED")
                tally.fail(f"{place}: {failure}")
                continue
        tally.add(name, outcome)
        shutil.rmtree(place)


def main():
    logging.disable(logging.CRITICAL)
    cases = Cases(__doc__, count=20_000)
    common.import_everything()
    return cases.run(case)


if __name__ == "__main__":
    sys.exit(main())
