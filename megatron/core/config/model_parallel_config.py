"""Parallelism and number formats of a model: the base of every library configuration.

The mixins hold fields only and are shared with the command line (``megatron.training.config``), so that a field has one
name, one default and one help text. Torch is imported only when a dtype is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from megatron.core.config.absent import TakesSettings
from megatron.core.config.cli import derived, flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Batch, Dim, NumRanks, Range

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class ParallelismConfig(FlagGroup):
    """Model parallelism"""

    tensor_model_parallel_size: NumRanks = 1
    """Tensor-parallel size (TP): ranks that split every weight matrix. Must divide the attention heads and the
    feed-forward width; keep a tensor-parallel group inside one node."""

    pipeline_model_parallel_size: NumRanks = 1
    """Pipeline-parallel size (PP): number of stages that the layers are divided into."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence, which saves memory at no extra
    communication. Requires --tensor-model-parallel-size > 1."""

    context_parallel_size: NumRanks = 1
    """Context-parallel size (CP): ranks that split every sequence, for long contexts. --seq-length must be a multiple
    of twice this number."""

    hierarchical_context_parallel_sizes: list[NumRanks] | None = None
    """Inner and outer group size of two-level context parallelism; their product must be --context-parallel-size."""

    cp_comm_type: list[Literal["p2p", "a2a", "allgather", "a2a+p2p"]] = flag(
        "--cp-comm-type", default_factory=lambda: ["p2p"]
    )
    """Exchange of keys and values between context-parallel ranks: one value for all layers, or one per layer."""

    hybrid_context_parallel: bool = flag("--hybrid-context-parallel", "--dynamic-context-parallel", default=False)
    """Choose the context-parallel size of every micro-batch from the lengths of its samples: one rank for short ones, a
    power of two of the data- and context-parallel ranks for long ones. Requires --use-varlen-dataset."""

    min_dynamic_context_parallel_size: NumRanks = 1
    """Smallest context-parallel size with --hybrid-context-parallel, a power of two."""

    max_seqlen_per_dp_cp_rank: Dim | None = None
    """Tokens of a micro-batch that one rank holds, with --use-varlen-dataset. Default: --seq-length /
    --context-parallel-size."""

    microbatch_group_size_per_virtual_pipeline_stage: Batch | None = None
    """Micro-batches that an interleaved schedule runs on one model chunk before the next chunk; default: the number of
    pipeline stages."""

    overlap_p2p_comm: bool = flag("--no-overlap-p2p-communication", default=True)
    """Post pipeline receives ahead, so that p2p overlaps with computation. Sends never block."""

    copy_engines: bool = flag("--no-copy-engines", default=True)
    """Use copy engines instead of NCCL for communication that overlaps with computation between GPUs of one host: the
    collectives of --tp-comm-overlap, pipeline messages, and token dispatch (--moe-token-dispatcher-type allgather, or
    padded to capacity). Copy engines leave all SMs to the computation; NCCL is used where they do not work."""

    tp_comm_overlap: bool = False
    """Two-batch overlap: tensor-parallel collectives of one half of a micro-batch overlap with computation of the
    other. Requires --sequence-parallel and an even --micro-batch-size. Keeps the gathered inputs of a layer's first
    GEMMs: memory of twice the hidden states per layer."""

    gradient_accumulation_fusion: bool = True
    """Accumulate weight gradients into main_grad inside the wgrad GEMM."""

    apex_parts: list[Literal["wgrad", "norm", "adam"]] = flag("--apex-parts", default_factory=list)
    """Operations computed by NVIDIA apex instead of built-in kernels: weight gradients accumulated into main_grad
    (wgrad), norms, the Adam update. For runs that must continue with the kernels that they started with; apex is not
    used otherwise, even if installed."""

    cross_entropy_chunk_tokens: Annotated[int, Range(0, 2**31 - 1)] | None = flag("--cross-entropy-chunk-tokens")
    """Compute output layer and loss this many tokens at a time, so that the logits of all tokens never exist; backward
    recomputes each chunk's logits (a third more work in the output layer). 0: chunks of 256 MiB of logits per rank."""

    delay_wgrad_compute: bool = False
    """Compute weight gradients separately from input gradients, so that they fill waiting time."""


@dataclass(kw_only=True)
class PrecisionConfig(FlagGroup):
    """Number formats of the model"""

    fp16: bool = False
    """Compute in float16 with a (by default dynamic) loss scale; the optimizer keeps float32 weights."""

    bf16: bool = False
    """Compute in bfloat16; the optimizer keeps float32 weights and gradients accumulate in float32."""

    fp64: bool = derived(False)
    """Parameters, activations and gradients in float64. Not a flag: comparisons of layouts set it, to distinguish
    errors from rounding."""

    deterministic_mode: bool = False
    """Use only kernels with bitwise reproducible results; slower."""

    batch_invariant_mode: bool = False
    """Forward pass that adds in a fixed order, so that log-probabilities have the same bits in every batch and layout,
    in training and in generation; slower."""


def parameter_dtype(fp16: bool, bf16: bool, fp64: bool) -> torch.dtype:
    """Return fp64, else fp16, else bf16 if set (no check for several), else fp32. Imports torch."""
    import torch

    if fp64:
        return torch.float64
    if fp16:
        return torch.float16
    return torch.bfloat16 if bf16 else torch.float32


class _FollowingDtype:
    """A field whose value, while it is None, follows from other fields; computed on reading, which imports torch."""

    def __init__(self, follow: Callable[[ModelParallelConfig], torch.dtype]) -> None:
        self.follow = follow

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, config: ModelParallelConfig | None, owner: type | None = None) -> object:
        if config is None:  # the default, which dataclasses ask the class for
            return None
        value = vars(config).get(self.name)
        return self.follow(config) if value is None else value

    def __set__(self, config: ModelParallelConfig, value: object) -> None:
        vars(config)[self.name] = value


def _dtype_between_stages(config: ModelParallelConfig) -> torch.dtype:
    """fp32 where the residual stream, which stages pass on, is in fp32; else the parameters' dtype."""
    import torch

    return torch.float32 if getattr(config, "fp32_residual_connection", False) else config.params_dtype


@dataclass(kw_only=True)
class ModelParallelConfig(ParallelismConfig, PrecisionConfig, metaclass=TakesSettings):
    """The library's base configuration, which every parallel module reads."""

    params_dtype: Any = _FollowingDtype(lambda config: parameter_dtype(config.fp16, config.bf16, config.fp64))
    """torch dtype of the parameters; None follows ``fp16`` and ``bf16``."""

    pipeline_dtype: Any = _FollowingDtype(_dtype_between_stages)
    """torch dtype of messages between pipeline stages; None: the parameters' dtype, or fp32 with
    ``fp32_residual_connection``."""

    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline rank of an interleaved schedule."""

    variable_seq_lengths: bool = False
    """Whether micro-batches of a pipeline differ in their shapes, which stages then send ahead. Without a pipeline it
    changes nothing."""

    grad_scale_func: Callable[..., object] | None = None
    """For custom training loops: function that schedules apply to the loss of each micro-batch before backward."""

    finalize_model_grads_func: Callable[..., object] | None = None
    """For custom training loops: function that schedules call after the last backward pass, with the model chunks and
    the number of tokens that the losses were summed over."""
