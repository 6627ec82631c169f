"""The real Transformer Engine in our slots, against the built-in layers: within bf16's precision, and in training.

Skipped where the package is not installed.
"""

import inspect

import pytest
import torch

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import load_transformer_engine, transformer_engine_is_installed
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.sharding.placement import global_name
from tests.test_utils import fake_transformer_engine

pytestmark = pytest.mark.gpu

VOCAB, LENGTH, BATCH = 1000, 192, 3
CASES = {
    "gpt": {"hidden_dropout": 0.1},
    "llama": {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "num_query_groups": 2},
    "window": {"window_size": (31, 0)},
    "qwen": {"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True,
             "apply_layernorm_1p": True},
    "post-norm residual": {"apply_residual_connection_post_layernorm": True},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}  # fmt: skip


@pytest.fixture
def engine():
    if not transformer_engine_is_installed():
        pytest.skip("Transformer Engine is not installed")
    return load_transformer_engine()


def make_model(use_engine, **overrides):
    sizes = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "params_dtype": torch.bfloat16}
    config = TransformerConfig(**{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, **overrides})
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config, use_transformer_engine=use_engine), vocab_size=VOCAB,
        max_sequence_length=LENGTH, position_embedding_type="rope", groups=SINGLE_PROCESS,
    )  # fmt: skip
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(None, ddp, model, groups=SINGLE_PROCESS)


def losses(model, documents=False, seed=0):
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed)).cuda()
    bounds = torch.tensor([0, 100, 192, 193, 384, 576], dtype=torch.int32, device="cuda")
    return model(
        tokens[:, :-1], torch.arange(LENGTH, device="cuda").expand(BATCH, -1), labels=tokens[:, 1:],
        packed_seq_params=PackedSeqParams(cu_seqlens_q=bounds) if documents else None,
        sample_index=torch.arange(BATCH, device="cuda"),
    )  # fmt: skip


def outcome(model, **kwargs):
    """Losses, and the fp32 gradients that two micro-batches added up."""
    model.zero_grad_buffer()
    for _ in range(2):
        output = losses(model, **kwargs)
        output.mean().backward()
    named = model.module.named_parameters()
    return output.detach(), {global_name(name, param.spec): param.main_grad for name, param in named}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_agree_with_the_built_in_layers(engine, case, documents):
    local, expected = outcome(make_model(False, **CASES[case]), documents=documents)
    foreign, gradients = outcome(make_model(True, **CASES[case]), documents=documents)
    torch.testing.assert_close(foreign, local, rtol=2e-2, atol=2e-2)
    assert gradients.keys() == expected.keys()
    for name in expected:
        error = (gradients[name] - expected[name]).norm() / expected[name].norm()
        assert error < 0.03, f"{name}: {error}"


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("fp8", ["hybrid", "e4m3"])
def test_fp8_agrees_with_the_built_in_recipes(engine, monkeypatch, recipe, fp8):
    """Within the rounding of 8-bit factors, which differ where their inputs differ in bf16."""
    monkeypatch.setitem(globals(), "BATCH", 2)  # a multiple of 128 tokens
    settings = {**CASES["llama"], "fp8": fp8, "fp8_recipe": recipe}
    local, expected = outcome(make_model(False, **settings))
    foreign, gradients = outcome(make_model(True, **settings))
    plain, _ = outcome(make_model(True, **CASES["llama"]))
    torch.testing.assert_close(foreign, local, rtol=3e-2, atol=3e-2)
    assert not torch.equal(foreign, plain), "the package has computed in bf16"
    for name in expected:
        error = (gradients[name] - expected[name]).norm() / expected[name].norm()
        assert error < 0.15, f"{name}: {error}"


def test_twenty_steps_follow_the_same_loss_curve(engine):
    histories = []
    for use_engine in (False, True):
        model = make_model(use_engine, **CASES["llama"])
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True), [model])
        history = []
        for _ in range(20):
            model.zero_grad_buffer()
            loss = losses(model).mean()
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            history.append(loss.item())
        histories.append(history)
    assert histories[0][-1] < histories[0][0] - 1
    torch.testing.assert_close(torch.tensor(histories[1]), torch.tensor(histories[0]), rtol=2e-2, atol=2e-2)


def test_the_fake_that_other_tests_use_takes_the_same_arguments(engine):
    for name in ("Linear", "LayerNormLinear", "LayerNorm", "RMSNorm", "DotProductAttention"):
        real, fake = (list(inspect.signature(getattr(home, name).__init__).parameters)
                      for home in (engine, fake_transformer_engine))  # fmt: skip
        assert [argument for argument in fake if argument not in real] == [], name
