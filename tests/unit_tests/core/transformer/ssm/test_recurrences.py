"""Chunked forms and convolutions equal their recurrences in fp64, with gradients, at documents and extreme decays."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.transformer.ssm.convolution import causal_convolution
from megatron.core.transformer.ssm.delta_rule import delta_rule
from megatron.core.transformer.ssm.mixer import initial_time_bias
from megatron.core.transformer.ssm.scans import scan_heads
from megatron.core.transformer.ssm.state_space import state_space
from tests.unit_tests.core.transformer.ssm.recurrences import (
    convolution_by_token,
    delta_rule_by_token,
    state_space_by_token,
)

BATCH, KEYS, VALUES, KEY, VALUE = 2, 2, 4, 5, 3


def random_inputs(length, strength, seed=0):
    """Queries, keys of length 1, values, log-decays down to -``strength``, beta in [0, 2), and a state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    key = torch.nn.functional.normalize(normal(length, BATCH, KEYS, KEY), dim=-1)
    decay = -strength * torch.rand(length, BATCH, VALUES, dtype=torch.float64, generator=generator)
    beta = 2 * torch.rand(length, BATCH, VALUES, dtype=torch.float64, generator=generator)
    inputs = [normal(length, BATCH, KEYS, KEY), key, normal(length, BATCH, VALUES, VALUE), decay, beta]
    follows = torch.rand(length, BATCH, generator=generator) < 0.8
    return inputs, follows, normal(BATCH, VALUES, KEY, VALUE)


def results(rule, inputs, follows, state, *size):
    """Outputs, last state and the gradients of a random weighted sum of both."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
    outputs = rule(*leaves[:-1], follows, leaves[-1], *size)
    generator = torch.Generator().manual_seed(9)
    loss = sum((x * torch.randn(x.shape, dtype=x.dtype, generator=generator)).sum() for x in outputs)
    return [x.detach() for x in (*outputs, *torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize("strength", [0.1, 3.0, 500.0])
@pytest.mark.parametrize("length, size", [(1, 64), (7, 4), (64, 64), (100, 64), (37, 16)])
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_of_the_delta_rule_equal_its_recurrence(length, size, strength, has_documents):
    inputs, follows, state = random_inputs(length, strength)
    follows = follows if has_documents else None
    expected = results(delta_rule_by_token, inputs, follows, state)
    for actual, right in zip(results(delta_rule, inputs, follows, state, size), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strength", [0.1, 3.0, 500.0])
@pytest.mark.parametrize("length, size", [(1, 64), (7, 3), (64, 64), (100, 64), (37, 16)])
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_with_decays_per_channel_equal_the_recurrence(length, size, strength, has_documents):
    inputs, follows, state = random_inputs(length, strength)
    generator = torch.Generator().manual_seed(1)
    # a channel that forgets all at once next to others that forget nothing
    inputs[3] = -strength * torch.rand(length, BATCH, VALUES, KEY, dtype=torch.float64, generator=generator) ** 4
    follows = follows if has_documents else None
    expected = results(delta_rule_by_token, inputs, follows, state)
    for actual, right in zip(results(delta_rule, inputs, follows, state, size), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-10, atol=1e-10)


def test_equal_decays_of_all_channels_are_those_of_a_head():
    inputs, follows, state = random_inputs(90, 1.0)
    expected = delta_rule(*inputs, follows, state)
    inputs[3] = inputs[3].unsqueeze(-1).expand(-1, -1, -1, KEY)
    torch.testing.assert_close(delta_rule(*inputs, follows, state), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strength", [0.1, 3.0, 500.0])
@pytest.mark.parametrize("length, size", [(1, 64), (7, 4), (100, 64), (37, 16)])
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_of_the_state_space_equal_its_recurrence(length, size, strength, has_documents):
    (*inputs, _), follows, state = random_inputs(length, strength)
    follows = follows if has_documents else None
    expected = results(state_space_by_token, inputs, follows, state)
    for actual, right in zip(results(state_space, inputs, follows, state, size), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-10, atol=1e-10)


def test_initial_times_are_log_uniform():
    bias = initial_time_bias(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
    right = torch.tensor([0.001, 0.01, 0.1], dtype=torch.float64)
    torch.testing.assert_close(torch.nn.functional.softplus(bias), right)


def test_a_document_in_a_row_equals_a_row_of_its_own():
    inputs, follows, state = random_inputs(90, 1.0)
    follows[:] = True
    follows[31], zeros = False, torch.zeros_like(state)
    packed = delta_rule(*inputs, follows, state)
    separate = delta_rule(*(x[31:] for x in inputs), None, zeros)
    torch.testing.assert_close(packed[0][31:], separate[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(packed[1], separate[1], rtol=1e-12, atol=1e-12)


def test_the_computation_is_in_the_dtype_of_the_state():
    inputs, _, state = random_inputs(70, 1.0)
    half = [x.bfloat16() for x in inputs]
    outputs, last = delta_rule(*half, None, state.float())
    assert outputs.dtype == last.dtype == torch.float32
    right, _ = delta_rule_by_token(*(x.double() for x in half), None, state.float().double())
    torch.testing.assert_close(outputs.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_a_convolution_is_reset_at_every_document(length, taps):
    generator = torch.Generator().manual_seed(taps)
    x = torch.randn(length, 2, 3, dtype=torch.float64, generator=generator)
    weight, tail = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, taps), (2, taps - 1, 3))
    )
    for follows in (None, torch.rand(length, 2, generator=generator) < 0.6):
        output, _ = causal_convolution(x, follows, tail, weight)
        torch.testing.assert_close(output, convolution_by_token(x, follows, tail, weight), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", range(1, 7))
def test_the_tail_of_a_convolution_continues_it(cut):
    generator = torch.Generator().manual_seed(cut)
    x = torch.randn(7, 2, 3, dtype=torch.float64, generator=generator)
    follows = torch.rand(7, 2, generator=generator) < 0.6
    tail, weight = (
        torch.zeros(2, 3, 3, dtype=torch.float64),
        torch.randn(3, 4, dtype=torch.float64, generator=generator),
    )
    uncut, last = causal_convolution(x, follows, tail, weight)
    first, between = causal_convolution(x[:cut], follows[:cut], tail, weight)
    second, end = causal_convolution(x[cut:], follows[cut:], between, weight)
    torch.testing.assert_close(torch.cat((first, second)), uncut, rtol=1e-12, atol=1e-12)
    assert torch.equal(end, last)


def scanned_by_heads(rank, world_size):
    """Return (outputs of all ranks, outputs of one rank): queries, keys and values in bf16, decays and beta in fp32."""
    layout = TokenLayout.of(parallel_state.initialize_model_parallel(context_parallel_size=world_size))
    inputs = [x.to(dtype) for x, dtype in zip(random_inputs(16, 1.0)[0], [torch.bfloat16] * 3 + [torch.float32] * 2)]
    parts = scan_heads(layout, 1, delta_rule, None, *(layout.local(x, 0) for x in inputs), by_heads=True)
    return layout.full(parts, 0), scan_heads(TokenLayout(), 1, delta_rule, None, *inputs)


def test_decays_keep_their_dtype_in_all_to_alls(gloo_pool):
    for outputs, expected in gloo_pool.run(scanned_by_heads, 2):
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
