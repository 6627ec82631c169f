"""Kimi delta attention equals its formulas, token by token, in fp64; planted errors are found."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.backends import get_backend
from megatron.core.models.common.layer_specs import MIXERS
from megatron.core.sharding.placement import initialize_parameters
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.ssm import delta_mixer
from megatron.core.transformer.ssm.gated_norm import GatedNorm
from tests.unit_tests.core.transformer.ssm.recurrences import convolution_by_token, delta_rule_by_token

HEADS, KEY, VALUE, HIDDEN = 2, 5, 3, 8


@pytest.fixture
def mixer():
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, fp64=True, init_method_std=0.5,
        experimental_attention_variant="kda", linear_num_key_heads=HEADS, linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY, linear_value_head_dim=VALUE,
    )  # fmt: skip
    spec = MIXERS["kimi_delta_attention"](get_backend("local"), None, AttnMaskType.causal)
    mixer = build_module(spec, config, layer_number=1, groups=SINGLE_PROCESS)
    initialize_parameters(mixer, 3, SINGLE_PROCESS)
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 1.5)
        mixer.dt_bias.add_(3)  # decays that matter within a few tokens
    return mixer


def by_formulas(mixer, x):
    """y = W_out (RMSNorm(o) * sigmoid(W_gb W_ga x)), o from the recurrence; x [s, b, hidden]."""
    shape = (*x.shape[:2], HEADS, -1)
    rows = mixer.in_proj.weight.view(HEADS, -1, HIDDEN)
    convolved = convolution_by_token(
        x @ rows[:, :-1].reshape(-1, HIDDEN).T, None, x.new_zeros(x.shape[1], 3, HEADS * (2 * KEY + VALUE)),
        mixer.conv1d.weight[:, 0],
    )  # fmt: skip
    query, key, value = F.silu(convolved).view(shape).split((KEY, KEY, VALUE), dim=-1)
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    steps = F.softplus(x @ mixer.f_a_proj.weight.T @ mixer.f_b_proj.weight.T + mixer.dt_bias).view(shape)
    decay = -mixer.A_log.exp()[:, None] * steps
    state = x.new_zeros(x.shape[1], HEADS, KEY, VALUE)
    output, _ = delta_rule_by_token(query / KEY**0.5, key, value, decay, torch.sigmoid(x @ rows[:, -1].T), None, state)
    normed = output / (output.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    gate = torch.sigmoid(x @ mixer.g_a_proj.weight.T @ mixer.g_b_proj.weight.T)
    return (normed.flatten(2) * gate) @ mixer.out_proj.weight.T


def difference(mixer):
    """Largest difference of outputs and gradients from the formulas."""
    x = torch.randn(70, 2, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results = []
    for function in (lambda x: mixer(x, ForwardContext(TokenLayout())), lambda x: by_formulas(mixer, x)):
        leaves = [x.clone().requires_grad_(), *mixer.parameters()]
        output = function(leaves[0])
        results.append([output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)])
    return max((one - other).abs().max().item() for one, other in zip(*results))


def test_outputs_and_gradients_equal_the_formulas(mixer):
    assert difference(mixer) < 1e-10


def decay_after_the_delta(patch):
    def rule(query, key, value, log_decay, *others):
        return correct(query, key, value, F.pad(log_decay[:-1], (0, 0, 0, 0, 0, 0, 1, 0)), *others)

    correct = delta_mixer.delta_rule
    patch.setattr(delta_mixer, "delta_rule", rule)


def one_decay_of_all_channels(patch):
    correct = delta_mixer.delta_rule
    patch.setattr(delta_mixer, "delta_rule", lambda q, k, v, decay, *others: correct(q, k, v, decay.mean(-1), *others))


def gate_before_the_norm(patch):
    def swapped(self, x, gate):
        gated = x * torch.sigmoid(gate)
        return gated / (gated.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight

    patch.setattr(GatedNorm, "forward", swapped)


def silu_of_the_gate(patch):
    correct = GatedNorm.forward
    patch.setattr(GatedNorm, "forward", lambda self, x, gate: correct(self, x, gate) * gate)


@pytest.mark.parametrize(
    "fault", [decay_after_the_delta, one_decay_of_all_channels, gate_before_the_norm, silu_of_the_gate]
)
def test_planted_error_is_found(mixer, monkeypatch, fault):
    fault(monkeypatch)
    assert difference(mixer) > 1e-3
