"""The attention core of plain torch operations, of one rank."""

import dataclasses

from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.enums import AttnMaskType
from megatron.core.groups.process_groups import SINGLE_PROCESS


def reference_attention(config, layer_number, mask_type=AttnMaskType.causal):
    """Attention of the same configuration with the unfused kernel on one rank, ignoring the configured values."""
    plain = {"attention_backend": "unfused", "flash_attention_version": None, "context_parallel_size": 1}
    return CoreAttention(dataclasses.replace(config, **plain), layer_number, mask_type, groups=SINGLE_PROCESS)
