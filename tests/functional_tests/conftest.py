"""Fixtures of tests that run whole programs."""

import pytest

from tests.test_utils.layouts import Matrix


@pytest.fixture(scope="session")
def matrix(gloo_pool):
    """Layouts against one rank; ``matrix.verdict(row)``."""
    matrix = Matrix(gloo_pool)
    yield matrix
    matrix.close()
