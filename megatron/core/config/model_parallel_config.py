"""Parallelism and number formats of a model: the base of every library configuration.

The mixins hold fields only and are shared with the command line (``megatron.training.config``), so that a field has one
name, one default and one help text. Torch is imported only when a dtype is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from megatron.core.config.absent import TakesSettings
from megatron.core.config.cli import derived, flag
from megatron.core.config.ranges import Batch, NumRanks, Range

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class ParallelismConfig:
    """Model parallelism"""

    tensor_model_parallel_size: NumRanks = 1
    """Tensor-parallel size (TP): ranks over which every weight matrix is split. Divides the attention heads and the
    feed-forward width; keep a tensor group inside one node."""

    pipeline_model_parallel_size: NumRanks = 1
    """Pipeline-parallel size (PP): stages that the layers are cut into. Micro-batches flow through them one after the
    other."""

    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel regions along the sequence too, which saves their memory at no
    extra communication. Needs --tensor-model-parallel-size > 1."""

    context_parallel_size: NumRanks = 1
    """Context-parallel size (CP): ranks over which every sequence is split, for long contexts. --seq-length must be a
    multiple of twice this number."""

    hierarchical_context_parallel_sizes: list[NumRanks] | None = None
    """Inner and outer group size of two-level context parallelism; their product is --context-parallel-size."""

    cp_comm_type: list[Literal["p2p", "a2a", "allgather", "a2a+p2p"]] = flag(
        "--cp-comm-type", default_factory=lambda: ["p2p"]
    )
    """How context-parallel ranks exchange keys and values: once for all layers, or one value per layer."""

    microbatch_group_size_per_virtual_pipeline_stage: Batch | None = None
    """Micro-batches that an interleaved schedule runs on one model chunk before it turns to the next; default: the
    number of pipeline stages."""

    overlap_p2p_comm: bool = flag("--no-overlap-p2p-communication", default=True)
    """Ask the neighbouring pipeline stage for a value only when it is needed, not while the computation before it still
    runs. Sends never wait."""

    copy_engines: bool = flag("--no-copy-engines", default=True)
    """Send what overlaps with computation between GPUs of one host through NCCL, not through copy engines: the
    collectives of --tp-comm-overlap, the messages between pipeline stages, and tokens on their way to experts
    (--moe-token-dispatcher-type allgather, or padded to capacity). Copy engines leave all SMs to the computation; where
    they do not work NCCL is used anyway."""

    tp_comm_overlap: bool = False
    """Two-batch overlap: tensor-parallel collectives of one half of a micro-batch run beside computation of the other.
    Needs --sequence-parallel and an even --micro-batch-size; keeps the inputs of a layer's first GEMMs whole, for
    memory of twice the hidden states per layer."""

    gradient_accumulation_fusion: bool = True
    """Do not let weight-gradient GEMMs add into the main gradient themselves."""

    apex_parts: list[Literal["wgrad", "norm", "adam"]] = flag("--apex-parts", default_factory=list)
    """Parts that kernels of NVIDIA apex compute instead of built-in ones: weight gradients added into the main gradient
    (wgrad), norms, the update of Adam. For runs that must go on with the kernels that they began with; apex is never
    used otherwise, even if it is installed."""

    cross_entropy_chunk_tokens: Annotated[int, Range(0, 2**31 - 1)] | None = flag("--cross-entropy-chunk-tokens")
    """Output layer and loss take this many tokens at a time, and the logits of all tokens never exist; backward
    computes a chunk's logits again (a third more work in the output layer). 0: as many tokens as give 256 MiB of logits
    per rank."""

    delay_wgrad_compute: bool = False
    """Compute weight gradients apart from input gradients, so that they can fill waiting time."""


@dataclass(kw_only=True)
class PrecisionConfig:
    """Number formats of the model"""

    fp16: bool = False
    """Compute in float16 with a (by default dynamic) loss scale; the optimizer keeps float32 weights."""

    bf16: bool = False
    """Compute in bfloat16; the optimizer keeps float32 weights and gradients accumulate in float32."""

    fp64: bool = derived(False)
    """Parameters, activations and gradients in float64. No flag: comparisons of layouts set it, to tell a wrong result
    from rounding."""

    deterministic_mode: bool = False
    """Only kernels that give the same bits every time; slower."""


def dtype_of(*, fp16: bool, bf16: bool, fp64: bool = False) -> torch.dtype:
    """The parameters' torch dtype under these flags; imports torch."""
    import torch

    if fp64:
        return torch.float64
    if fp16:
        return torch.float16
    return torch.bfloat16 if bf16 else torch.float32


@dataclass(kw_only=True)
class ModelParallelConfig(ParallelismConfig, PrecisionConfig, metaclass=TakesSettings):
    """The library's base configuration, which every parallel module reads."""

    params_dtype: Any = None
    """torch dtype of the parameters; None follows ``fp16`` and ``bf16``."""

    pipeline_dtype: Any = None
    """torch dtype of what pipeline stages send to each other; None: the parameters' dtype."""

    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline rank of an interleaved schedule."""

    grad_scale_func: Any = None
    """For a loop of your own: what schedules apply to the loss of each micro-batch before its backward pass."""

    finalize_model_grads_func: Any = None
    """For a loop of your own: what schedules call after the last backward pass, with the model's chunks and the number
    of tokens that the losses were summed over."""

    def __post_init__(self) -> None:
        if self.params_dtype is None:
            self.params_dtype = dtype_of(fp16=self.fp16, bf16=self.bf16, fp64=self.fp64)
        if self.pipeline_dtype is None:
            self.pipeline_dtype = self.params_dtype
