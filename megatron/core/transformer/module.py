"""Base class of modules that carry a configuration; users' own modules derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.sharding.sharded_tensor import ShardedTensor, module_tensors


class MegatronModule(nn.Module):
    """An ``nn.Module`` with ``config``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def sharded_state_dict(self, prefix: str = "", *unused: Any, **ignored: Any) -> dict[str, ShardedTensor]:
        """This rank's rectangles of all parameters, live, for ``dist_checkpointing.save`` and ``load``."""
        groups = self.__dict__.get("groups") or parallel_state.get_process_groups()
        return module_tensors(self, prefix=prefix, groups=groups)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """torch's own; what ``dist_checkpointing.load`` returned, in the shapes of rectangles, is taken as well."""
        own = self.state_dict()
        if any(name in own and own[name].shape != value.shape for name, value in state_dict.items()):
            live = self.sharded_state_dict()
            if live.keys() == state_dict.keys():
                with torch.no_grad():
                    for name, tensor in live.items():
                        tensor.local.copy_(state_dict[name])
                return super().load_state_dict({}, strict=False)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)
