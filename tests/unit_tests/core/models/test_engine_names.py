"""Programs that ask for Transformer Engine's layers address parameters by its names, with or without the package."""

import copy
import logging

import pytest
import torch

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models import backends
from megatron.core.models.bert import BertModel
from megatron.core.models.bert.bert_layer_specs import bert_layer_with_transformer_engine_spec
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.sharding.named_slices import stored_parameters
from megatron.core.sharding.sharded_tensor import module_tensors

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "params_dtype": torch.float64,
         "hidden_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip
CASES = {
    "LayerNorm": {},
    "RMSNorm": {"normalization": "RMSNorm", "qk_layernorm": True},
    "experts": {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 16},
    "latent": {"multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8,
               "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "qk_layernorm": True},
    "further": {"mtp_num_layers": 1},
    "sandwich": {"norm_placement": "sandwich"},
}  # fmt: skip


def make_model(engine, **fields):
    config = TransformerConfig(**{**SIZES, **fields})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=engine)
    return GPTModel(
        config, spec, 40, 12, position_embedding_type="rope", groups=SINGLE_PROCESS, seed=1,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=engine),
    )  # fmt: skip


def loss(model):
    tokens = torch.arange(24).view(2, 12)
    return model(tokens, torch.arange(12).expand(2, -1), labels=tokens + 1, sample_index=torch.arange(2)).sum()


