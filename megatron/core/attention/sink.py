"""Attention sinks: one logit per head in the softmax denominator only (GPT-OSS; off-by-one: Miller 2023).

    p_k = exp(s_k) / (sum_j exp(s_j) + exp(sink))

Kernels do not implement sinks. The sink is added to their output with the log-sum-exp over all keys, lse:

    lse' = log(exp(lse) + exp(sink)),    out' = out exp(lse - lse')

A kernel's backward with out' and lse' gives the gradients of the softmax with the sink, because sum_k p_k dp_k still
equals the dot product of out' and its gradient. The sink's gradient is that product times -exp(sink - lse').

Legend: s sequence (local), b batch, a query heads (local), d head dim."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Normal, Shard, parameter


def has_sink(config: TransformerConfig) -> bool:
    return config.softmax_type != "vanilla"


def add_sink(module: nn.Module, config: TransformerConfig, groups: ProcessGroups) -> None:
    """Set ``module.softmax_offset`` [a] for this rank's heads: None (vanilla), a non-persistent fp32 buffer of zeros
    (off-by-one), or a parameter sharded over the tensor-parallel group (learnable)."""
    heads = config.num_attention_heads
    if config.softmax_type == "learnable":
        module.softmax_offset = parameter(
            (heads,),
            init=Normal(config.init_method_std),
            groups=groups,
            mesh={"tp": Shard(0)},
            dtype=config.params_dtype,
        )
    else:
        zeros = torch.zeros(heads // groups.tp.size) if has_sink(config) else None
        module.register_buffer("softmax_offset", zeros, persistent=False)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Add the sink logits ``sink`` [a] to ``out`` [s, b, a, d] and ``lse`` [s, b, a] (fp32 or fp64, over all keys);
    return new tensors: out in ``dtype``, and lse."""
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * torch.exp(lse - total).unsqueeze(-1)).to(dtype), total


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient of ``sink`` [a] in its dtype, a sum over local tokens that the caller must reduce over
    context-parallel ranks; ``grad`` is dout, ``out`` and ``lse`` include the sink."""
    delta_sba = (grad.to(lse.dtype) * out).sum(-1)
    return -(torch.exp(sink.to(lse.dtype) - lse) * delta_sba).sum((0, 1)).to(sink.dtype)
