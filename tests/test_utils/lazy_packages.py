"""Packages that take seconds to import and that few tests need: imported by those, not by the collection of tests."""

import importlib
import importlib.util

import pytest


class LazyPackage:
    """The package ``name``, imported when an attribute is read; not in ``sys.modules``, which ``inspect`` reads."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith(("_", "pytest")):  # pytest asks each name of a module for its marks
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazy_package(name):
    """Return the package; skip the module of tests if it is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"could not import {name!r}", allow_module_level=True)
    return LazyPackage(name)
