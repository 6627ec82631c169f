"""The site of the documentation builds without warnings, loads nothing from other hosts, and holds every page."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from docs_site import navigation, site_files  # noqa: E402

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""Attribute of each element whose target a browser loads with the page."""


class Loads(HTMLParser):
    """Targets that a browser loads with a page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in LOADED and values.get("rel") not in ("next", "prev", "canonical"):
            self.found.append(values.get(LOADED[tag]) or "")


def external_loads(html):
    """Return targets on other hosts that a page loads."""
    loads = Loads()
    loads.feed(html)
    return [item for item in loads.found if re.match(r"(?:https?:)?//", item)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_pages_load_nothing_from_other_hosts(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    result = {page.name: external_loads(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: loads for name, loads in result.items() if loads} == {}
    external = re.compile(r"(?:@import|url\()\W*(?:https?:)?//")
    assert [sheet for sheet in site.rglob("*.css") if external.search(sheet.read_text())] == []


def test_a_load_from_another_host_is_found():
    html = '<script src="https://a.b/c.js"></script><link href="//fonts.d"><a href="https://e"></a><img src="f.svg">'
    assert external_loads(html) == ["https://a.b/c.js", "//fonts.d"]


def test_every_page_can_be_searched_without_a_server(site):
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    found = {entry["location"].partition("#")[0] for entry in json.loads(script.removeprefix("var __index = "))["docs"]}
    pages = {path for path in site_files() if path.endswith(".md")}
    expected = {re.sub(r"README(?=\.html$)", "index", path.replace(".md", ".html")) for path in pages}
    assert expected <= found
    assert "docs/site/iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


def test_navigation_lists_every_page_of_docs():
    entries = [entry for section in navigation() for pages in section.values() for entry in pages]
    listed = [path for entry in entries for path in entry.values()]
    assert len(listed) == len(set(listed))
    assert {path for path in site_files() if path.startswith("docs/") and path.endswith(".md")} - set(listed) == {
        "docs/README.md"  # the list itself
    }
