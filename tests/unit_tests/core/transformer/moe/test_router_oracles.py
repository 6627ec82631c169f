"""Routers of ``transformers``' models, with the same weights: the same experts, weights and gradients."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.pipeline_parallel.loss_weights import AuxLossWeights
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.moe.router import TopKRouter

HIDDEN, EXPERTS, K = 16, 8, 4
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
           "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
           "moe_router_dtype": "fp32"}  # fmt: skip
MODELS = {
    "MixtralTopKRouter": ("mixtral", {}, {}),
    "Qwen3MoeTopKRouter": ("qwen3_moe", {"norm_topk_prob": True}, {}),
    "Qwen3MoeTopKRouter, not normalised": ("qwen3_moe", {"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
    "DeepseekV3TopkRouter": ("deepseek_v3", {"norm_topk_prob": True}, SIGMOID),
    "GptOssTopKRouter": ("gpt_oss", {}, {"add_bias_linear": True}),
}


def oracle(name, module, settings):
    """Return the router class of transformers; skip the test if this version lacks it."""
    pytest.importorskip("transformers", reason="the oracle is transformers' own router")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    result = getattr(models, name.partition(",")[0], None)
    if result is None:
        pytest.skip(f"this version of transformers has no {name}")
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": K,
             "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}  # fmt: skip
    return result(SimpleNamespace(**sizes, **settings))


@pytest.mark.parametrize("name", MODELS)
def test_experts_weights_and_gradients_are_those_of_transformers(name):
    module, foreign, local = MODELS[name]
    other = oracle(name, module, foreign)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, params_dtype=torch.float32, num_moe_experts=EXPERTS,
        moe_router_topk=K, **{"add_bias_linear": False, **local},
    )  # fmt: skip
    router = TopKRouter(config, layer_number=1, groups=SINGLE_PROCESS)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
        other.load_state_dict(dict(router.named_parameters()), strict=False)
        if router.expert_bias is not None:
            router.expert_bias.uniform_(0.0, 0.2)  # negative sums would meet transformers' mask of zeros
            other.e_score_correction_bias.copy_(router.expert_bias)
    x, y = (torch.randn(6, 3, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in "ab")
    experts, weights, _ = router(x)
    _, their_weights, their_experts = other(y.view(18, HIDDEN))
    their_experts, order = their_experts.view(18, K).sort()
    their_weights = their_weights.view(18, K).gather(1, order)
    experts, order = experts.sort()
    assert torch.equal(experts, their_experts)
    torch.testing.assert_close(weights.gather(1, order), their_weights)
    target = torch.randn(18, K)
    (weights.gather(1, order) * target).sum().backward()
    (their_weights * target).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    for mine, theirs_ in zip(router.parameters(), (other.get_parameter(n) for n, _ in router.named_parameters())):
        torch.testing.assert_close(mine.grad, theirs_.grad, rtol=1e-5, atol=1e-5)


def test_auxiliary_loss_is_that_of_transformers_over_k():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral", reason="the oracle's own loss")
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=K,
        add_bias_linear=False, moe_aux_loss_coeff=[1.0],
    )  # fmt: skip
    router = TopKRouter(config, layer_number=1, groups=SINGLE_PROCESS)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(6, 3, HIDDEN)
    side = AuxLossWeights(torch.full((3,), 6.0), torch.ones(()))
    (router(x, ForwardContext(aux_losses=side)).weights * 0).sum().backward()
    mine, router.weight.grad = router.weight.grad, None
    logits = torch.nn.functional.linear(x, router.weight).flatten(0, 1)
    (mixtral.load_balancing_loss_func((logits,), EXPERTS, K) * 18 / K).backward()
    torch.testing.assert_close(mine, router.weight.grad)