def engine_name(name):
    """Return Transformer Engine's name of a local parameter, in the layers of CASES."""
    if ".self_attention.q_layernorm" in name or ".self_attention.kv_layernorm" in name:
        latent = {".q_layernorm.": ".linear_q_up_proj.layer_norm_", ".kv_layernorm.": ".linear_kv_up_proj.layer_norm_"}
    else:
        latent = {}
    fused = {".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
             ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_"}  # fmt: skip
    for local, foreign in (latent | fused).items():
        name = name.replace(local, foreign)
    return name


@pytest.mark.parametrize("case", CASES)
def test_norms_go_by_the_names_of_fused_linear_layers(case):
    fields = CASES[case]
    local, foreign = make_model(False, **fields), make_model(True, **fields)
    retained = [".input_layernorm"] * (case == "latent") + ["layers.1.pre_mlp_layernorm"] * (case == "experts")
    retained += [".q_layernorm", ".k_layernorm"] * (case == "RMSNorm")
    expected = {
        name if any(item in name for item in retained) else engine_name(name) for name, _ in local.named_parameters()
    }
    assert {name for name, _ in stored_parameters(foreign)} == expected
    assert {name for name, _ in foreign.named_parameters()} <= foreign.state_dict().keys()
    saved, loaded = (module_tensors(model, groups=SINGLE_PROCESS) for model in (local, foreign))
    assert saved.keys() == loaded.keys()
    losses = [loss(model) for model in (local, foreign)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    for item in losses:
        item.backward()
    for name, param in local.named_parameters():
        other = dict(stored_parameters(foreign))[name if any(k in name for k in retained) else engine_name(name)]
        torch.testing.assert_close(other.grad, param.grad, rtol=0, atol=0)


def test_linear_layers_with_a_norm_have_the_class_name_of_the_engine():
    layer = make_model(True, normalization="RMSNorm").decoder.layers[0]
    linears = [layer.self_attention.linear_qkv, layer.mlp.linear_fc1, layer.self_attention.linear_proj]
    names = ["TELayerNormColumnParallelLinear", "TELayerNormColumnParallelLinear", "RowParallelLinear"]
    assert [type(linear).__name__ for linear in linears] == names


def test_moved_norms_follow_changes_of_their_parameters():
    model = make_model(True)
    weight = model.decoder.layers[0].self_attention.linear_qkv.layer_norm_weight
    assert model.decoder.layers[0].input_layernorm.weight is weight
    before = loss(model)
    with torch.no_grad():
        weight.mul_(2)
    assert loss(model) != before
    copied = copy.deepcopy(model).float()
    layer = copied.decoder.layers[0]
    assert layer.input_layernorm.weight is layer.self_attention.linear_qkv.layer_norm_weight is not weight
    layer.self_attention.linear_qkv.layer_norm_weight = torch.nn.Parameter(torch.zeros(32))  # as wrappers do
    assert layer.input_layernorm.weight.eq(0).all()
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer.input_layernorm.nothing


def test_state_dicts_load_under_both_names():
    source, target = make_model(False), make_model(True)
    with torch.no_grad():
        for param in source.parameters():
            param.normal_()
    target.load_state_dict(source.state_dict())
    assert loss(target) == loss(source)
    repeated = make_model(True)
    repeated.load_state_dict(target.state_dict())
    assert loss(repeated) == loss(source)
    with pytest.raises(RuntimeError, match="Missing key"):
        repeated.load_state_dict({"embedding.word_embeddings.weight": source.embedding.word_embeddings.weight})


def test_missing_package_is_logged_once(caplog):
    backends._local_with_engine_names.cache_clear()
    logging.getLogger("megatron").propagate = True
    with caplog.at_level(logging.INFO, "megatron"):
        for _ in range(3):
            make_model(True)
    lines = [record.getMessage() for record in caplog.records if "transformer_engine" in record.getMessage()]
    assert len(lines) == 1 and "pip install" in lines[0] and "local layers" in lines[0]


def test_constant_specs_of_bert_are_fresh_and_named_equally():
    from megatron.core.models.bert import bert_layer_specs

    assert bert_layer_specs.bert_layer_local_spec is not bert_layer_specs.bert_layer_local_spec
    model = BertModel(
        TransformerConfig(**SIZES), 2, bert_layer_with_transformer_engine_spec, 40, 12, groups=SINGLE_PROCESS
    )
    assert "encoder.layers.1.mlp.linear_fc1.layer_norm_bias" in model.state_dict()
    with pytest.raises(AttributeError, match="bert_layer_spec"):
        _ = bert_layer_specs.bert_layer_spec


EXPERTS = {"num_moe_experts": 3, "moe_ffn_hidden_size": 16, "gated_linear_unit": True,
           "activation_func": torch.nn.functional.silu, "add_bias_linear": True}  # fmt: skip
FC1, FC2 = (f"decoder.layers.1.mlp.experts.linear_fc{number}" for number in (1, 2))


def test_experts_have_one_name_each_in_the_memory_of_their_layer():
    model, local = make_model(True, **EXPERTS), make_model(False, **EXPERTS)
    named, stored = dict(model.named_parameters()), dict(stored_parameters(model))
    assert {f"{FC1}.weight{i}" for i in range(3)} | {f"{FC2}.bias{i}" for i in range(3)} <= named.keys()
    assert f"{FC1}.weight" not in named and f"{FC1}.weight" in dict(local.named_parameters())
    assert named[f"{FC1}.weight1"].shape == (32, 32) and named[f"{FC1}.bias1"].shape == (32,)
    assert sum(part.numel() for part in named.values()) == sum(param.numel() for param in model.parameters())
    assert [id(param) for param in model.parameters()] == [id(param) for param in stored.values()]
    grouped = stored[f"{FC1}.weight"].detach().view(3, 32, 32)
    assert torch.equal(named[f"{FC1}.weight2"], grouped[2])
    with torch.no_grad():
        named[f"{FC1}.weight2"].copy_(torch.full((32, 32), 0.5))
    assert bool((grouped[2] == 0.5).all()) and not bool((grouped[1] == 0.5).any())
    assert type(named[f"{FC1}.weight2"] + 1) is torch.Tensor is type(named[f"{FC1}.weight2"].data)
    loss(model).backward()
    for name in (f"{FC1}.weight", f"{FC2}.weight"):
        parts = [named[f"{name}{i}"].grad for i in range(3)]
        assert torch.equal(torch.cat(parts), stored[name].grad) and parts[0].any()
    named[f"{FC1}.weight0"].requires_grad = False
    assert not stored[f"{FC1}.weight"].requires_grad and not named[f"{FC1}.weight2"].requires_grad
    assert named[f"{FC1}.weight0"].spec is stored[f"{FC1}.weight"].spec


def test_state_dicts_name_experts_and_are_read_back():
    model, other = make_model(True, **EXPERTS), make_model(True, **EXPERTS)
    state = model.state_dict()
    assert f"{FC1}.weight" not in state and state[f"{FC1}.weight0"].data_ptr() == dict(stored_parameters(model))[
        f"{FC1}.weight"].data_ptr()  # fmt: skip
    for param in other.parameters():
        param.data.zero_()
    assert not any(other.load_state_dict(copy.deepcopy(state)))
    for name, param in stored_parameters(model):
        assert torch.equal(param, dict(stored_parameters(other))[name]), name
    assert not other.load_state_dict(make_model(False, **EXPERTS).state_dict()).missing_keys
    assert other.load_state_dict({key: value for key, value in state.items() if "bias1" not in key}, strict=False)
    local, foreign = (module_tensors(make_model(engine, **EXPERTS), groups=SINGLE_PROCESS) for engine in (False, True))
    assert local.keys() == foreign.keys()  # checkpoints hold one tensor
