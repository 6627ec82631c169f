"""Attention sinks: a logit per head that joins the softmax and takes part in nothing else (GPT-OSS; off by one: Miller
2023).

    p_k = exp(s_k) / (sum_j exp(s_j) + exp(sink))

Kernels know nothing of it. With their log-sum-exp lse, over all keys,

    lse' = log(exp(lse) + exp(sink)),    out' = out exp(lse - lse')

and their own backward, given out' and lse', is that of the softmax with the sink, since sum_k p_k dp_k is still the
product of out' and its gradient. That product times -exp(sink - lse') is the sink's gradient.

Legend: s sequence (local), b batch, a query heads (local), d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Normal, Shard, parameter


def has_sink(config: TransformerConfig) -> bool:
    return config.softmax_type != "vanilla"


def add_sink(module: nn.Module, config: TransformerConfig, groups: ProcessGroups) -> None:
    """Gives ``module`` its ``softmax_offset`` [a]: None, zeros (off-by-one) or a parameter."""
    heads = config.num_attention_heads
    if config.softmax_type == "learnable":
        module.softmax_offset = parameter(
            (heads,), init=Normal(config.init_method_std), groups=groups, mesh={"tp": Shard(0)},
            dtype=config.params_dtype,
        )  # fmt: skip
    else:
        zeros = torch.zeros(heads // groups.tp.size) if has_sink(config) else None
        module.register_buffer("softmax_offset", zeros, persistent=False)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``out`` [s, b, a, d] and ``lse`` [s, b, a] (fp32 or fp64) over all keys, and ``sink`` [a] as well; out in
    ``dtype``."""
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * torch.exp(lse - total).unsqueeze(-1)).to(dtype), total


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """The gradient of ``sink`` [a] from the output's; ``out`` and ``lse`` are those with it."""
    delta_sba = (grad.to(lse.dtype) * out).sum(-1)
    return -(torch.exp(sink.to(lse.dtype) - lse) * delta_sba).sum((0, 1)).to(sink.dtype)
