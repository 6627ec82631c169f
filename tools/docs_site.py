"""Hooks of mkdocs.yml: pages keep their paths of the repository, and docs/README.md is the navigation.

``mkdocs build`` writes build/site. The README, CONTRIBUTING.md, recipes and results are pages too, and files that a
page links to, such as the Dockerfile, are copied, so that every link of the repository works in the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
ASSETS = ("docs/**/*.svg", "docs/**/*.png", "docs/site/*")
LINK = re.compile(r"\[(?P<title>[^\]]+)\]\((?P<target>[^)#\s]+)[^)]*\)")


def site_files() -> list[str]:
    """Return the paths of all pages, pictures and linked files of the repository, relative to its top."""
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    files = {path.relative_to(ROOT).as_posix(): None for path in pages}
    files |= {path.relative_to(ROOT).as_posix(): None for pattern in ASSETS for path in sorted(ROOT.glob(pattern))}
    for page in pages:
        for link in LINK.finditer(page.read_text(encoding="utf-8")):
            target = (page.parent / link["target"]).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                files[target.relative_to(ROOT).as_posix()] = None
    return list(files)


def navigation() -> list[dict[str, list[dict[str, str]]]]:
    """Return sections with titles and paths of pages: headings and list items of docs/README.md."""
    index = ROOT / "docs" / "README.md"
    sections: dict[str, list[dict[str, str]]] = {}
    title = ""
    for line in index.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("- "):
            sections.setdefault(title, []).extend(_linked_pages(index, line))
    return [{title: pages} for title, pages in sections.items()]


def _linked_pages(page: Path, text: str) -> Iterator[dict[str, str]]:
    """Yield {title: path} of each page that ``text``, a part of ``page``, links to."""
    for link in LINK.finditer(text):
        target = (page.parent / link["target"]).resolve()
        if target.suffix == ".md" and target.is_file():
            yield {link["title"]: target.relative_to(ROOT).as_posix()}


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config.nav = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Replace the files of docs/ by all files of the site, at their paths of the repository."""
    from mkdocs.structure.files import File, Files

    docs = Path(config.docs_dir)
    theme = [each for each in files if each.src_dir is None or Path(each.src_dir) != docs]
    here = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in site_files()]
    return Files([*theme, *here])
