"""Rules of fp8 that depend on the machine and on the length of sequences."""

from __future__ import annotations

from megatron.core.config.fp8 import ALIGNED, BLOCK
from megatron.core.config.problems import Problems, problem
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import gpu_present
from megatron.training.rules.common import sequence_lengths

OLDEST = (8, 9)
"""Compute capability of the first GPUs with fp8 tensor cores (Ada, Hopper)."""


def fp8_tokens(cfg: PretrainConfig) -> Problems:
    """Require the tokens of a micro-batch on a rank to be a multiple of 16, or 128 with --fp8-recipe blockwise."""
    model = cfg.model
    if model.fp8 is None or not model.fp8_wgrad:
        return
    blockwise = model.fp8_recipe == "blockwise"
    unit, size = BLOCK if blockwise else ALIGNED, cfg.training.micro_batch_size
    cp = model.context_parallel_size
    tp = model.tensor_model_parallel_size if blockwise and model.sequence_parallel else 1
    parts = {cp * tp: "tokens per rank and micro-batch"}
    if blockwise and cp > 1:  # a block must not mix the two separate parts of a sequence that a rank holds
        parts.setdefault(2 * cp, "tokens in each half of a rank's part of a sequence")
    for field, length in sequence_lengths(cfg):
        for count, what in parts.items():
            tokens = length * (size or 1) // count
            if size and tokens % unit:
                reason = f"gives {tokens} {what}; --fp8-recipe {model.fp8_recipe} requires multiples of {unit}"
                yield problem(cfg, field, reason, "change it or --micro-batch-size")
                break


def fp8_devices(cfg: PretrainConfig) -> Problems:
    """Reject fp8 on GPUs without fp8 tensor cores, and block scales on GPUs other than Hopper. CPUs emulate fp8."""
    if cfg.model.fp8 is None or cfg.program.dry_run or not gpu_present():
        return
    import torch  # a command line without fp8 does without

    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        reason = f"requires a GPU with fp8 tensor cores (compute capability 8.9 or newer), not {capability}"
        yield problem(cfg, "fp8", reason, "remove it")
    elif cfg.model.fp8_recipe == "blockwise" and capability[0] != 9:
        reason = f"requires a Hopper GPU (compute capability 9.0), not {capability}"
        yield problem(cfg, "fp8_recipe", reason, "--fp8-recipe tensorwise")


def fp8_param_gather(cfg: PretrainConfig) -> Problems:
    """Reject --fp8-param-gather with K/V heads that tensor-parallel ranks share: scales would differ."""
    model = cfg.model
    groups, tp = model.num_query_groups, model.tensor_model_parallel_size
    if model.fp8_param_gather and groups and groups < tp and not model.multi_latent_attention:
        reason = f"is not supported with fewer key and value heads ({groups}) than tensor-parallel ranks ({tp})"
        yield problem(cfg, "fp8_param_gather", reason, "remove it")
