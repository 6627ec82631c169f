"""Rules of optional packages, attention kernels and CUDA graphs."""

from __future__ import annotations

from megatron.core.config.fp8 import experts_in_fp8
from megatron.core.config.problems import Problems, problem
from megatron.core.extensions.apex import INSTALL as INSTALL_APEX
from megatron.core.extensions.apex import what_is_missing
from megatron.core.extensions.cudnn import CUDNN_LENGTHS, cudnn_supports_lengths
from megatron.core.extensions.flash_attn import INSTALL as INSTALL_FLASH
from megatron.core.extensions.flash_attn import installed_versions
from megatron.core.extensions.installed import is_installed
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import gpu_present

ENGINE = "transformer_engine"
_LOCAL = "--transformer-impl local"


def transformer_engine_available(cfg: PretrainConfig) -> Problems:
    """Reject Transformer Engine's layers without a GPU. Without the package, local layers replace them (``get_backend``
    logs it). Checks nothing in a dry run."""
    if cfg.model.transformer_impl != ENGINE or cfg.program.dry_run or not is_installed(ENGINE):
        return
    if not gpu_present():
        yield problem(cfg, "transformer_impl", "requires an NVIDIA GPU; this machine lacks one", _LOCAL)


def nccl_requires_gpus(cfg: PretrainConfig) -> Problems:
    """A process without a launcher builds no process group; a dry run does not depend on the machine it runs on."""
    launched = launched_world_size() is not None and not cfg.program.dry_run
    if cfg.distributed.distributed_backend == "nccl" and launched and not gpu_present():
        yield problem(cfg, "distributed_backend", "requires NVIDIA GPUs, but this process sees none", "use gloo")


def cudnn_sequence_length(cfg: PretrainConfig) -> Problems:
    """Reject --attention-backend fused if cuDNN computes attention and does not support --seq-length."""
    model = cfg.model
    in_blocks = model.context_parallel_size > 1 and "a2a" not in model.cp_comm_type  # odd blocks go to the flash kernel
    if model.attention_backend != "fused" or model.transformer_impl == ENGINE or in_blocks:
        return
    length, on_gpu = cfg.data.seq_length or 0, gpu_present() or cfg.program.dry_run
    is_cudnn = (
        on_gpu and (model.bf16 or model.fp16) and not model.attention_dropout and model.flash_attention_version is None
    )
    if is_cudnn and not cudnn_supports_lengths(length, length):
        reason = f"uses cuDNN, which requires a multiple of {CUDNN_LENGTHS} tokens, but --seq-length is {length}"
        yield problem(cfg, "attention_backend", reason, "--attention-backend auto")


def flash_attention_installed(cfg: PretrainConfig) -> Problems:
    version = cfg.model.flash_attention_version
    if version is not None and version not in installed_versions() and not cfg.program.dry_run:
        fix = f"{INSTALL_FLASH[version]}, or remove it"
        yield problem(cfg, "flash_attention_version", "needs a package that is not installed", fix)


def apex_installed(cfg: PretrainConfig) -> Problems:
    """Reject --apex-parts, except in a dry run, if packages or GPUs are missing."""
    parts = list(dict.fromkeys(cfg.model.apex_parts))
    if not parts or cfg.program.dry_run:
        return
    if missing := [lacking for part in parts if (lacking := what_is_missing(part))]:
        yield problem(cfg, "apex_parts", "; ".join(dict.fromkeys(missing)), f"{INSTALL_APEX}, or remove it")
    if not gpu_present():
        yield problem(cfg, "apex_parts", "requires an NVIDIA GPU; this machine lacks one", "remove it")


def cuda_graphs(cfg: PretrainConfig) -> Problems:
    """Reject --cuda-graph-impl local with experts whose rows the host reads, and (not in a dry run) without a GPU."""
    model, field = cfg.model, "cuda_graph_impl"
    if cfg.training.cuda_graph_impl != "local":
        return
    widths = [width for width in (model.hidden_size, model.moe_ffn_hidden_size) if width and model.num_moe_experts]
    reasons = {
        "reads the number of tokens per expert (--fp8-format with wide experts)": experts_in_fp8(model),
        f"reads the rows of each expert on the host (widths {widths}, not multiples of 8)": any(
            width % 8 for width in widths
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            reason = f"records one micro-batch as a CUDA graph, which here {reason}"
            yield problem(cfg, field, reason, "leave one of the two out")
    if not gpu_present() and not cfg.program.dry_run:
        yield problem(cfg, field, "requires an NVIDIA GPU; this machine lacks one", "remove it")
