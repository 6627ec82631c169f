"""Collectives that torch 2.13 renamed, by the names that the installed torch does not warn of."""

import torch.distributed as dist

# (output, input, op, group, async_op); 2.11 and 2.12 have the old names only
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
