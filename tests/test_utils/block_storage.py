"""Weights in 8-bit blocks, which no file under ``megatron/`` refers to: an int8 code per element and an fp32 scale per
block of 128.

GEMMs read ``code * scale``; the optimizer updates an exact copy of the shard; an all-gather sends 132 bytes per block.
"""

import torch
from torch.nn import functional as F

from megatron.core.fusions.storage import Copy
from megatron.core.sharding.placement import declare


class Blocks(Copy):
    block = 128
    payload_bytes = 128 + 4

    def __init__(self, weight):
        super().__init__(weight)
        self.kept_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.nudges_ties = False

    @property
    def dtype(self):
        return self.kept_dtype

    def write(self, value):
        if value is not self.kept:
            self.kept.copy_(value)
        self.install(self.payload(), self.weight.view(-1))

    def refresh(self):
        self.write(self.weight)

    def payload(self):
        flat = self.kept.reshape(-1)
        blocks = F.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        scales = (blocks.abs().amax(dim=1, keepdim=True) / 127).to(torch.float32)
        codes = (blocks / scales.clamp(min=1e-30)).round().to(torch.int8)
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=1)

    @classmethod
    def install(cls, payload, weight):
        codes, scales = payload.split([cls.block, 4], dim=1)
        values = codes.view(torch.int8).to(weight.dtype) * scales.contiguous().view(torch.float32)
        weight.copy_(values.to(weight.dtype).view(-1)[: weight.numel()])


def declare_blocks(model):
    """Keep every matrix of the stack in blocks."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".layers." in name:
            declare(parameter, storage=Blocks)
    return model


def with_blocks(task_class):
    """A task whose model declares the storage."""

    class WithBlocks(task_class):
        def model_provider(self, pre_process=True, post_process=True, vp_stage=None):
            return declare_blocks(super().model_provider(pre_process, post_process, vp_stage))

    return WithBlocks
