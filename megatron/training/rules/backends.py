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
    """Reject Transformer Engine if the package or a GPU is missing. Checks nothing in a dry run."""
    if cfg.model.transformer_impl != ENGINE or cfg.program.dry_run:
        return
    if not is_installed(ENGINE):
        install = "pip install --no-build-isolation 'transformer_engine[pytorch]'"
        yield problem(cfg, "transformer_impl", "needs a package that is not installed", f"{install}, or {_LOCAL}")
    elif not gpu_present():
        yield problem(cfg, "transformer_impl", "requires an NVIDIA GPU, but this machine has none", _LOCAL)


def batch_invariant_layers(cfg: PretrainConfig) -> Problems:
    """Reject --batch-invariant-mode with layers of Transformer Engine and for models that are not causal."""
    if not cfg.model.batch_invariant_mode:
        return
    if cfg.model.transformer_impl == ENGINE:
        reason = f"is not supported with {_impl(cfg)}, whose order of sums depends on the batch"
        yield problem(cfg, "batch_invariant_mode", reason, _LOCAL)
    if not cfg.family.is_causal:
        reason = f"is not supported by {cfg.family.programs[0].script}: its attention is not causal"
        yield problem(cfg, "batch_invariant_mode", reason, "remove it")


def _impl(cfg: PretrainConfig) -> str:
    return f"--transformer-impl {cfg.model.transformer_impl}"


def nccl_requires_gpus(cfg: PretrainConfig) -> Problems:
    """A process without a launcher builds no process group; a dry run does not depend on the machine it runs on."""
    launched = launched_world_size() is not None and not cfg.program.dry_run
    if cfg.distributed.distributed_backend == "nccl" and launched and not gpu_present():
        yield problem(cfg, "distributed_backend", "requires NVIDIA GPUs, but this process sees none", "use gloo")


def flash_attention_version(cfg: PretrainConfig) -> Problems:
    """Reject --flash-attention-version with other backends, context parallelism (except version 4), attention dropout
    or full precision, and, except in a dry run, if that version is not installed."""
    model = cfg.model
    version, field = model.flash_attention_version, "flash_attention_version"
    if version is None:
        return
    if model.attention_backend not in ("auto", "flash"):
        reason = f"contradicts --attention-backend {model.attention_backend}"
        yield problem(cfg, field, reason, "remove one")
    if model.transformer_impl == ENGINE:
        reason = f"has no effect on {_impl(cfg)}, which selects its own version"
        yield problem(cfg, field, reason, f"remove it, or {_LOCAL}")
    if model.context_parallel_size > 1 and version != 4:
        reason = "does not support context parallelism; only version 4 and torch's kernels do"
        yield problem(cfg, field, reason, "remove it")
    if model.attention_dropout > 0:
        reason = f"contradicts --attention-dropout {model.attention_dropout:g}: its masks would depend on the layout"
        yield problem(cfg, field, reason, "--attention-dropout 0")
    if not (model.bf16 or model.fp16):
        yield problem(cfg, field, "supports only bf16 and fp16", "--bf16")
    if version not in installed_versions() and not cfg.program.dry_run:
        yield problem(cfg, field, "needs a package that is not installed", f"{INSTALL_FLASH[version]}, or remove it")


def logit_softcapping_backend(cfg: PretrainConfig) -> Problems:
    """Reject --attn-logit-softcapping with flash or fused kernels: only the plain torch backend caps logits."""
    model = cfg.model
    if not model.attn_logit_softcapping:
        return
    if model.attention_backend in ("flash", "fused"):
        reason = f"is not supported by --attention-backend {model.attention_backend}"
        yield problem(cfg, "attn_logit_softcapping", reason, "--attention-backend auto")
    if model.flash_attention_version is not None:
        yield problem(cfg, "flash_attention_version", "does not support --attn-logit-softcapping", "remove one")


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


