"""Bytes that unfused attention moves: the description against the operations that torch executes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.attention.description import unfused_traffic
from megatron.core.attention.dropout import WeightDropout
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.masks import Mask
from megatron.core.attention.tiles import Visibility, full_tile
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.random import philox
from megatron.core.random.philox import DropoutStream

GEMMS = {"aten.bmm.default", "aten.mm.default"}
NO_KERNEL = {"aten.detach.default", "aten._unsafe_view.default", "aten.empty.memory_format"}
LENGTH, HEADS, CHANNELS = 1024, 2, 16


class CountBytes(TorchDispatchMode):
    """Sums the sizes of the inputs and outputs of all operations but GEMMs and views."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and str(func) not in GEMMS | NO_KERNEL:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors)
        return result


def counted(run):
    with CountBytes() as count:
        result = run()
    return count.bytes / (LENGTH * LENGTH * HEADS), result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"attention_softmax_in_fp32": True}, {"attn_logit_softcapping": 5.0},
                                     {"context_parallel_size": 2}])  # fmt: skip
def test_traffic_equals_bytes_of_the_kernels_operations(dtype, dropout, options, monkeypatch):
    monkeypatch.setattr(philox, "_array", lambda values: values)  # as on a GPU: in torch operations
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS,
                               attention_dropout=dropout, bf16=dtype == torch.bfloat16, **options)  # fmt: skip
    kernel = UnfusedAttention(CHANNELS**-0.5, softmax_in_fp32=config.attention_softmax_in_fp32,
                              soft_cap=config.attn_logit_softcapping)  # fmt: skip
    samples = torch.arange(1)
    drop = WeightDropout(DropoutStream(1), dropout, ("layer", 1), 0, samples) if dropout else None
    mask = Mask(Visibility(True, None), dropout=drop)
    generator = torch.Generator().manual_seed(3)
    shape = (LENGTH, 1, HEADS, CHANNELS)
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    kernel.attend(*inputs, Mask(mask.visibility))  # builds the causal mask, which later calls reuse
    if options.get("context_parallel_size"):
        tile = full_tile(LENGTH, LENGTH, mask.visibility)
        block = kernel.with_mask(mask)
        query, key, value = (x.detach().permute(1, 2, 0, 3) for x in inputs)
        forward, (out, lse) = counted(lambda: block.forward(query, key, value, tile))
        backward, _ = counted(lambda: block.backward(out.to(dtype), query, key, value, out, lse, tile))
    else:
        forward, out = counted(lambda: kernel.attend(*inputs, mask))
        grad = torch.ones_like(out)
        backward, _ = counted(lambda: out.backward(grad))
    assert unfused_traffic(config) == pytest.approx((forward, backward), rel=0.12, abs=1.5)
