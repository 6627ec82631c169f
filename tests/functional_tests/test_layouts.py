"""The matrix: every layout gives the one-rank answer.

A row is a model (flags that change the numbers) and a layout (flags that must not). Ten steps of a tiny GPT on random
tokens with random loss masks, fully masked rows among them; then losses, statistics of modules (the load of experts),
the gathered gradient of every parameter, the gradient norm and all weights after every step are those of one rank with
the whole batch in one micro-batch, to 1e-10 in float64 and 1e-5 in float32; initial weights and copies of a weight
agree to the bit.

Rows that never find what the others miss (``EXTENDED``) run in ``tests/torture/layouts.py`` only.
"""

import pytest

from tests.test_utils.layout_table import (
    EXTENDED,
    EXTENDED_THROUGH_COPY_ENGINES,
    TABLE,
    THROUGH_COPY_ENGINES,
    row,
)


@pytest.mark.parametrize("name", [name for name in TABLE if name not in EXTENDED])
def test_layout_equals_one_rank(matrix, name):
    verdict = matrix.verdict(row(name))
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


@pytest.mark.parametrize("name", [name for name in THROUGH_COPY_ENGINES if name not in EXTENDED_THROUGH_COPY_ENGINES])
def test_layout_equals_one_rank_through_copy_engines(matrix, name):
    verdict = matrix.verdict(row(name), "through_copy_engines")
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


def test_the_table_is_large_enough():
    assert len({(name, *rest) for name, *rest in TABLE.values()}) == len(TABLE) >= 240
    assert set(TABLE) > EXTENDED and len(TABLE) - len(EXTENDED) >= 105
    assert set(THROUGH_COPY_ENGINES) > EXTENDED_THROUGH_COPY_ENGINES
