"""Writes a JSONL corpus of real text that every machine has: the sources of Python's own standard library.

    python tools/make_corpus.py --output corpus.jsonl

One line per file, ``{"text": …, "path": …}``, in the order of a seeded shuffle, so that any split of the documents
holds all kinds of modules. ``--documents functions`` writes one line per function: short documents, each with a
beginning and an end, for samples that are pairs of texts (BERT).
"""

import argparse
import ast
import json
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path


def source_files(root: Path) -> list[Path]:
    """Every ``.py`` file below ``root`` outside of site-packages, sorted."""
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if not skipped & set(path.parts))


def documents(root: Path, paths: list[Path]) -> Iterator[dict[str, str]]:
    """The files that hold UTF-8 text, as JSON objects."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield {"text": text, "path": str(path.relative_to(root))}


def functions(document: dict[str, str]) -> Iterator[dict[str, str]]:
    """The functions and methods of a file as documents, without their indentation; those inside others are part of
    them. None of a file that this Python cannot parse."""
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--max-bytes", type=int, default=32_000_000, help="stop after about this much text")
    parser.add_argument("--documents", choices=("files", "functions"), default="files", help="what a line holds")
    parser.add_argument("--seed", type=int, default=1234, help="of the document order")
    args = parser.parse_args()
    root = Path(sysconfig.get_path("stdlib"))
    paths = source_files(root)
    random.Random(args.seed).shuffle(paths)
    size = count = 0
    with args.output.open("w", encoding="utf-8") as output:
        for file in documents(root, paths):
            for document in functions(file) if args.documents == "functions" else (file,):
                output.write(json.dumps(document) + "\n")
                size += len(document["text"])
                count += 1
            if size >= args.max_bytes:
                break
    if not count:
        raise SystemExit(f"error: no Python sources below {root}; give another corpus to tools/preprocess_data.py")
    print(f"{args.output}: {count} documents, {size / 1e6:.1f} MB of text from {root}")


if __name__ == "__main__":
    main()
