"""Planted bugs: each a context manager that breaks one thing on every rank while a layout runs."""
