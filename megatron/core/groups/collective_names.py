"""Collectives that torch 2.13 renamed; uses the names for which the installed torch emits no deprecation warning."""

import torch.distributed as dist

# (output, input, op, group, async_op); torch 2.11 and 2.12 have only the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
