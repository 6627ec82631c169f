"""Weights that are kept more exactly than the model computes with are themselves, unless they are asked for rounded."""

import pytest
import torch
from torch import nn

from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.sharding.sharded_tensor import stored_tensors


@pytest.mark.parametrize("options, dtype", [({}, torch.float32), ({"rounded": True}, torch.bfloat16)])
def test_exact_weights_are_rounded_only_where_asked(options, dtype):
    weight = nn.Parameter(torch.tensor([[1.0, 1.0 + 2**-12]]))
    weight.compute_dtype = torch.bfloat16
    (stored,) = stored_tensors("weight", weight, groups=SINGLE_PROCESS, **options).values()
    assert stored.local.dtype == dtype and torch.equal(stored.local, weight.detach().to(dtype))
