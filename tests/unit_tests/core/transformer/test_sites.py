"""A mixer of another program gets policies by declaring sites; an error lists the sites."""

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import offload
from megatron.core.transformer.sites import Sites, call, known_sites, sited
from tests.test_utils.gated_recurrence import GatedRecurrence, mixed_layers

RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["scan"]}
OFFLOADED = {"fine_grained_activation_offloading": True, "offload_modules": ["scan"], "min_offloaded_tensor_size": 1}


def step(monkeypatch, **settings):
    """(loss gradients, runs of the recurrence, tensors moved to the host) of one step of mixed layers in fp64."""
    runs, moved, states, init = [], [], GatedRecurrence.states, offload.Offloaded.__init__
    monkeypatch.setattr(GatedRecurrence, "states", lambda *args: runs.append(1) or states(*args))
    monkeypatch.setattr(offload.Offloaded, "__init__", lambda self, *args: moved.append(1) or init(self, *args))
    config = TransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=2, fp64=True, hidden_dropout=0.0, attention_dropout=0.0,
        **settings,
    )  # fmt: skip
    torch.manual_seed(1)
    model = GPTModel(config, mixed_layers(config), 32, 16)
    ids = torch.arange(16).view(2, 8) * 5 % 32
    model(ids, torch.arange(8).expand(2, 8), None, labels=ids.roll(-1, 1)).sum().backward()
    monkeypatch.undo()
    return [parameter.grad for parameter in model.parameters()], len(runs), len(moved)


def test_a_mixer_recomputes_and_offloads_by_its_declaration(monkeypatch):
    plain, runs, moved = step(monkeypatch)
    assert (runs, moved) == (2, 0), "two of three layers have the recurrence"
    repeated, runs_again, moved_again = step(monkeypatch, **RECOMPUTED)
    assert (runs_again, moved_again) == (4, 0) and all(map(torch.equal, plain, repeated))
    stored, runs_stored, moved_stored = step(monkeypatch, **OFFLOADED)
    assert runs_stored == 2 and moved_stored >= 2 and all(map(torch.equal, plain, stored))


def test_undeclared_sites_are_errors_that_list_the_sites():
    with pytest.raises(AttributeError, match="no site 'core' is declared; sites: core_attn, attn_proj"):
        Sites(("core_attn", "attn_proj"), call).core(abs, 1)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, **(RECOMPUTED | {"recompute_modules": ["scn"]})
    )
    with pytest.raises(UserError, match=r"recompute_modules \['scn'\]: choose from .*recurrence, scan"):
        GPTModel(config, mixed_layers(config), 32, 16)


def test_sites_of_a_model_are_plain_until_a_policy_is_attached():
    config = TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=2)
    model = GPTModel(config, mixed_layers(config), 32, 16)
    names = {(name, owner.at.is_plain(name)) for owner in sited(model) for name in owner.at.names}
    assert {name for name, _ in names} >= {"scan", "core_attn", "qkv_linear", "attn_proj", "recurrence", "mlp"}
    assert all(plain for _, plain in names)
    assert "_activation" not in known_sites("calls", "spans") and "mlp_act" in known_sites("results")
