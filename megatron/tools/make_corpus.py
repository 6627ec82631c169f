"""Write a JSONL corpus without a download: short stories, or sources or documentation of Python's standard library.

    python tools/make_corpus.py --output corpus.jsonl

Writes one line per file, ``{"text": …, "path": …}``, in a seeded random order, so that every split contains all kinds
of modules. ``--documents functions`` writes one line per function: short, complete documents for sentence pairs (BERT).
``--documents docs`` writes English prose: the topics of Python's ``help()`` and the longer docstrings. ``--documents
stories`` writes short stories from a grammar, the same on every machine; a small model learns them in minutes."""

import ast
import importlib
import json
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.tools.stories import stories

SHORTEST = 200


def source_files(root: Path) -> list[Path]:
    """Return all ``.py`` files below ``root`` outside of site-packages, sorted."""
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if not skipped & set(path.parts))


def documents(root: Path, paths: list[Path]) -> Iterator[dict[str, str]]:
    """Yield each UTF-8 file that is not blank as {"text", "path" relative to ``root``}."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield {"text": text, "path": str(path.relative_to(root))}


def functions(document: dict[str, str]) -> Iterator[dict[str, str]]:
    """Nested functions stay in their outer function. A file that this Python cannot parse yields nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the text
            unvisited: list[ast.AST] = [ast.parse(document["text"])]
    except (SyntaxError, ValueError):
        return
    lines = document["text"].splitlines(keepends=True)
    while unvisited:
        node = unvisited.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            yield {"text": text, "path": f"{document['path']}:{node.lineno}"}
        else:
            unvisited += ast.iter_child_nodes(node)


def topics() -> Iterator[dict[str, str]]:
    """Yield the chapters of the language reference that ``help("TOPIC")`` shows."""
    module = importlib.import_module("pydoc_data.topics")
    for name, text in module.topics.items():
        yield {"text": text.strip(), "path": f"pydoc_data/topics.py:{name}"}


def docstrings(document: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield docstrings of at least ``SHORTEST`` characters; nothing for test folders and idlelib."""
    if {"test", "tests", "idlelib"} & set(Path(document["path"]).parts):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the text
            tree = ast.parse(document["text"])
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= SHORTEST:
                yield {"text": text, "path": f"{document['path']}:{getattr(node, 'lineno', 1)}"}


def groups(kind: str, files: Iterator[dict[str, str]], seed: int) -> Iterator[Iterable[dict[str, str]]]:
    """Docs are read first and yielded in an order from ``seed``. Stories come from it and never end."""
    if kind == "stories":
        yield from ([document] for document in stories(seed))
    if kind == "docs":
        prose = [*topics(), *(text for file in files for text in docstrings(file))]
        random.Random(seed).shuffle(prose)
        yield from ([document] for document in prose)
        return
    for file in files:
        yield functions(file) if kind == "functions" else [file]


def main(argv: Sequence[str]) -> int:
    """Stops after the file, docstring or story that reaches --max-bytes of text. Raises UserError without sources."""
    parser = tool_parser(__doc__)
    parser.add_argument("--output", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--max-bytes", type=int, default=32_000_000, help="stop after about this many bytes")
    kinds = ("files", "functions", "docs", "stories")
    parser.add_argument("--documents", choices=kinds, default="files", help="content of a line")
    parser.add_argument("--seed", type=int, default=1234, help="of the order of documents, and of stories")
    args = parser.parse_args(argv)
    root = Path(sysconfig.get_path("stdlib"))
    paths = source_files(root)
    random.Random(args.seed).shuffle(paths)
    size = count = 0
    with args.output.open("w", encoding="utf-8") as output:
        for group in groups(args.documents, documents(root, paths), args.seed):
            for document in group:
                output.write(json.dumps(document) + "\n")
                size += len(document["text"])
                count += 1
            if size >= args.max_bytes:
                break
    if not count:
        raise UserError(f"no Python sources below {root}; give another corpus to tools/preprocess_data.py")
    source = "a grammar" if args.documents == "stories" else root
    print(f"{args.output}: {count} documents, {size / 1e6:.1f} MB of text from {source}")
    return 0
