"""Import path of Megatron-LM for :class:`megatron.core.config.optimizer.OptimizerConfig`."""

from megatron import serve_other_names
from megatron.core.config.optimizer import OptimizerConfig

__all__ = ["OptimizerConfig"]

serve_other_names(__name__)
