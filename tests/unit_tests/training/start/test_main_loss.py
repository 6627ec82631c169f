"""Forward steps that pass no weight of the main loss get it; without a loss mask auxiliary losses are an error."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.start.main_loss import supply_main_loss


class Model(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, **settings)
        self.given = None

    def forward(self, tokens, *, loss_mask=None, main_loss=None):
        self.given = SimpleNamespace(loss_mask=loss_mask, main_loss=main_loss)


EXPERTS = {"num_moe_experts": 2, "moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}
TOKENS = torch.zeros(1, 2)


def build(**settings):
    model, weight = Model(**settings), torch.tensor(0.5)
    supply_main_loss([model], weight)
    return model, weight


def test_a_forward_step_without_a_weight_gets_the_live_one():
    model, weight = build(**EXPERTS)
    model(TOKENS, loss_mask=TOKENS)
    weight.fill_(0.25)
    assert model.given.main_loss.scale is weight and model.given.main_loss.tokens_b is None


def test_a_given_weight_stays():
    model, _ = build(**EXPERTS)
    local = MainLoss(torch.tensor(3.0))
    model(TOKENS, main_loss=local)
    assert model.given.main_loss is local


class Positional(Model):
    """A program's model, whose forward pass takes masks and weights by position."""

    def forward(self, tokens, loss_mask=None, main_loss=None):
        super().forward(tokens, loss_mask=loss_mask, main_loss=main_loss)


def test_arguments_by_position_and_none_are_seen():
    model, weight, local = Positional(**EXPERTS), torch.tensor(0.5), MainLoss(torch.tensor(3.0))
    supply_main_loss([model], weight)
    model(TOKENS, TOKENS)
    assert model.given.main_loss.scale is weight and model.given.loss_mask is TOKENS
    model(TOKENS, TOKENS, local)
    assert model.given.main_loss is local
    model(TOKENS, TOKENS, main_loss=None)
    assert model.given.main_loss.scale is weight


def test_auxiliary_losses_without_a_mask_are_rejected_in_training():
    model, _ = build(**EXPERTS)
    with pytest.raises(UserError, match="neither loss_mask nor main_loss"):
        model(TOKENS)
    with torch.no_grad():
        model(TOKENS)
    model.eval()(TOKENS)
    build()[0](TOKENS)
