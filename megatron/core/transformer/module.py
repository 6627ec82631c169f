"""Base class of modules that carry a configuration; users' own modules derive from it."""

from __future__ import annotations

from torch import nn

from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(nn.Module):
    """An ``nn.Module`` with ``config``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
