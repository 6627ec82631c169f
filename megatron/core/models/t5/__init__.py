"""T5 models."""

from megatron.core.models.t5.t5_model import T5Model

__all__ = ["T5Model"]
