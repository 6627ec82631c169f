"""Settings that the constructors of all language models share."""

import pytest
import torch

from megatron.core.attention.rotary import RotaryEmbedding
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.common.settings import LanguageModelSettings


@pytest.mark.parametrize("kind, is_used", [("rope", True), ("yarn", True), ("learned_absolute", False)])
def test_rotary_table_of_window_layers_is_not_scaled(kind, is_used):
    settings = LanguageModelSettings(
        vocab_size=8, max_sequence_length=8, position_embedding_type=kind, seq_len_interpolation_factor=4.0,
        rope_scaling=True, rotary_percent=0.5,
    )  # fmt: skip
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, rotary_base_local=100.0)
    result = settings.local_rotary(config)
    assert (result is not None) == is_used
    if is_used:
        torch.testing.assert_close(result(9).sin, RotaryEmbedding(16, 0.5, rotary_base=100.0)(9).sin)
