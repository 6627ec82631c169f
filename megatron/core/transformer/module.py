"""Base class of modules with a configuration, also for custom modules of programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron import serve_other_names
from megatron.core import parallel_state
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.sharding.named_slices import NamesSlices
from megatron.core.sharding.placement import global_name
from megatron.core.sharding.sharded_tensor import ShardedTensor, module_tensors, with_leading_dims


class MegatronModule(NamesSlices):
    """``nn.Module`` with ``config``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[tuple[int, int, int]] = (), *unused: object, **ignored: object
    ) -> dict[str, ShardedTensor]:
        """Return this rank's shards of all parameters for ``dist_checkpointing.save`` and ``load``. They share memory
        with the parameters. ``sharded_offsets`` adds leading dims, see ``with_leading_dims``."""
        groups = self.__dict__.get("groups") or parallel_state.get_process_groups()
        return with_leading_dims(module_tensors(self, prefix=prefix, groups=groups), sharded_offsets)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict as torch does; keys may be global parameter names. If a shape differs from the module's and
        the keys are those of ``sharded_state_dict``, every tensor is taken as this rank's shard and copied in place,
        and torch's report lists all keys as missing."""
        values = self.state_dict(keep_vars=True)
        specs = {name: getattr(value, "spec", None) for name, value in values.items()}
        names = {global_name(name, spec): name for name, spec in specs.items() if spec and spec.registered_as}
        renamed = {names.get(name, name): value for name, value in state_dict.items()}
        if any(name in values and values[name].shape != value.shape for name, value in renamed.items()):
            live = self.sharded_state_dict()
            if live.keys() == state_dict.keys():
                with torch.no_grad():
                    for name, tensor in live.items():
                        tensor.local.copy_(state_dict[name])
                return super().load_state_dict({}, strict=False)
        return super().load_state_dict(renamed, strict=strict, assign=assign)


serve_other_names(__name__)
