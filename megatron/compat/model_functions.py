"""Small functions and wrappers around models that programs import from several modules of Megatron-LM."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.attention.window import layer_window
from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.sharding.named_slices import NamesSlices
from megatron.core.sharding.placement import ParameterSpec, Shard

ShardedStateDict = dict[str, Any]
"""Annotation of ``sharded_state_dict()``."""


def correct_amax_history_if_needed(model: Sequence[nn.Module]) -> None:
    """Do nothing: weights here have no fp8 history."""


def has_config_logger_enabled(config: object) -> bool:
    """Return False: configurations are logged by the training program."""
    return False


def log_config_to_disk(*args: object, **kwargs: object) -> None:
    """Do nothing; see :func:`has_config_logger_enabled`."""


def jit_fuser(function: Callable) -> Callable:
    """Return ``function``: a fusion would not change its results."""
    return function


def deprecate_inference_params(inference_context: object, inference_params: object) -> Any:
    """The context, under its newer or older name."""
    return inference_params if inference_context is None else inference_context


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """``inp``, with ``keep_graph`` as it is, else as a leaf."""
    return inp if keep_graph else inp.detach().requires_grad_(requires_grad)


def get_bias_dropout_add(training: bool, fused: bool = False) -> Callable[..., Tensor]:
    """A function of ((x, bias or None), residual, probability): residual + dropout(x + bias)."""

    def bias_dropout_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        return residual + F.dropout(x if bias is None else x + bias, prob, training)

    return bias_dropout_add


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Set ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride`` on ``tensor`` where they are missing:
    for our parameters from the declaration, else False, -1 and 1."""
    spec: ParameterSpec | None = getattr(tensor, "spec", None)
    placement = None if spec is None else spec.mesh.get("tp") or spec.mesh.get("etp")
    split = isinstance(placement, Shard)
    dim = -1
    if spec is not None and isinstance(placement, Shard):
        dim = max(placement.dim - (len(spec.shape) - spec.ndim), 0)  # leading logical dims are folded into the first
    for name, value in (("tensor_model_parallel", split), ("partition_dim", dim), ("partition_stride", 1)):
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def check_param_hashes_across_dp_replicas(model: Sequence[nn.Module], cross_check: bool = False) -> bool:
    """Return whether all data-parallel ranks hold the same bits of parameters. Collective. Copies each to the CPU."""
    digest = hashlib.sha256()
    for chunk in model:
        for _, param in chunk.named_parameters():
            digest.update(param.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    group = parallel_state.get_process_groups().dp_cp
    digests: list[object] = [digest.hexdigest()] * group.size
    if group.size > 1:
        dist.all_gather_object(digests, digest.hexdigest(), group=group.handle)
    return len(set(digests)) == 1


def is_layer_window_attention(
    window_size: tuple[int, int] | None, window_attn_skip_freq: int | list[int] | None, layer_number: int
) -> bool:
    """Return whether layer ``layer_number`` (from 1) attends within ``window_size``. Raises ValueError for another
    type of ``window_attn_skip_freq``."""
    if not isinstance(window_attn_skip_freq, int | list | None):
        raise ValueError(f"window_attn_skip_freq {window_attn_skip_freq!r}: must be an integer or a list of 0 and 1")
    return layer_window(window_size or None, window_attn_skip_freq, layer_number) is not None


class Float16Module(NamesSlices):
    """A model in the 16-bit format that ``config.bf16`` or ``config.fp16`` names: floating-point inputs are converted
    to it, and outputs of the last pipeline stage to fp32. State dicts equal the wrapped model's."""

    def __init__(self, config: ModelParallelConfig, module: nn.Module) -> None:
        """Convert ``module`` in place (fp16 if both are set). Raises ValueError if ``config`` has neither."""
        super().__init__()
        if not (config.fp16 or config.bf16):
            raise ValueError("Float16Module: config has neither fp16 nor bf16; set one of them")
        self.config, self.dtype = config, torch.float16 if config.fp16 else torch.bfloat16
        self.vp_stage = getattr(module, "vp_stage", None)
        self.module = module.to(self.dtype)

    def set_input_tensor(self, input_tensor: object) -> None:
        """Hand the previous stage's output to the model."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        named = {name: convert_floats(x, self.dtype) for name, x in kwargs.items()}
        outputs = self.module(*(convert_floats(x, self.dtype) for x in inputs), **named)
        is_last = getattr(self.module, "post_process", True)
        return convert_floats(outputs, torch.float32) if is_last else outputs

    def state_dict(self, *args: object, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def sharded_state_dict(self, *args: object, **kwargs: object) -> Any:
        """Return the model's state dict."""
        return self.module.sharded_state_dict(*args, **kwargs)  # type: ignore[operator]


def convert_floats(x: object, dtype: torch.dtype) -> Any:
    """Return ``x`` with floating-point tensors in ``dtype``, also inside tuples."""
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return tuple(convert_floats(item, dtype) for item in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
