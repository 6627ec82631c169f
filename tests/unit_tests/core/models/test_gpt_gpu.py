"""On a GPU, weights and masks have the CPU's bits, and the kernels equal the reference."""

import pytest
import torch

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.random.philox import DropoutStream

pytestmark = pytest.mark.gpu

LLAMA = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "num_query_groups": 2}
PLAIN_TORCH = {"bias_swiglu_fusion": False, "apply_rope_fusion": False, "no_persist_layer_norm": True}
LENGTH, BATCH, VOCAB = 256, 2, 1000


def make_model(*, on_cpu=False, dtype=torch.bfloat16, **overrides):
    sizes = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4}
    choices = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": on_cpu}
    config = TransformerConfig(**{**sizes, **LLAMA, **choices, "params_dtype": dtype, **overrides})
    return GPTModel(
        config, get_gpt_decoder_block_spec(config), vocab_size=VOCAB, max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )  # fmt: skip


def batch():
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0)).cuda()
    return tokens[:, :-1], tokens[:, 1:], torch.arange(LENGTH, device="cuda").expand(BATCH, -1)


def test_initial_weights_have_the_same_bits_on_cpu_and_gpu():
    for parameter, other in zip(make_model(on_cpu=True).parameters(), make_model().parameters()):
        assert other.is_cuda and torch.equal(parameter, other.cpu())


def test_dropout_masks_have_the_same_bits_on_cpu_and_gpu():
    def mask(device):
        sample, position = (torch.arange(n, device=device) for n in (3, 5))
        return DropoutStream(7).keep_mask(0.1, ("x",), sample[None, :, None], position[:, None, None], 0, range(3, 77))

    assert torch.equal(mask("cpu"), mask("cuda").cpu())


def losses_and_gradients(model, **kwargs):
    tokens, labels, positions = batch()
    losses = model(tokens, positions, labels=labels, **kwargs)
    losses.mean().backward()
    return losses.detach(), torch.cat([param.grad.float().flatten() for param in model.parameters()])


@pytest.mark.parametrize("window", [None, (31, 0)])
@pytest.mark.parametrize("backend", ["auto", "flash", "fused"])
@pytest.mark.parametrize("documents", [False, True])
def test_fused_kernels_equal_the_unfused_reference(backend, window, documents):
    bounds = torch.tensor([0, 100, 101, 256, 300, 512], dtype=torch.int32, device="cuda")
    packed = {"packed_seq_params": PackedSeqParams(cu_seqlens_q=bounds)} if documents else {}
    losses, gradients = losses_and_gradients(make_model(attention_backend=backend, window_size=window), **packed)
    reference = make_model(dtype=torch.float32, attention_backend="unfused", window_size=window, **PLAIN_TORCH)
    exact_losses, exact_gradients = losses_and_gradients(reference, **packed)
    torch.testing.assert_close(losses, exact_losses, rtol=2e-2, atol=2e-2)
    assert (gradients - exact_gradients).norm() / exact_gradients.norm() < 0.02


def test_training_steps_lower_the_loss_with_dropout_on():
    model = make_model(hidden_dropout=0.1, attention_dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens, labels, positions = batch()
    history = []
    for _ in range(20):
        loss = model(tokens, positions, labels=labels).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    assert history[-1] < history[0] - 1
