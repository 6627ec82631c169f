"""Fixtures of tests that run whole programs."""

import pytest

from tests.test_utils.gpt_runs import write_dataset
from tests.test_utils.layouts import Matrix


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Prefix of a small data set."""
    return write_dataset(tmp_path_factory.mktemp("data") / "numbers")


@pytest.fixture(scope="session")
def matrix(gloo_pool):
    """Layouts against one rank; ``matrix.verdict(row)``."""
    matrix = Matrix(gloo_pool)
    yield matrix
    matrix.close()
