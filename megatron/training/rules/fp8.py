"""Rules of fp8 that depend on the machine and on the length of sequences."""

from __future__ import annotations

from megatron.core.config.fp8 import ALIGNED, BLOCK
from megatron.core.config.problems import Problems, problem
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.rules.backends import ENGINE, gpu_present
from megatron.training.rules.common import sequence_lengths

OLDEST = (8, 9)
"""Compute capability of the first GPUs with fp8 tensor cores (Ada, Hopper)."""


def fp8_tokens(cfg: PretrainConfig) -> Problems:
    """Require the tokens of a micro-batch on a rank to be a multiple of 16, or 128 with --fp8-recipe blockwise: weight
    gradients sum over them."""
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
    if cfg.flat.use_packed_sequence:
        reason = "packs rows of varying lengths; the weight gradients of --fp8-format sum over multiples of 16 tokens"
        yield problem(cfg, "use_packed_sequence", reason, "remove it, or add --no-fp8-wgrad")


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


def fp8_backend(cfg: PretrainConfig) -> Problems:
    """With Transformer Engine's layers, reject delayed scaling (no checkpoint has its state) and weight gradients in 16
    or 32 bits."""
    model, reason = cfg.model, f"is not supported with --transformer-impl {ENGINE}"
    if model.fp8 is None or model.transformer_impl != ENGINE:
        return
    if model.fp8_recipe == "delayed":
        yield problem(cfg, "fp8_recipe", f"{reason}: checkpoints would not hold its scales", "tensorwise")
    if not model.fp8_wgrad:
        yield problem(cfg, "fp8_wgrad", reason, "remove it, or --transformer-impl local")


def fp8_param_gather(cfg: PretrainConfig) -> Problems:
    """Reject --fp8-param-gather without fp8, without sharded optimizer state, or with fewer key and value heads than
    tensor-parallel ranks, whose shared weights have separate scales."""
    model, field = cfg.model, "fp8_param_gather"
    if not model.fp8_param_gather:
        return
    if model.fp8 is None:
        yield problem(cfg, field, "gathers weights of fp8 layers, but there are none", "add --fp8-format hybrid")
    if not (cfg.distributed.use_torch_fsdp2 or cfg.distributed.use_distributed_optimizer):
        fix = "add --use-distributed-optimizer or --use-torch-fsdp2"
        yield problem(cfg, field, "requires sharded optimizer state", fix)
    groups, tp = model.num_query_groups, model.tensor_model_parallel_size
    if groups and groups < tp and not model.multi_latent_attention:
        reason = f"is not supported with fewer key and value heads ({groups}) than tensor-parallel ranks ({tp})"
        yield problem(cfg, field, reason, "remove it")
