"""NVIDIA apex in the library's slots equals the built-in kernels. A stand-in with the same call signatures
computes here; the package itself is in ``test_apex_gpu.py``."""

import sys

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.apex import ApexAdam, ApexNormalize, ApexWeightGradient
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.gemms import Gemms
from megatron.core.tensor_parallel.linear import LinearTraits, WeightGradientStore, parallel_linear
from tests.test_utils import fake_apex
from tests.test_utils.training_steps import give_main_grad

VOCAB, LENGTH, BATCH = 40, 12, 2
BOTH = ["wgrad", "norm"]
BF16 = torch.bfloat16
CASES = {
    "gpt": {"hidden_dropout": 0.1},
    "llama": {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "qk_layernorm": True},
    "1p": {"apply_layernorm_1p": True, "apply_residual_connection_post_layernorm": True},
    "RMS 1p": {"apply_layernorm_1p": True, "normalization": "RMSNorm"},
    "chunks": {"cross_entropy_chunk_tokens": 7},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "bf16": {"params_dtype": BF16},
    "fp32 stream": {"params_dtype": BF16, "fp32_residual_connection": True},
}  # fmt: skip


def make_model(parts, groups=SINGLE_PROCESS, **overrides):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "params_dtype": torch.float32}
    config = TransformerConfig(
        **{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, "apex_parts": parts, **overrides}
    )
    return GPTModel(
        config, get_gpt_decoder_block_spec(config), vocab_size=VOCAB, max_sequence_length=LENGTH, groups=groups,
        share_embeddings_and_output_weights=True,
    )  # fmt: skip


