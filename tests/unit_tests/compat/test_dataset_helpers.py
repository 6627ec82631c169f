"""Index builders as existing programs call them."""

import numpy as np
import pytest

from megatron.core.datasets import helpers, helpers_cpp
from megatron.data import helpers as ours
from megatron.data import sentence_map


@pytest.mark.parametrize("module", [helpers, helpers_cpp])
def test_builders_take_the_arguments_that_programs_give(module):
    source, sample = np.zeros(9, dtype=np.int16), np.zeros(9, dtype=np.int64)
    module.build_blending_indices(source, sample, np.array([0.7, 0.3]), 2, 9, True)
    expected = ours.build_blending_indices(np.array([0.7, 0.3]), 9)
    np.testing.assert_array_equal([source, sample], expected)
    module.build_exhaustive_blending_indices(source, sample, np.array([4, 5], dtype=np.int64), 2)
    np.testing.assert_array_equal([source, sample], ours.build_exhaustive_blending_indices(np.array([4, 5])))

    sizes, documents = np.array([5, 6, 7, 8], dtype=np.int32), np.array([0, 2, 4])
    rows = module.build_mapping(documents, sizes, 1, 100, 9, 0.1, 7, False, 2)
    np.testing.assert_array_equal(rows, sentence_map.build_mapping(documents, sizes, 1, 100, 9, 0.1, 7, 2))
    blocks = module.build_blocks_mapping(documents, sizes, np.array([1, 1]), 1, 100, 9, 7, False, True)
    assert sorted(blocks.tolist()) == [[0, 2, 0, 0], [2, 4, 1, 1]]
    index = module.build_sample_idx_int32(sizes, np.arange(4, dtype=np.int32), 5, 1, 26, True, 1)
    assert index.dtype == np.int32 and index.tolist()[-1] == [3, 7]
