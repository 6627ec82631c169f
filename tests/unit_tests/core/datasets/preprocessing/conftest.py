"""Parts so small that little input has many, and the output that every run of the same documents must give."""

import pytest

from megatron.core.datasets.preprocessing import inputs
from tests.test_utils.preprocessing import DOCUMENTS, jsonl, pair, run


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of 4 kB, so that small inputs have many."""
    monkeypatch.setattr(inputs, "MIN_PART_BYTES", 4096)
    monkeypatch.setattr(inputs, "MAX_PART_BYTES", 4096)
    monkeypatch.setattr(inputs, "READ_BYTES", 1000)


@pytest.fixture
def reference(tmp_path):
    totals, prefix = run(tmp_path, jsonl(), "reference", append_eod=True)
    assert totals.documents == len(DOCUMENTS)
    return pair(prefix)
