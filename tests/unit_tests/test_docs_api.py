"""The page of the Python interface shows the names, parameters and docstrings of the imported objects."""

import importlib
import inspect
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from docs_api import ENTRIES, api_page  # noqa: E402

NAMES = [(module, name) for modules in ENTRIES.values() for module, names in modules.items() for name in names]


@pytest.fixture(scope="module")
def sections():
    """Heading -> text below it."""
    parts = re.split(r"^### (\w+)$", api_page(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


@pytest.mark.parametrize("module, name", NAMES, ids=[name for _, name in NAMES])
def test_entry_has_the_parameters_and_the_docstring_of_the_object(sections, module, name):
    target, text = getattr(importlib.import_module(module), name), sections[name]
    assert f"from {module} import {name}" in text
    assert inspect.cleandoc(target.__doc__).splitlines()[0] in text
    if is_dataclass(target):
        printed = set(re.findall(r"^- `(\w+):", text, re.MULTILINE))
        assert printed <= {field.name for field in fields(target)}
        assert printed or not set(vars(target).get("__annotations__", {}))
        return
    call = re.search(rf"^{name}\((.*)\)", text, re.MULTILINE | re.DOTALL)
    if call is not None:
        code = inspect.unwrap(target.__init__ if isinstance(target, type) else target).__code__
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        assert [item for item in parameters if item != "self" and not re.search(rf"\b{item}\b", call[1])] == []


def test_page_is_reached_from_every_section():
    assert [title for title in ENTRIES if title.partition(" (")[0] not in api_page()] == []
