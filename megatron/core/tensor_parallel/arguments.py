"""Arguments of Megatron-LM's tensor-parallel layers that the local layers do not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.parallel_state import get_process_groups, resolve_group
from megatron.core.sharding.placement import AsBuilt
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

_WITHOUT_EFFECT = {
    "stride": 1,
    "keep_master_weight_for_test": False,
    "embedding_activation_buffer": None,
    "grad_output_buffer": None,
    "tp_comm_buffer_name": None,
    "disable_grad_reduce": False,
    "name": None,
    "output_dtype": None,
    "pg_collection": None,
    "reduce_scatter_embeddings": False,
}
_NAMES_ONLY = {
    "keep_master_weight_for_test",
    "tp_comm_buffer_name",
    "name",
    "embedding_activation_buffer",
    "grad_output_buffer",
    "pg_collection",
}
"""Arguments that are ignored for every value; the others of ``_WITHOUT_EFFECT`` must have their defaults."""


def takes_megatron_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of a layer so that it also accepts Megatron-LM's arguments. Unknown arguments raise
    TypeError as before. ``groups`` defaults to the running program's groups; ``tp_group`` replaces the tensor-parallel
    group. ``init_method`` may be a function that fills this rank's shard in place, inside the default random state if
    the tracker has states; None keeps zeros. ``skip_weight_param_allocation`` sets ``weight`` to None: ``forward`` gets
    one. ``is_expert`` is accepted only if ep, etp and tp have one rank each. ``name``, buffers and ``pg_collection``
    are ignored; the other arguments, such as ``stride``, must have their defaults. Raises UserError: ``is_expert`` with
    several ep, etp or tp ranks, or an unsupported value of another argument."""

    @wraps(init)
    def wrapped(self: Any, *args: object, groups: ProcessGroups | None = None, **arguments: Any) -> None:
        groups = groups or get_process_groups()
        if (tp_group := arguments.pop("tp_group", None)) is not None:
            groups = replace(groups, tp=resolve_group(tp_group))
        if arguments.pop("is_expert", False) and max(groups.ep.size, groups.etp.size, groups.tp.size) > 1:
            raise UserError("is_expert True: experts split over ranks are built by MoELayer only; use that")
        for name in arguments.keys() & _WITHOUT_EFFECT.keys():
            if (value := arguments.pop(name)) != _WITHOUT_EFFECT[name] and name not in _NAMES_ONLY:
                raise UserError(f"{name} {value}: not available in tensor-parallel layers; remove it")
        skips_weight, fill = arguments.pop("skip_weight_param_allocation", False), arguments.get("init_method")
        if callable(fill) or fill is None:
            arguments["init_method"] = AsBuilt()
        init(self, *args, groups=groups, **arguments)
        if skips_weight:
            self.weight = None
        elif callable(fill):
            tracker = get_cuda_rng_tracker()
            with torch.no_grad(), tracker.fork() if tracker.is_initialized() else torch.no_grad():
                fill(self.weight)

    return wrapped
