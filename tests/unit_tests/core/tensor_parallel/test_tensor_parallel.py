"""Split layers give the numbers of whole ones, over real collectives."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.sharding.placement import (
    Normal,
    initialize_parameters,
    local_rectangle,
    local_view,
)
from megatron.core.tensor_parallel import VocabParallelEmbedding, padded_vocab_size, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.operators import copy_to_region
from tests.test_utils.specs import named_specs

DOUBLE = torch.float64


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


@pytest.mark.parametrize("vocab, multiple, padded", [(1, 128, 128), (128, 128, 128), (50257, 128, 50304), (7, 1, 7)])
def test_padded_size(vocab, multiple, padded):
    assert padded_vocab_size(vocab, multiple) == padded


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_equals_torch(dtype, reuse):
    logits = random(5, 3, 37).to(dtype).requires_grad_()
    target = torch.randint(0, 37, (5, 3))
    weights = random(5, 3, seed=1)
    expected = F.cross_entropy(logits.double().flatten(0, 1), target.flatten(), reduction="none").view(5, 3)
    expected_grad = torch.autograd.grad((expected * weights).sum(), logits)[0]
    copy = logits.detach().clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(copy * 1, target, reuse_logits=reuse)
    (losses * weights).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=min(tolerance, 1e-5))
    torch.testing.assert_close(copy.grad, expected_grad, rtol=tolerance, atol=tolerance)


def test_cross_entropy_is_finite_for_huge_logits_and_checks_gradients():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 0.0, 1e30]])
    assert vocab_parallel_cross_entropy(logits, torch.tensor([0, 2])).tolist() == [0.0, 0.0]
    inputs = random(4, 9).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_cross_entropy(x, torch.tensor([0, 8, 3, 3])), inputs)


def test_a_second_backward_through_reused_logits_is_an_error():
    logits = random(4, 9).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits * 1, torch.tensor([0, 8, 3, 3]), reuse_logits=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_of_another_width_are_rejected():
    with pytest.raises(ValueError, match="not gathered"):
        vocab_parallel_cross_entropy(random(2, 256), torch.tensor([0, 1]), vocab_size=100)
    with pytest.raises(ValueError, match="leading dims"):
        vocab_parallel_cross_entropy(random(2, 3, 128), torch.tensor([0, 1]), vocab_size=100)


def _layers(rank, world_size):
    """Return outputs and input gradients of column -> row and embedding -> loss on this tensor-parallel group."""
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=4, params_dtype=DOUBLE, tensor_model_parallel_size=world_size
    )
    built = {"config": config, "init_method": Normal(1.0), "groups": groups}
    net = torch.nn.Module()
    net.column = ColumnParallelLinear(8, 12, **built)
    net.gathered = ColumnParallelLinear(8, 12, gather_output=True, bias=False, **built)
    net.row = RowParallelLinear(12, 8, **built)
    net.whole_input = RowParallelLinear(12, 8, input_is_parallel=False, skip_bias_add=True, **built)
    net.embedding = VocabParallelEmbedding(19, 8, divisible_by=4, **built)
    initialize_parameters(net, 3, groups)
    x = random(5, 2, 8).requires_grad_()
    first, second = net.row(net.column(x)[0])[0], net.whole_input(net.gathered(x)[0])
    assert second[1].shape == (8,)
    ids = torch.randint(0, 19, (5, 2), generator=torch.Generator().manual_seed(0))
    hidden = first + second[0] + second[1] + net.embedding(ids)
    logits = F.linear(copy_to_region(hidden, groups.tp), net.embedding.weight)
    losses = vocab_parallel_cross_entropy(logits, ids, vocab_size=19, divisible_by=4, group=groups.tp)
    losses.sum().backward()
    return losses.detach(), x.grad, collect_gradients(net, groups)


def collect_gradients(model, groups):
    """name -> (offsets, rectangle of the global gradient, whether ranks hold partial sums)."""
    result = {}
    for name, param, spec in named_specs(model):
        chunk = local_rectangle(spec, groups)
        result[name] = spec.shape, chunk, local_view(param.grad, spec, groups).clone(), "tp" in spec.grad
    return result


def assemble(per_rank):
    """Global gradients: chunks put together, partial sums added."""
    full = {}
    for gradients in per_rank:
        for name, (shape, (offsets, lengths), values, partial) in gradients.items():
            target = full.setdefault(name, torch.zeros(shape, dtype=DOUBLE))
            region = target[tuple(slice(o, o + n) for o, n in zip(offsets, lengths))]
            region.copy_(region + values if partial else values)
    return full


def test_split_layers_equal_full_ones(gloo_pool):
    ((losses, grad, gradients),) = gloo_pool.run(_layers, 1)
    split = gloo_pool.run(_layers, 2)
    for other_losses, other_grad, _ in split:
        torch.testing.assert_close(other_losses, losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other_grad, grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(assemble([s[2] for s in split]), assemble([gradients]), rtol=1e-11, atol=1e-12)


def _gpt(rank, world_size, sequence_parallel, tied, parallel_output=True):
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, params_dtype=DOUBLE, swiglu=True,
        normalization="RMSNorm", qk_layernorm=True, hidden_dropout=0.1, attention_dropout=0.1, init_method_std=0.2,
        tensor_model_parallel_size=world_size, sequence_parallel=sequence_parallel and world_size > 1,
        use_cpu_initialization=True,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config), vocab_size=50, max_sequence_length=8, groups=groups,
        share_embeddings_and_output_weights=tied, parallel_output=parallel_output,
    )  # fmt: skip
    tokens = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(8).expand(3, 8)
    losses = model(tokens[:, :-1], positions, labels=tokens[:, 1:], sample_index=torch.tensor([4, 5, 6]))
    losses.sum().backward()
    return losses.detach(), collect_gradients(model, groups)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_split_gpt_equals_a_full_one_with_dropout(gloo_pool, sequence_parallel, tied):
    ((losses, gradients),) = gloo_pool.run(_gpt, 1, sequence_parallel, tied)
    split = gloo_pool.run(_gpt, 2, sequence_parallel, tied)
    for other, _ in split:
        torch.testing.assert_close(other, losses, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(assemble([s[1] for s in split]), assemble([gradients]), rtol=1e-9, atol=1e-11)


def test_a_gpt_that_gathers_its_logits_has_the_losses_of_their_slices(gloo_pool):
    """A loss over the gathered logits would count every entry once per rank."""
    ((losses, gradients),) = gloo_pool.run(_gpt, 1, False, True)
    split = gloo_pool.run(_gpt, 2, False, True, False)
    for other, _ in split:
        torch.testing.assert_close(other, losses, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(assemble([s[1] for s in split]), assemble([gradients]), rtol=1e-9, atol=1e-11)


def _loss_of_slices_and_gathered(rank, world_size):
    """Losses of the logits 0, 1, 2, 3 and the label 3."""
    group = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size).tp
    logits, label = torch.arange(4, dtype=DOUBLE).view(1, 4), torch.tensor([3])
    options = {"group": group, "vocab_size": 4, "divisible_by": 4}
    with pytest.raises(ValueError, match="pass logits that are not gathered"):
        vocab_parallel_cross_entropy(logits, label, **options)
    return vocab_parallel_cross_entropy(logits.chunk(world_size, -1)[rank], label, **options).item()


def test_gathered_logits_are_rejected_where_the_vocabulary_size_is_known(gloo_pool):
    expected = torch.arange(4, dtype=DOUBLE).softmax(0)[3].log().neg().item()
    assert gloo_pool.run(_loss_of_slices_and_gathered, 2) == pytest.approx([expected] * 2, rel=1e-14)