def norm_bias_backend(cfg: PretrainConfig) -> Problems:
    """Reject --disable-norm-bias with LayerNorm of Transformer Engine or Apex, whose kernels always have a bias."""
    model = cfg.model
    if model.norm_bias or model.normalization != "LayerNorm":
        return
    if model.transformer_impl == ENGINE:
        yield problem(cfg, "norm_bias", f"is not supported by the norms of {_impl(cfg)}", f"remove it, or {_LOCAL}")
    if "norm" in model.apex_parts:
        yield problem(cfg, "norm_bias", "is not supported by --apex-parts norm", "leave one of the two out")


def apex_parts(cfg: PretrainConfig) -> Problems:
    """Reject --apex-parts that contradict other flags and, except in a dry run, missing packages or GPUs."""
    model = cfg.model
    parts = list(dict.fromkeys(model.apex_parts))
    clashes = [
        (
            "wgrad",
            not model.gradient_accumulation_fusion,
            "contradicts --no-gradient-accumulation-fusion: it accumulates into the main gradient",
        ),
        (
            "wgrad",
            cfg.distributed.use_torch_fsdp2,
            "contradicts --use-torch-fsdp2, which has no main gradients to accumulate into",
        ),
        (
            "norm",
            model.transformer_impl == ENGINE,
            f"contradicts {_impl(cfg)}: it replaces norms of the built-in layers",
        ),
        ("adam", cfg.optimizer.optimizer != "adam", f"contradicts --optimizer {cfg.optimizer.optimizer}"),
    ]
    for part, clash, reason in clashes:
        if part in parts and clash:
            yield problem(cfg, "apex_parts", f"{part} {reason}", "leave one of the two out")
    if parts and model.fp64:
        yield problem(cfg, "apex_parts", "does not support float64", "remove it")
    if not parts or cfg.program.dry_run:
        return
    if missing := [lacking for part in parts if (lacking := what_is_missing(part))]:
        yield problem(cfg, "apex_parts", "; ".join(dict.fromkeys(missing)), f"{INSTALL_APEX}, or remove it")
    if not gpu_present():
        yield problem(cfg, "apex_parts", "requires an NVIDIA GPU, but this machine has none", "remove it")


def cuda_graphs(cfg: PretrainConfig) -> Problems:
    """Reject --cuda-graph-impl local, one problem per cause, and (not in a dry run) without a GPU."""
    model = cfg.model
    field = "cuda_graph_impl"
    if cfg.training.cuda_graph_impl != "local":
        return
    replicas = cfg.data_parallel_size > 1
    reasons = {
        "contains collectives (--tensor-model-parallel-size)": model.tensor_model_parallel_size > 1,
        "contains collectives (--context-parallel-size)": model.context_parallel_size > 1,
        "waits for other pipeline stages": model.pipeline_model_parallel_size > 1,
        "depends on document boundaries (--reset-attention-mask)": cfg.documents.reset_attention_mask,
        "has a varying length (--use-packed-sequence)": cfg.flat.use_packed_sequence,
        "saves and restores random states (recomputation)": model.recompute_granularity is not None,
        "copies activations to the host": model.fine_grained_activation_offloading,
        "gathers weights (--use-torch-fsdp2)": cfg.distributed.use_torch_fsdp2,
        "starts gradient reductions (--overlap-grad-reduce)": cfg.distributed.overlap_grad_reduce and replicas,
        "waits for parameter all-gathers (--overlap-param-gather)": cfg.distributed.overlap_param_gather and replicas,
        "reads the current loss scale (--mtp-num-layers)": model.mtp_num_layers is not None,
        f"is untested with --transformer-impl {ENGINE}": model.transformer_impl == ENGINE,
        "is untested with --apex-parts": bool({"wgrad", "norm"} & set(model.apex_parts)),
        "is untested with --fp8-param-gather": model.fp8_param_gather,
        "reads the number of tokens per expert (--fp8-format with wide experts)": experts_in_fp8(model),
    }
    for reason, applies in reasons.items():
        if applies:
            reason = f"records one micro-batch as a CUDA graph, which here {reason}"
            yield problem(cfg, field, reason, "leave one of the two out")
    if not gpu_present() and not cfg.program.dry_run:
        yield problem(cfg, field, "requires an NVIDIA GPU, but this machine has none", "remove it")
