"""A layer kind that the library does not know: a gated linear recurrence, with its description and its spec.

    h_t = f_t * h_(t-1) + (1 - f_t) * v_t,   y_t = W_out (h_t * silu(g_t)),   f_t = sigmoid(a_t + decay)

a, v and g are products of x_t with one matrix. States are reset at every document. Channels are sharded over the
tensor-parallel ranks; each rank sees all positions.

Legend: s sequence, b batch, h hidden, w channels of this rank.
"""

from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.description.model import Op, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, linear
from megatron.core.models.backends import get_backend
from megatron.core.models.common.layer_specs import layer_spec
from megatron.core.sharding.placement import Shard, Zeros, parameter
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.initial_values import output_weight_init, weight_init
from megatron.core.transformer.spec_utils import BranchSpec, ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass
class Slots:
    linear_in: object
    linear_out: object


class GatedRecurrence(nn.Module):
    """[s, b, h] -> [s, b, h]."""

    def __init__(self, config, submodules, *, groups):
        super().__init__()
        width, common = 2 * config.hidden_size, {"config": config, "bias": False, "groups": groups}
        self.linear_in = build_module(
            submodules.linear_in, config.hidden_size, StackedSize((3, width), 1), init_method=weight_init(config),
            **common,
        )  # fmt: skip
        self.decay = parameter((width,), init=Zeros(), mesh={"tp": Shard(0)}, groups=groups, dtype=config.params_dtype)
        self.linear_out = build_module(
            submodules.linear_out, width, config.hidden_size, init_method=output_weight_init(config), **common
        )

    def forward(self, x, ctx):
        forget_sbw, value_sbw, gate_sbw = self.linear_in(x)[0].chunk(3, dim=-1)
        keep_sbw = torch.sigmoid(forget_sbw + self.decay)
        new_sbw = (1 - keep_sbw) * value_sbw
        keep_sbw = keep_sbw * follows(keep_sbw, ctx.packed_seq_params)
        state, states = torch.zeros_like(new_sbw[0]), []
        for keep_bw, new_bw in zip(keep_sbw, new_sbw):
            state = keep_bw * state + new_bw
            states.append(state)
        return self.linear_out(torch.stack(states) * nn.functional.silu(gate_sbw))[0]

    @staticmethod
    def describe(config, place):
        """Two GEMMs, and a scan that keeps ten tensors as wide as a state."""
        width, item = 2 * config.hidden_size, activation_bytes(config)
        into = linear("linear_in", (3, width), config.hidden_size, 1, bias=False)
        out = linear("linear_out", (config.hidden_size,), width, 1, bias=False)
        narrow = width // config.tensor_model_parallel_size * item
        kept = Saved("states and gates", 10.0 * narrow)
        scan = Op("other", "scan", traffic=16.0 * narrow, gradients=3.0 * narrow, saved=(kept,))
        ops = (gemm(into[0], config, place.seq_length), scan, gemm(out[0], config, place.seq_length))
        params = (*into, Param("decay", (width,), {"tp": 0}, ndim=1), *out)
        return Piece("recurrence", params, ops, settings=("gate_width",))  # a flag that a script may add


def follows(like_sbw, packed):
    """1 where a token follows another of its document, else 0: [s, b, 1]."""
    length, batch = like_sbw.shape[:2]
    mask = like_sbw.new_ones(batch * length)
    if packed is not None:
        mask[packed.cu_seqlens_q[:-1].long()] = 0
    return mask.view(batch, length, 1).transpose(0, 1)


def mixed_layers(config):
    """Cycle of three layer types: attention, the recurrence, the recurrence then attention; each followed by an MLP."""
    backend = get_backend("local")
    slots = Slots(backend.column_parallel_linear, backend.row_parallel_linear)
    kinds = []
    for index in range(config.num_layers):
        attention, mlp = layer_spec(backend).submodules.branches
        recurrence = BranchSpec("recurrence", ModuleSpec(GatedRecurrence, submodules=slots), backend.norm)
        branches = [(attention, mlp), (recurrence, mlp), (recurrence, attention, mlp)][index % 3]
        kinds.append(ModuleSpec(TransformerLayer, submodules=branches))
    return TransformerBlockSubmodules(kinds, backend.norm)


class Undescribed(GatedRecurrence):
    """A ``GatedRecurrence`` without a description."""

    describe = None


def undescribed_layers(config):
    """Layers of one branch each."""
    backend = get_backend("local")
    slots = Slots(backend.column_parallel_linear, backend.row_parallel_linear)
    branch = BranchSpec("recurrence", ModuleSpec(Undescribed, submodules=slots), backend.norm)
    return ModuleSpec(TransformerLayer, submodules=[branch])
