"""T5 as programs import it from ``megatron.core.models.T5``."""

from __future__ import annotations

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.t5 import t5_model


class T5Model(t5_model.T5Model):
    """Our model; without ``encoder_config``, which releases before 0.9 did not pass, encoder and decoder share one."""

    def __init__(
        self,
        config: TransformerConfig,
        encoder_config: TransformerConfig | None = None,
        *args: object,
        **kwargs: object,
    ) -> None:
        super().__init__(config, encoder_config or config, *args, **kwargs)
