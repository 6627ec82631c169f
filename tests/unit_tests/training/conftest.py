"""Checkpoints to load, and the states that they must restore."""

import pytest

from tests.test_utils.checkpointed_run import Run, settings


@pytest.fixture(scope="module")
def snapshots():
    """bits() after 0, 1, 2 … iterations."""
    run = Run(settings())
    return [run.train(1).bits() if i else run.bits() for i in range(8)]


@pytest.fixture
def two(tmp_path):
    """Checkpoints of iterations 1 and 2."""
    run = Run(settings(tmp_path)).train(1)
    run.save()
    run.train(1).save()
    return tmp_path