def outcome(model, grad_reduce_in_fp32=True):
    """Losses, and every gradient after two micro-batches."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=grad_reduce_in_fp32)
    wrapped = DistributedDataParallel(None, ddp, model, groups=model.groups)
    wrapped.zero_grad_buffer()
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    for _ in range(2):
        losses = wrapped(tokens[:, :-1], positions, labels=tokens[:, 1:], sample_index=torch.arange(BATCH))
        losses.sum().backward()
    return losses.detach(), {name: param.main_grad for name, param in model.named_parameters()}


def compare(local, foreign):
    (losses, gradients), (other_losses, rest) = local, foreign
    torch.testing.assert_close(other_losses, losses, rtol=1e-5, atol=1e-5)
    assert rest.keys() == gradients.keys()
    for name, gradient in gradients.items():
        narrow = gradient.dtype == BF16
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if narrow else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(rest[name], gradient, msg=name, **tolerance)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_the_built_in_kernels(case, monkeypatch):
    calls = fake_apex.install(monkeypatch)
    local = outcome(make_model([], **CASES[case]))
    assert calls == [], "an installed package is not picked up by itself"
    compare(local, outcome(make_model(BOTH, **CASES[case])))
    norm = CASES[case].get("normalization", "LayerNorm")
    assert {"wgrad fp32", norm} == set(calls)


def test_sums_of_gradients_in_16_bits_stay_there(monkeypatch):
    calls = fake_apex.install(monkeypatch)
    settings = {"params_dtype": BF16}
    compare(
        outcome(make_model([], **settings), grad_reduce_in_fp32=False),
        outcome(make_model(["wgrad"], **settings), grad_reduce_in_fp32=False),
    )
    assert set(calls) == {"wgrad 16 bits"}


def test_weight_gradients_can_wait_and_copies_make_memory_contiguous(monkeypatch):
    calls = fake_apex.install(monkeypatch)
    results = []
    for traits in (LinearTraits(SINGLE_PROCESS.tp), LinearTraits(SINGLE_PROCESS.tp, gemms=Gemms(ApexWeightGradient()))):
        generator = torch.Generator().manual_seed(0)
        x, grad = (torch.randn(size, 5, generator=generator).t().requires_grad_() for size in (7, 9))
        weight = torch.nn.Parameter(torch.randn(9, 7, generator=generator))
        arrivals = give_main_grad(weight, torch.zeros(9, 7))
        store = WeightGradientStore()
        parallel_linear(x, weight, None, traits, store).backward(grad.detach())
        assert calls == [] and not weight.main_grad.any()
        (compute,) = store.take()
        compute()
        assert len(arrivals) == 1
        results.append((x.grad, weight.main_grad))
    torch.testing.assert_close(*results)
    assert calls == ["wgrad fp32"]


def sequence_parallel_outcome(rank, world_size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_apex.install(monkeypatch)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        try:
            groups = parallel_state.get_process_groups()
            layout = {"tensor_model_parallel_size": world_size, "sequence_parallel": True}
            compare(*(outcome(make_model(parts, groups, **layout)) for parts in ([], BOTH)))
        finally:
            parallel_state.destroy_model_parallel()


def test_two_sequence_parallel_ranks_equal_the_built_in_kernels(gloo_pool):
    gloo_pool.run(sequence_parallel_outcome, 2)


STATES = {
    "fp32": (torch.float32, {}),
    "remainders": (BF16, {"bf16": True}),
    "copies": (BF16, {"bf16": True, "store_param_remainders": False}),
    "bf16 moments": (BF16, {"bf16": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    "decay in the gradient": (torch.float32, {"decoupled_weight_decay": False}),
}


def trained(parts, dtype, settings, poisoned=False):
    """Return exact weights, moments and gradient norms after four updates; ``poisoned``: one update is skipped."""
    model = make_model([], params_dtype=dtype)
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.5, apex_parts=parts, **settings)
    optimizer = get_megatron_optimizer(config, [wrapped])
    steps = []
    for step in range(4):
        for index, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(97 * step + index)
            param.main_grad.copy_(torch.randn(param.shape, generator=generator))
        if poisoned and step == 2:
            next(model.parameters()).main_grad.view(-1)[0] = torch.inf
        steps.append(optimizer.step()[:2])
    exact = {name: master.read().clone() for name, master in optimizer.storage.items()}
    return steps, exact, optimizer.moments


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_adam_equals_the_built_in_update(state, poisoned, monkeypatch):
    calls = fake_apex.install(monkeypatch)
    local = trained([], *STATES[state], poisoned)
    assert calls == []
    foreign = trained(["adam"], *STATES[state], poisoned)
    assert set(calls) == {"adam"} and [finished for finished, _ in foreign[0]] == [True, True, not poisoned, True]
    assert foreign[0] == local[0] or poisoned  # an infinite norm is not compared
    for name, value in local[1].items():
        torch.testing.assert_close(foreign[1][name], value, rtol=1e-4, atol=1e-5, msg=name)
    for kind, moments in local[2].items():
        for name, value in moments.items():
            wide = value.dtype == torch.float32
            torch.testing.assert_close(foreign[2][kind][name], value, rtol=1e-4 if wide else 2**-6, atol=1e-6)


def test_apex_adam_updates_in_place_with_one_call_per_rates(monkeypatch):
    calls = fake_apex.install(monkeypatch)
    trained(["adam"], *STATES["copies"])
    assert len(calls) == 4  # one per update: without a scheduler both groups have the same rates


@pytest.mark.parametrize(
    ("part", "build", "extension"),
    [
        ("wgrad", ApexWeightGradient, "fused_weight_gradient_mlp_cuda"),
        ("norm", ApexNormalize, "fused_layer_norm_cuda"),
        ("adam", ApexAdam, "amp_C"),
    ],
)
def test_a_missing_package_or_extension_is_named_with_the_command_that_installs_it(part, build, extension, monkeypatch):
    with pytest.raises(ValueError, match=f"^--apex-parts {part}: .* not installed; APEX_CPP_EXT=1 .*pip install"):
        build()
    fake_apex.install(monkeypatch, without=(extension,))
    with pytest.raises(ValueError, match=f"^--apex-parts {part}: {part} needs {extension}, without which"):
        build()


def test_an_apex_that_is_too_old_is_named(monkeypatch):
    fake_apex.install(monkeypatch)
    monkeypatch.delattr(sys.modules["amp_C"], "multi_tensor_adam_capturable")
    with pytest.raises(ValueError, match="amp_C does not have what is needed .*multi_tensor_adam_capturable"):
        ApexAdam()
