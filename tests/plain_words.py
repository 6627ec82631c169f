"""Word check: the share of lines and names in a private idiom, by package, and what to write instead.

    python tests/plain_words.py PATH ... [--list N]

Reads docstrings, comments and messages of Python files, the prose of Markdown files, and defined names.
``plain_words.tsv`` lists the idioms as regular expressions, each with a replacement. A unit is one line of at least
three words, or one name per file; code in backticks, quotations and links do not count. Good English uses an idiom
now and then, so folders have ceilings (``plain_words_ceilings.tsv``) rather than exemptions. A ceiling may only fall:
``--write-ceilings`` lowers them to today's rates and raises none.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
REPORTING = {
    "Problem", "problem", "missing", "add_argument", "flag", "notice", "warn", "warning", "info", "error", "debug",
    "exception", "critical", "print", "log",
}  # fmt: skip
"""Functions whose string arguments users read, next to exceptions (names that end in ``Error``)."""
KEYWORDS = {"help", "description", "epilog", "reason", "fix"}
DIRECTIVE = re.compile(r"#\s*(?:type:|noqa|fmt:|pragma|mypy|ruff|!)", re.IGNORECASE)
STRING_OR_COMMENT = re.compile(
    r""""{3}(?:[^"\\]|\\.|"(?!""))*"{3}|'{3}(?:[^'\\]|\\.|'(?!''))*'{3}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(#[^\n]*)""",
    re.DOTALL,
)
"""Tokens of Python that may contain "#": the same comments as tokenize finds, ten times as fast."""
NOT_PROSE = re.compile(
    r"``.*?``|`[^`]*`|(?<!\w)\"[^\"]{1,80}\"|(?<!\w)'[^'\n]{1,60}'(?!\w)|https?://\S+|\]\([^)]*\)|:\w+:|\{[^}]*\}"
)


class Unit(NamedTuple):
    """One line of text or one name."""

    path: Path
    line: int
    kind: str
    """``docstring``, ``comment``, ``message``, ``markdown`` or ``name``."""
    text: str
    opens: bool = False
    """Whether a docstring begins here."""


def _rules() -> tuple[re.Pattern[str], re.Pattern[str], set[str]]:
    """Return the idioms, the words that no docstring begins with, and the words that no name contains."""
    rows = [line.split("\t") for line in (HERE / "plain_words.tsv").read_text(encoding="utf-8").splitlines()]
    result = {kind: [row[1] for row in rows if row[0] == kind] for kind in ("idiom", "opening", "name")}
    idioms = "|".join(f"\\b(?:{pattern})\\b" for pattern in result["idiom"])
    opening = rf"(?:{'|'.join(result['opening'])})\b(?! to\b)"
    return re.compile(idioms, re.IGNORECASE), re.compile(opening), set(result["name"])


IDIOMS, OPENING, NAME_WORDS = _rules()


def units(root: Path) -> Iterator[Unit]:
    """Yield the units of every file below ``root``, each once."""
    observed = set()
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.parts[len(root.parts) :])
        if path.suffix not in (".py", ".md") or hidden:
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        for unit in _python(path, source) if path.suffix == ".py" else _markdown(path, source):
            is_name = unit.kind == "name"
            key = (0 if is_name else unit.line, unit.text)
            if key in observed or not is_name and len(re.findall(r"[A-Za-z]{2,}|\ba\b", unit.text)) < 3:
                continue
            observed.add(key)
            yield unit
        observed.clear()


def found_in(unit: Unit) -> list[str]:
    """Return the idioms of a unit."""
    if unit.kind == "name":
        words = set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", unit.text).lower().split("_"))
        return sorted(words & NAME_WORDS) + (["_of"] if re.search(r"(?<!multiple)_of$", unit.text) else [])
    result = [match.group(0).lower() for match in IDIOMS.finditer(NOT_PROSE.sub(" X ", unit.text))]
    opening = OPENING.match(unit.text) if unit.opens else None
    return result + ([f"opens with {opening.group(0)}"] if opening else [])


def rates(root: Path) -> dict[str, tuple[float, float]]:
    """Return, for each folder below ``root`` that holds text, the percentages of lines and names with an idiom."""
    counts: Counter[tuple[str, bool, bool]] = Counter()
    for unit in units(root):
        folder = unit.path.parent.relative_to(root.parent).as_posix() if unit.path != root else root.name
        counts[folder, unit.kind == "name", bool(found_in(unit))] += 1
    return {folder: (_percent(counts, folder, False), _percent(counts, folder, True)) for folder, *_ in counts}


