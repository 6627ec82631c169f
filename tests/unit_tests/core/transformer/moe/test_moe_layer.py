"""The MoE layer: a shared expert, with and without gate, before or during the token dispatch."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.sharding.placement import initialize_parameters
from megatron.core.tensor_parallel import autograd_handle
from megatron.core.transformer.spec_utils import build_module

LENGTH, BATCH, HIDDEN = 4, 2, 8
DOUBLE = torch.float64


def build(groups=SINGLE_PROCESS, **overrides):
    settings = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 1, "ffn_hidden_size": 16, "swiglu": True,
        "num_moe_experts": 4, "params_dtype": DOUBLE, "add_bias_linear": False, "init_method_std": 0.4,
        "moe_shared_expert_intermediate_size": 12,
    }  # fmt: skip
    config = TransformerConfig(**(settings | overrides))
    slot = get_gpt_decoder_block_spec(config, use_transformer_engine=False).layer_specs[0].submodules.mlp
    layer = build_module(slot, config, groups=groups)
    initialize_parameters(layer, 3, groups)
    return layer


def inputs():
    x = torch.randn(LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    return x.requires_grad_()


@pytest.mark.parametrize("gate", [False, True])
def test_the_shared_expert_takes_every_token(gate):
    layer, single = build(moe_shared_expert_gate=gate), build(moe_shared_expert_intermediate_size=None)
    single.load_state_dict({name: value for name, value in layer.state_dict().items() if "shared" not in name})
    x, shared = inputs(), layer.shared_experts
    assert layer.router.statistics.label == "layer 1"
    gate_up = x @ shared.linear_fc1.weight.t()
    expected = (torch.nn.functional.silu(gate_up[..., :12]) * gate_up[..., 12:]) @ shared.linear_fc2.weight.t()
    if gate:
        expected = expected * torch.sigmoid(x @ shared.gate_weight[0]).unsqueeze(-1)
    torch.testing.assert_close(layer(x), single(x) + expected)


def gradients(layer, recorder=None):
    x = inputs()
    output = layer(x)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=DOUBLE).view_as(output))
    return [output.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def both_orders(rank, world, kind):
    """Results without and with overlap, and what happened in the latter."""
    groups = parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    results, events = [], []
    for overlaps in (False, True):
        layer = build(groups, moe_shared_expert_overlap=overlaps, moe_token_dispatcher_type=kind)
        with pytest.MonkeyPatch.context() as patch:
            record(patch, events if overlaps else [], layer)
            results.append(gradients(layer))
    return results, "".join(events)


def record(patch, events, layer):
    """s: a collective starts, e: its end is waited for, m: the shared expert multiplies."""

    class Recorded:
        def __init__(self, handle):
            self.handle = handle

        def wait(self):
            events.append("e")
            return self.handle.wait()

    def started(function):
        def start(x, group, **sizes):
            events.append("s")
            return Recorded(function(x, group, **sizes))

        return start

    for name in ("begin_all_gather", "begin_reduce_scatter", "begin_all_to_all"):
        patch.setattr(autograd_handle, name, started(getattr(autograd_handle, name)))
    for linear in (layer.shared_experts.linear_fc1, layer.shared_experts.linear_fc2):
        linear.register_forward_hook(lambda *_: events.append("m"))
        linear.register_full_backward_hook(lambda *_: events.append("m"))


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_the_shared_expert_computes_while_tokens_travel(gloo_pool, kind):
    for (apart, adjacent), events in gloo_pool.run(both_orders, 2, kind):
        for mine, expected in zip(adjacent, apart):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
        forward, backward = "ssmmeese", "sessmmee"
        assert events == forward + backward
