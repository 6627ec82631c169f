"""Configuration of the Muon optimizer, and the choice of parameters that it updates. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import PositiveFloat, Probability, Range

MUON_OPTIMIZERS = ("muon", "adaptive_muon")


@dataclass(kw_only=True)
class MuonConfig(FlagGroup):
    """Muon"""

    muon_momentum: Probability = 0.9
    """Muon: decay of the momentum."""

    muon_nesterov: bool = False
    """Muon: Nesterov momentum."""

    muon_split_qkv: bool = flag("--muon-no-split-qkv", default=True)
    """Muon: orthogonalize queries, keys and values of a fused projection as separate matrices."""

    muon_split_qkv_per_head: bool = False
    """Muon: orthogonalize the rows of each attention head separately, including multi-latent attention."""

    muon_split_gate_up: bool = False
    """Muon: orthogonalize gate and up of a gated MLP as two matrices; default: as one matrix of both."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Muon: scale of an update [out, in]: sqrt(max(out, in)), sqrt(out / in) or sqrt(max(1, out / in))."""

    muon_extra_scale_factor: PositiveFloat = 1.0
    """Muon: additional factor of the updates; 0.2 with spectral matches AdamW's update size."""

    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "deepseekv4", "cubic5"] = "quintic"
    """Muon: coefficients of the Newton-Schulz iteration; deepseekv4 is meant for 10 steps, cubic5 for 5."""

    muon_num_ns_steps: Annotated[int, Range(1, 100)] = 5
    """Muon: Newton-Schulz steps."""

    muon_fp32_matmul_prec: Literal["low", "medium", "high", "highest"] = "medium"
    """Muon: precision of the Newton-Schulz GEMMs: bf16 (medium), TF32 on GPUs (high) or fp32 (highest)."""

    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "duplicated"
    """Muon: orthogonalization of tensor-parallel matrices; duplicated and distributed both deal full matrices."""

    muon_use_syrk: bool = False
    """Muon: compute one half of symmetric products, by a Triton kernel on GPUs; bf16 (medium precision)."""

    muon_scalar_optimizer: Literal["adam", "lion"] = "adam"
    """Muon: optimizer of embeddings, output layer, norms and biases; reads the --adam-* or --lion-* flags."""

    adaptive_muon_moment2_method: Literal["adamuon", "normuon"] = "adamuon"
    """Adaptive Muon: second moment of orthogonalized updates per element (adamuon), or per row or column (normuon)."""

    adaptive_muon_beta2: Probability = 0.95
    """Adaptive Muon: decay of the second moment."""

    adaptive_muon_eps: PositiveFloat = 1e-8
    """Adaptive Muon: added to the root of the second moment (adamuon), or its minimum (normuon)."""


def is_hidden_matrix(name: str, ndim: int) -> bool:
    """Return whether Muon updates the parameter with this global name and number of stored dims: a matrix, but no
    embedding, table of relative positions or output layer. Stacked biases of experts are no matrices."""
    is_end = "embedding" in name or name.endswith(("output_layer.weight", "relative_attention_bias.weight"))
    return ndim == 2 and not is_end and not name.endswith("bias")
