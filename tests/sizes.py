"""Size check: lines, uses of ``Any`` and ``fmt: skip`` of the library, and its one ceiling.

    python tests/sizes.py

Prints the size of each package (a folder with the files directly in it) and the total. A feature that needs more than
:data:`CEILING` raises it and gives the reason in its commit; who deletes lines lowers it.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parent / "megatron"
ANY = re.compile(r"\bAny\b")


class Size(NamedTuple):
    """Sizes of one package, or their ceilings."""

    lines: int
    any_uses: int
    skips: int

    def exceeds(self, ceiling: Size) -> bool:
        """Return whether any of the three is above its ceiling."""
        return any(actual > limit for actual, limit in zip(self, ceiling))


def sizes(library: Path = LIBRARY) -> dict[str, Size]:
    """Return the size of each package of ``library`` by its path relative to the parent, in alphabetical order."""
    actual: dict[str, Counter[str]] = {}
    for path in sorted(library.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        package = actual.setdefault(path.parent.relative_to(library.parent).as_posix(), Counter())
        package.update(lines=len(text.splitlines()), any=len(ANY.findall(text)), skips=text.count("# fmt: skip"))
    return {name: Size(item["lines"], item["any"], item["skips"]) for name, item in actual.items()}


def total(library: Path = LIBRARY) -> Size:
    """Return the size of the whole ``library``."""
    return Size(*map(sum, zip(*sizes(library).values())))


CEILING = Size(lines=97_495, any_uses=966, skips=305)


def main() -> None:
    """Print all sizes."""
    print(f"{'package':48} {'lines':>13} {'Any':>11} {'fmt: skip':>11}")
    for name, size in (sizes() | {"total": total(), "ceiling": CEILING}).items():
        print(f"{name:48} {size.lines:>13} {size.any_uses:>11} {size.skips:>11}")


if __name__ == "__main__":
    main()