CEILINGS = HERE / "plain_words_ceilings.tsv"
ROOTS = ("megatron", "docs", "tests", "tools", "benchmarks", "examples")
PLAIN = (2.0, 1.0)
"""Percentages of lines and names with an idiom in plain English; the minimum of ceilings, used for new folders."""
SLACK = 0.5
"""Percentage points that a ceiling leaves above the rate when it is written, for one or two lines of a small folder."""


def ceilings() -> dict[str, tuple[float, float]]:
    """Return the highest accepted percentages of lines and names with an idiom, by folder."""
    rows = [line.split("\t") for line in CEILINGS.read_text(encoding="utf-8").splitlines()]
    return {folder: (float(lines), float(names)) for folder, lines, names in rows}


def write_ceilings() -> None:
    """Lower the ceilings to today's rates plus :data:`SLACK`; a new folder gets its rates."""
    old = ceilings() if CEILINGS.exists() else {}
    rows = []
    for root in ROOTS:
        for folder, actual in sorted(rates(HERE.parent / root).items()):
            retained = old.get(folder, (100.0, 100.0))
            limits = [max(low, min(limit, rate + SLACK)) for limit, rate, low in zip(retained, actual, PLAIN)]
            rows.append("\t".join((folder, *(f"{limit:.1f}" for limit in limits))))
    CEILINGS.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _percent(counts: Counter[tuple[str, bool, bool]], folder: str, names: bool) -> float:
    bad, good = counts[folder, names, True], counts[folder, names, False]
    return 100 * bad / (bad + good) if bad + good else 0.0


def _python(path: Path, source: str) -> Iterator[Unit]:
    line, position = 1, 0
    for token in STRING_OR_COMMENT.finditer(source):
        if (comment := token[1]) and not DIRECTIVE.match(comment):
            line, position = line + source.count("\n", position, token.start()), token.start()
            yield Unit(path, line, "comment", re.sub(r"#\s*fmt: skip.*", "", comment).lstrip("# "))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                for offset, line in enumerate(value.value.splitlines()):
                    yield Unit(path, statement.lineno + offset, "docstring", line.strip(), offset == 0)
        for part in _reported(node):
            yield Unit(path, part.lineno, "message", _text(part).replace("\n", " "))
        if (name := _defined(node)) is not None:
            yield Unit(path, getattr(node, "lineno", 0), "name", name)


def _reported(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the strings that a call reports, or that are yielded, raised or assigned as a message."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        parts = [word.value for word in node.keywords if word.arg in KEYWORDS]
        parts += node.args if name in REPORTING or name.endswith("Error") else []
    elif isinstance(node, ast.Yield) and node.value is not None:
        parts = [node.value]
    elif isinstance(node, ast.Assign):
        named = any(getattr(target, "id", "") in ("reason", "fix", "message") for target in node.targets)
        parts = [node.value] if named else []
    for part in parts:
        inner = [part] if isinstance(part, ast.Constant | ast.JoinedStr) else list(ast.iter_child_nodes(part))
        yield from (item for item in inner if isinstance(item, ast.JoinedStr) or _is_text(item))  # type: ignore[misc]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _defined(node: ast.AST) -> str | None:
    """Return the function, class, argument, variable or attribute that ``node`` defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return None


def _markdown(path: Path, source: str) -> Iterator[Unit]:
    fence = ""
    for number, line in enumerate(source.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        elif not fence:
            yield Unit(path, number, "markdown", line.strip(" #>|*-"))


def main(argv: list[str]) -> int:
    """Print the rates of each folder, and the lines with the most idioms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--list", type=int, default=0, metavar="N", help="also print the N lines with the most idioms")
    parser.add_argument("--write-ceilings", action="store_true", help="lower the ceilings to today's rates")
    args = parser.parse_args(argv)
    if args.write_ceilings:
        write_ceilings()
    for root in (item.resolve() for item in args.roots):
        for folder, (lines, names) in sorted(rates(root).items()):
            print(f"{folder:56}{lines:8.2f} % of lines{names:8.2f} % of names")
        hits = [(actual, unit) for unit in units(root) if (actual := found_in(unit))]
        for actual, unit in sorted(hits, key=lambda hit: -len(hit[0]))[: args.list]:
            print(f"{unit.path}:{unit.line}: {unit.text}  <- {', '.join(actual)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
