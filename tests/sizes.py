"""Size check: lines, uses of ``Any`` and ``fmt: skip`` of every package of the library, and their ceilings.

    python tests/sizes.py [--write]

Prints the size and the ceiling of each package (a folder with the files directly in it). A ceiling may only fall: ``--write``
lowers them to today's sizes, adds new packages and removes deleted ones, and raises none. A feature that needs more
raises the row of ``size_ceilings.tsv`` by hand and gives the reason in its commit.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parent / "megatron"
CEILINGS = HERE / "size_ceilings.tsv"
ANY = re.compile(r"\bAny\b")


class Size(NamedTuple):
    """Sizes of one package, or their ceilings."""

    lines: int
    any_uses: int
    skips: int

    def exceeds(self, ceiling: Size) -> bool:
        """Return whether any of the three is above its ceiling."""
        return any(found > limit for found, limit in zip(self, ceiling))


def sizes(library: Path = LIBRARY) -> dict[str, Size]:
    """Return the size of each package of ``library`` by its path relative to the parent, in alphabetical order."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(library.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        package = found.setdefault(path.parent.relative_to(library.parent).as_posix(), Counter())
        package.update(lines=len(text.splitlines()), any=len(ANY.findall(text)), skips=text.count("# fmt: skip"))
    return {name: Size(each["lines"], each["any"], each["skips"]) for name, each in found.items()}


def ceilings() -> dict[str, Size]:
    """Return the rows of ``size_ceilings.tsv``; empty without the file."""
    if not CEILINGS.exists():
        return {}
    rows = (line.split("\t") for line in CEILINGS.read_text(encoding="utf-8").splitlines())
    return {name: Size(*map(int, numbers)) for name, *numbers in rows}


def write_ceilings() -> None:
    """Lower the ceilings of ``size_ceilings.tsv`` to today's sizes; a new package gets its size."""
    old, now = ceilings(), sizes()
    rows = {name: Size(*map(min, size, old.get(name, size))) for name, size in now.items()}
    CEILINGS.write_text("".join(f"{name}\t{x.lines}\t{x.any_uses}\t{x.skips}\n" for name, x in rows.items()))


def main() -> None:
    """Print all sizes, or with ``--write`` lower the ceilings."""
    parser = argparse.ArgumentParser(description="Sizes of the library's packages and their ceilings.")
    parser.add_argument("--write", action="store_true", help="lower the ceilings to today's sizes")
    if parser.parse_args().write:
        write_ceilings()
    limits, now = ceilings(), sizes()
    print(f"{'package':48} {'lines':>13} {'Any':>11} {'fmt: skip':>11}")
    for name, size in now.items():
        cells = [f"{found}/{limit}" for found, limit in zip(size, limits.get(name, size))]
        print(f"{name:48} {cells[0]:>13} {cells[1]:>11} {cells[2]:>11}")
    total = Size(*map(sum, zip(*now.values())))
    print(f"{'total':48} {total.lines:>13} {total.any_uses:>11} {total.skips:>11}")


if __name__ == "__main__":
    main()
