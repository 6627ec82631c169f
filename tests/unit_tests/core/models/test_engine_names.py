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
    assert {name for name, _ in foreign.named_parameters()} == expected <= foreign.state_dict().keys()
    saved, loaded = (module_tensors(model, groups=SINGLE_PROCESS) for model in (local, foreign))
    assert saved.keys() == loaded.keys()
    losses = [loss(model) for model in (local, foreign)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    for item in losses:
        item.backward()
    for name, param in local.named_parameters():
        other = dict(foreign.named_parameters())[name if any(k in name for k in retained) else engine_name(name)]
        torch.testing.assert_close(other.grad, param.grad, rtol=0, atol=0)


def test_moved_norms_follow_what_is_done_to_parameters():
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
