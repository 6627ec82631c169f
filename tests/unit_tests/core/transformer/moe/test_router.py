"""The router as a module: its numerics, what it draws, what it counts, what outlives a step."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from megatron.core.sharding.placement import initialize_parameters
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.recompute import recompute

DOUBLE = torch.float64


def make_router(layer_number=1, **overrides):
    settings = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": DOUBLE, "num_moe_experts": 8,
        "moe_router_topk": 2, "add_bias_linear": False, "init_method_std": 0.5, **overrides,
    }  # fmt: skip
    router = TopKRouter(TransformerConfig(**settings), layer_number=layer_number, groups=SINGLE_PROCESS)
    initialize_parameters(router, 7, SINGLE_PROCESS)
    return router


def hidden(s=6, b=3, h=16, dtype=DOUBLE):
    return torch.randn(s, b, h, generator=torch.Generator().manual_seed(5), dtype=DOUBLE).to(dtype)


def context(s=6, b=3, first_sample=0):
    coordinates = DropoutCoordinates(DropoutStream(3), first_sample + torch.arange(b), torch.arange(s))
    return ForwardContext(dropout=coordinates)


def test_routing_of_a_plain_router():
    router, x = make_router(), hidden()
    experts, weights = router(x)
    logits = F.linear(x, router.weight).view(18, 8)
    assert experts.dtype == torch.int64 and torch.equal(experts, logits.topk(2).indices)
    torch.testing.assert_close(weights, logits.topk(2).values.softmax(-1))


def test_counts_of_a_step():
    router, x = make_router(moe_expert_capacity_factor=0.5), hidden()
    experts, weights = router(x)
    sizes = router.statistics.sizes
    taken = dict(zip(sizes, router.statistics.take(x.device).split([*sizes.values()])))
    assert taken["tokens_per_expert"].tolist() == experts.flatten().bincount(minlength=9)[:8].tolist()
    assert taken["tokens_per_expert"].max() <= 3 and taken["dropped"].item() == 36 - taken["tokens_per_expert"].sum()
    assert taken["nonfinite_router_logits"].item() == 0 and torch.equal(weights == 0, experts == 8)
    router.eval()(x)
    assert not router.statistics.take(x.device).any()
