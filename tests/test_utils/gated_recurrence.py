"""A layer kind that the library does not know: a gated linear recurrence, with its description and its spec.

    h_t = f_t * h_(t-1) + (1 - f_t) * v_t,   y_t = W_out (h_t * silu(g_t)),   f_t = sigmoid(a_t + decay)

a, v and g are products of x_t with one matrix. States are reset at every document. Channels are sharded over the
tensor-parallel ranks. Context-parallel ranks hold chunks of the sequence and exchange one state per chunk
(:func:`scan`), or, as ``ExchangedRecurrence``, tokens for channels.

Legend: s sequence (local), b batch, h hidden, w channels of this rank, c chunks.
"""

import operator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from megatron.core.attention.sequence_states import CacheSpec
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.description.model import Op, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, linear
from megatron.core.models.backends import get_backend
from megatron.core.models.common.layer_specs import layer_spec
from megatron.core.sharding.placement import Shard, Zeros, parameter
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import output_weight_init, weight_init
from megatron.core.transformer.sites import Sited
from megatron.core.transformer.spec_utils import BranchSpec, ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass
class Slots:
    linear_in: object
    linear_out: object


class GatedRecurrence(Sited, nn.Module):
    """[s, b, h] -> [s, b, h]."""

    mixes_tokens, layouts = True, frozenset({"zigzag", "contiguous", "cached"})
    cache_spec = CacheSpec(per_sequence=("state",))
    calls = ("scan",)

    def __init__(self, config, submodules, layer_number=1, *, groups):
        super().__init__()
        self.open_sites()
        self.layer_number = layer_number
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
        keep_sbw = keep_sbw * follows(keep_sbw, ctx.layout)
        states_sbw = self.at.scan(self.states, keep_sbw, new_sbw, ctx.layout)
        return self.linear_out(states_sbw * nn.functional.silu(gate_sbw))[0]

    def states(self, keep_sbw, new_sbw, layout):
        if layout.group.size > 1:
            return scan(keep_sbw, new_sbw, layout)
        zeros = torch.zeros_like(new_sbw[0])
        return layout.scan(self.layer_number, "state", zeros, run, keep_sbw, new_sbw)

    @staticmethod
    def describe(config, place):
        """Two GEMMs, and a scan that keeps ten tensors as wide as a state."""
        width, item = 2 * config.hidden_size, activation_bytes(config)
        into = linear("linear_in", (3, width), config.hidden_size, 1, bias=False)
        out = linear("linear_out", (config.hidden_size,), width, 1, bias=False)
        narrow = width // config.tensor_model_parallel_size * item
        retained = Saved("states and gates", 10.0 * narrow, ("scan",), ("scan",))
        scan = Op("other", "scan", traffic=16.0 * narrow, gradients=3.0 * narrow, saved=(retained,))
        ops = (gemm(into[0], config, place.seq_length), scan, gemm(out[0], config, place.seq_length))
        params = (*into, Param("decay", (width,), {"tp": 0}, ndim=1), *out)
        return Piece("recurrence", params, ops, settings=("gate_width",))  # a flag that a script may add


def follows(like_sbw, layout):
    """1 where a token follows another of its document, else 0: [s, b, 1]."""
    length, batch = layout.full_length(len(like_sbw)), like_sbw.shape[1]
    mask = like_sbw.new_ones(batch * length)
    if layout.documents is not None:
        mask[layout.documents.cu_seqlens_q[:-1].long()] = 0
    return layout.local(mask.view(batch, length, 1).transpose(0, 1), 0)


def run(keep_sbw, new_sbw, state):
    """All states of consecutive tokens, from the ``state`` before them, and the last one."""
    states = []
    for keep_bw, new_bw in zip(keep_sbw, new_sbw):
        state = keep_bw * state + new_bw
        states.append(state)
    return torch.stack(states), state


def scan(keep_sbw, new_sbw, layout):
    """All states of this rank's tokens. A chunk maps the state h before it to decay * h + last; ranks all-gather these
    pairs, of which each derives the states before its own chunks."""
    chunks = [*zip(keep_sbw.chunk(layout.num_chunks), new_sbw.chunk(layout.num_chunks))]
    zero = torch.zeros_like(new_sbw[0])
    decays_cbw = torch.stack([reduce(operator.mul, keep.unbind()) for keep, _ in chunks])
    last_cbw = torch.stack([run(*chunk, zero)[1] for chunk in chunks])
    decays_cbw, last_cbw = layout.full(decays_cbw, 0), layout.full(last_cbw, 0)
    starts = [zero]
    for decay, last in zip(decays_cbw[:-1], last_cbw[:-1]):
        starts.append(decay * starts[-1] + last)
    starts_cbw = layout.local(torch.stack(starts), 0)
    return torch.cat([run(*chunk, start)[0] for chunk, start in zip(chunks, starts_cbw)])


class ExchangedRecurrence(GatedRecurrence):
    """Under context parallelism each rank runs full sequences, in natural order, of some channels."""

    def states(self, keep_sbw, new_sbw, layout):
        keep, new = (x[..., 0] for x in layout.heads(keep_sbw[..., None], new_sbw[..., None]))
        return layout.tokens(run(keep, new, torch.zeros_like(new[0]))[0][..., None])[..., 0]


class LocalRecurrence(GatedRecurrence):
    """A recurrence that knows nothing of other ranks, and declares nothing for its ``forward``."""

    def forward(self, x, ctx):
        return super().forward(x, ForwardContext(TokenLayout()))


class ContiguousRecurrence(GatedRecurrence):
    """A recurrence for one chunk per rank."""

    mixes_tokens, layouts = True, frozenset({"contiguous"})


def mixed_layers(config, kind=GatedRecurrence):
    """Cycle of three layer types: attention, the recurrence, the recurrence then attention; each followed by an MLP."""
    backend = get_backend("local")
    slots = Slots(backend.column_parallel_linear, backend.row_parallel_linear)
    kinds = []
    for index in range(config.num_layers):
        attention, mlp = layer_spec(backend).submodules.branches
        recurrence = BranchSpec("recurrence", ModuleSpec(kind, submodules=slots), backend.norm)
        branches = [(attention, mlp), (recurrence, mlp), (recurrence, attention, mlp)][index % 3]
        kinds.append(ModuleSpec(TransformerLayer, submodules=branches))
    return TransformerBlockSubmodules(kinds, backend.norm)


def exchanged_layers(config):
    return mixed_layers(config, ExchangedRecurrence)


def local_layers(config):
    return mixed_layers(config, LocalRecurrence)


def contiguous_layers(config):
    return mixed_layers(config, ContiguousRecurrence)


class Undescribed(GatedRecurrence):
    """A ``GatedRecurrence`` without a description."""

    describe = None


def undescribed_layers(config):
    """Layers of one branch each."""
    backend = get_backend("local")
    slots = Slots(backend.column_parallel_linear, backend.row_parallel_linear)
    branch = BranchSpec("recurrence", ModuleSpec(Undescribed, submodules=slots), backend.norm)
    return ModuleSpec(TransformerLayer, submodules=[branch])
