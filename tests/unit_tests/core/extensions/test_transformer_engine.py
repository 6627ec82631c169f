"""Transformer Engine's modules equal built-in modules: output, gradients, names. Here a fake of the package computes;
the package itself is in ``test_transformer_engine_gpu.py``."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
    kernel_variables,
    load_transformer_engine,
)
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.models.backends import kernel_summary
from megatron.core.models.bert import BertModel
from megatron.core.models.bert.bert_layer_specs import get_bert_block_spec
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.sharding.placement import global_name
from megatron.core.sharding.sharded_tensor import module_tensors
from megatron.core.transformer.spec_utils import build_module
from tests.test_utils import fake_transformer_engine

VOCAB, LENGTH, BATCH = 40, 12, 2
LATENT = {"multi_latent_attention": True, "kv_lora_rank": 10, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
          "v_head_dim": 6, "qk_layernorm": True, "rope_type": "rope", "add_bias_linear": False,
          "normalization": "RMSNorm"}  # fmt: skip
CASES = {
    "gpt": {"hidden_dropout": 0.1},
    "llama": {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "num_query_groups": 2,
              "window_size": (3, 0), "window_attn_skip_freq": 2},
    "qwen": {"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True,
             "apply_layernorm_1p": True},
    "post-norm residual": {"apply_residual_connection_post_layernorm": True},
    "gemma": {"norm_placement": "sandwich", "geglu": True, "softmax_scale": 0.7, "apply_embedding_scaling": True},
    "gemma-2": {"norm_placement": "sandwich", "attn_logit_softcapping": 0.1, "final_logit_softcapping": 0.2},
    "olmo-2": {"norm_placement": "post", "normalization": "RMSNorm", "qk_layernorm": True,
               "qk_layernorm_across_heads": True},
    "gpt-neox": {"use_parallel_residual": True, "hidden_dropout": 0.1},
    "latent": {**LATENT, "q_lora_rank": 12},
    "latent without query latent": LATENT,
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}  # fmt: skip


def make_model(engine, groups=SINGLE_PROCESS, **overrides):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "params_dtype": torch.float64}
    config = TransformerConfig(**{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, **overrides})
    return GPTModel(
        config, get_gpt_decoder_block_spec(config, use_transformer_engine=engine), vocab_size=VOCAB,
        max_sequence_length=LENGTH, position_embedding_type="rope", groups=groups,
    )  # fmt: skip


def by_global_name(model):
    """Parameters by their names in checkpoints."""
    return {global_name(name, param.spec): param for name, param in model.named_parameters()}


def losses(model, documents=False):
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, 5, 12, 13, 24], dtype=torch.int32)
    return model(
        tokens[:, :-1], torch.arange(LENGTH).expand(BATCH, -1), labels=tokens[:, 1:],
        packed_seq_params=PackedSeqParams(cu_seqlens_q=bounds) if documents else None,
        sample_index=torch.arange(BATCH),
    )  # fmt: skip


def outcome(model, **kwargs):
    """Losses, and every gradient after two micro-batches."""
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model, groups=model.groups)
    wrapped.zero_grad_buffer()
    for _ in range(2):
        output = losses(wrapped, **kwargs)
        output.sum().backward()
    return output.detach(), {name: param.main_grad for name, param in by_global_name(model).items()}


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_names_equal_the_built_in_layers(case, monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    documents = case == "llama"
    local, expected = outcome(make_model(False, **CASES[case]), documents=documents)
    model = make_model(True, **CASES[case])
    foreign, gradients = outcome(model, documents=documents)
    torch.testing.assert_close(foreign, local)
    assert gradients.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], msg=name)
    fused = case not in ("post-norm residual", "olmo-2")
    attention = model.decoder.layers[0].self_attention
    if "latent" in case:
        assert isinstance(attention.linear_kv_up_proj, TEColumnParallelLinear)
        return
    assert isinstance(attention.linear_qkv._gemm.linear,
                      fake_transformer_engine.LayerNormLinear if fused else fake_transformer_engine.Linear)  # fmt: skip


def test_latent_attention_generates_the_texts_of_built_in_layers(monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    requests, texts = [Request(prompt=[1, 2, 3], max_new_tokens=6, sampling=Sampling(seed=n)) for n in range(3)], []
    for engine in (False, True):
        model = make_model(engine, **CASES["latent"])
        finished = Engine(model, Limits(max_length=LENGTH), num_pages=12, page_size=4).generate(requests)
        texts.append([x.tokens for x in finished])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("fields", [{}, {"window_size": (3, 2), "embed_layernorm": True}], ids=["all", "windows"])
def test_encoders_with_padding_equal_the_built_in_layers(fields, monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    padding = PackedSeqParams.of_lengths(torch.tensor([LENGTH, 7]), LENGTH)
    results = []
    for engine in (False, True):
        config = make_model(engine, **fields).config
        spec = get_bert_block_spec(config, use_transformer_engine=engine)
        model = BertModel(config, 2, spec, VOCAB, LENGTH, groups=SINGLE_PROCESS)
        losses, order = model(tokens, None, tokens % 2, tokens, packed_seq_params=padding)
        (losses.sum() + order.square().sum()).backward()
        results.append((losses, order, {name: param.grad for name, param in by_global_name(model).items()}))
    torch.testing.assert_close(results[1][:2], results[0][:2])
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(results[1][2][name], gradient, msg=name)


def test_branches_of_layers_compose(monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    full = make_model(True)
    config = full.config
    x = torch.randn(LENGTH, BATCH, config.hidden_size, dtype=torch.float64)
    spec = get_gpt_layer_with_transformer_engine_spec()
    parts = [build_module(spec, config, layer_number=1, branches=range(at, at + 1)) for at in range(2)]
    layer = full.decoder.layers[0].eval()
    weights = layer.state_dict()
    assert sorted(name for part in parts for name in part.state_dict()) == sorted(weights)
    for part in parts:
        part.load_state_dict({name: weights[name] for name in part.state_dict()})
        part.eval()
    torch.testing.assert_close(parts[1](parts[0](x)), layer(x))


def test_checkpoints_do_not_know_who_computed(monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    local, foreign = (module_tensors(make_model(engine), groups=SINGLE_PROCESS) for engine in (False, True))
    assert local.keys() == foreign.keys()
    for name, tensor in local.items():
        assert torch.equal(tensor.local, foreign[name].local) and tensor.global_shape == foreign[name].global_shape


def test_without_a_gradient_buffer_gradients_go_the_usual_way(monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    local, foreign = make_model(False), make_model(True)
    for model in (local, foreign):
        losses(model).sum().backward()
    rest = by_global_name(foreign)
    for name, param in by_global_name(local).items():
        torch.testing.assert_close(rest.pop(name).grad, param.grad, msg=name)
    assert not rest


def tensor_parallel_outcome(rank, world_size, sequence_parallel):
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_transformer_engine.install(monkeypatch)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        try:
            groups = parallel_state.get_process_groups()
            layout = {"tensor_model_parallel_size": world_size, "sequence_parallel": sequence_parallel}
            results = [outcome(make_model(engine, groups, **layout)) for engine in (False, True)]
        finally:
            parallel_state.destroy_model_parallel()
    (local, expected), (foreign, gradients) = results
    torch.testing.assert_close(foreign, local)
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], msg=name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks_equal_the_built_in_layers(gloo_pool, sequence_parallel):
    gloo_pool.run(tensor_parallel_outcome, 2, sequence_parallel)


def test_attention_with_dropout_is_the_built_in_one(monkeypatch):
    """Dropout masks equal the masks without the package."""
    fake_transformer_engine.install(monkeypatch)
    engine, local = (losses(make_model(built, attention_dropout=0.3)) for built in (True, False))
    torch.testing.assert_close(engine, local)
    assert not torch.allclose(local, losses(make_model(False)))


def test_contradicting_variables_are_rejected(monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    for name in kernel_variables("flash"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="NVTE_FLASH_ATTN=0 in the environment contradicts"):
        make_model(True, attention_backend="flash")


def test_kernel_summary_describes_the_built_layers(monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    local, foreign = ("\n".join(kernel_summary([make_model(engine)])) for engine in (False, True))
    assert "layers: local" in local and "attention: torch SDPA (no GPU, float64, head dim 8)" in local
    assert "layers: transformer_engine" in foreign and "attention: Transformer Engine" in foreign
    layered = "\n".join(kernel_summary([make_model(False, num_layers=4, **CASES["llama"])]))
    assert "window 3,0) in layers 1, 3" in layered and "in layers 2, 4" in layered


def test_modules_of_the_package_are_no_submodules(monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    kinds = {type(module) for module in make_model(True).modules()}
    assert {TENorm, TERowParallelLinear} <= kinds
    assert not any(kind.__module__.endswith("fake_transformer_engine") for kind in kinds)


def test_fp8_layers_open_the_context_of_the_package(monkeypatch):
    fake_transformer_engine.install(monkeypatch)
    opened = []

    def autocast(*, enabled, recipe):
        opened.append((enabled, recipe))
        return contextlib.nullcontext()

    monkeypatch.setattr(load_transformer_engine(), "autocast", autocast, raising=False)
    formats = SimpleNamespace(HYBRID="hybrid", E4M3="e4m3")
    recipes = SimpleNamespace(Format=formats, Float8CurrentScaling=lambda fp8_format: ("current", fp8_format))
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
    settings = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True, "num_layers": 3}
    losses(make_model(True, **settings))
    assert opened == [(True, ("current", "hybrid"))] * 4, "qkv, proj, fc1 and fc2 of the middle layer"
    with pytest.raises(UserError, match="has no Float8BlockScaling; update it"):
        make_model(True, **{**settings, "hidden_size": 128, "fp8_recipe": "blockwise"})
