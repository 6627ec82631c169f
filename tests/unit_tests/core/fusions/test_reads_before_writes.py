"""No thread of a kernel that works in place finds what another has written already: seen in the compiled code."""

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiled_kernels(tmp_path_factory):
    """From a process in which kernels are compiled and not interpreted."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outside["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.test_utils.compiled_kernels"]
    return json.loads(subprocess.run(command, env=outside, check=True, capture_output=True, text=True).stdout)


def all_read_before_one_writes(order):
    return re.fullmatch(r"[r|]*\|w[w|]*", order) is not None


def test_values_that_are_read_twice_are_read_by_all_before_one_is_written(compiled_kernels):
    for name, facts in compiled_kernels.items():
        assert "r" in facts["order"] and "w" in facts["order"], name
        if facts["doubled"]:
            assert all_read_before_one_writes(facts["order"]), f"{name}: {facts['order']}"
    assert any(facts["doubled"] for facts in compiled_kernels.values()), "what this test is about does not happen"


@pytest.mark.parametrize(
    "order, safe", [("rr|ww", True), ("r|r|w|w", True), ("rrww", False), ("r|rw", False), ("r|wr", False)]
)
def test_the_rule(order, safe):
    assert all_read_before_one_writes(order) == safe
