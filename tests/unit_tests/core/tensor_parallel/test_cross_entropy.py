"""Losses of a split vocabulary, with kernels and in chunks, and their gradients equal unsplit logits."""

import importlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.fusions import cross_entropy as passes
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.linear import LinearTraits, WeightGradientStore, parallel_linear
from megatron.core.tensor_parallel.linear_cross_entropy import (
    CHUNK_BYTES,
    LogitSteps,
    linear_cross_entropy,
    tokens_of_a_chunk,
)
from megatron.core.tensor_parallel.vocabulary import stored_vocab_size
from tests.test_utils.training_steps import cached_run, compare, give_main_grad, run

DOUBLE = torch.float64
SEQUENCE, BATCH, HIDDEN = 6, 2, 5


def problem(vocab, stored, dtype=DOUBLE):
    """Input, padded weight, labels and gradient of the losses; some tokens masked."""
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator, dtype=DOUBLE)
    weight = torch.randn(vocab, HIDDEN, generator=generator, dtype=DOUBLE)
    labels = torch.randint(0, vocab, (SEQUENCE, BATCH), generator=generator)
    grad = torch.randn(SEQUENCE, BATCH, generator=generator, dtype=DOUBLE) * (torch.arange(BATCH) > 0)
    return x.to(dtype), F.pad(weight, (0, 0, 0, stored - vocab)).to(dtype), labels, grad


def expected(vocab, stored, dtype=DOUBLE):
    """(losses, gradient of x, of the padded weight) in float64."""
    x, weight, labels, grad = problem(vocab, stored, dtype)
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = F.linear(x, weight[:vocab])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return losses.detach(), *torch.autograd.grad(losses, (x, weight), grad)


def _split_losses(rank, world_size, cases):
    """For each case (losses, gradient of x, of this rank's rows of the weight)."""
    group = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size).tp
    return [_split_loss(group, *case) for case in cases]


def _split_loss(group, how, vocab, divisible_by, gathers=False, chunk_tokens=5):
    """``how`` is plain, fused or chunked; ``gathers``: the sequence is split too."""
    stored = stored_vocab_size(vocab, divisible_by, group)
    x, weight, labels, grad = problem(vocab, stored, torch.float32 if how == "fused" else DOUBLE)
    weight = weight.chunk(group.size)[group.rank].clone().requires_grad_()
    x = (x.chunk(group.size)[group.rank] if gathers else x).clone().requires_grad_()
    if how == "chunked":
        traits = LinearTraits(group, gather_input=gathers, reduce_input_gradient=not gathers)
        losses = linear_cross_entropy(
            x, weight, labels, vocab_size=vocab, traits=traits, chunk_tokens=chunk_tokens
        )  # fmt: skip
    else:
        module = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")  # its name is a function's too
        kernels = passes.FUSED if how == "fused" else passes.PLAIN
        with (
            mock.patch.object(module, "cross_entropy_passes", lambda *_: kernels),
            mock.patch.multiple(passes, _BLOCK=8, _NUM_WARPS=1),
        ):
            losses = vocab_parallel_cross_entropy(
                F.linear(x, weight), labels, vocab_size=vocab, divisible_by=divisible_by, group=group, reuse_logits=True
            )
    losses.backward(grad.to(losses.dtype))
    return losses.detach(), x.grad, weight.grad


HOWS = ("plain", "chunked") if passes.FUSED is None else ("plain", "chunked", "fused")
SIZES = {1: [(19, 8)], 2: [(19, 4), (19, 16), (13, 32)]}
"""Ranks -> (vocabulary, divisor of its padded size). In the last case one rank holds only padding."""


@pytest.mark.parametrize("world_size", SIZES)
def test_split_losses_equal_full_ones(gloo_pool, world_size):
    cases = [(how, *size) for how in HOWS for size in SIZES[world_size]]
    for (how, vocab, _), ranks in zip(cases, zip(*gloo_pool.run(_split_losses, world_size, cases)), strict=True):
        losses, grad_x, grad_weight = expected(vocab, len(ranks[0][2]) * world_size)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if how == "fused" else {"rtol": 1e-11, "atol": 1e-12}
        for actual, *_ in ranks:
            torch.testing.assert_close(actual.double(), losses, **tolerance)
            assert torch.equal(actual, ranks[0][0])
        # the summing of dX belongs to the linear layer: only the chunked form holds it
        summed = ranks[0][1] if how == "chunked" else sum(rank[1] for rank in ranks)
        torch.testing.assert_close(summed.double(), grad_x, **tolerance)
        torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]).double(), grad_weight, **tolerance)


def test_a_split_sequence_is_gathered_and_its_gradient_scattered(gloo_pool):
    cases = [("chunked", 19, 4, True, chunk_tokens) for chunk_tokens in (1, 7, 100)]
    losses, grad_x, grad_weight = expected(19, 20)
    for ranks in zip(*gloo_pool.run(_split_losses, 2, cases)):
        torch.testing.assert_close(ranks[1][0], losses)
        torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]), grad_x)
        torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), grad_weight)


def chunked(x, weight, labels, store=None, **chosen):
    traits = LinearTraits(SINGLE_PROCESS.tp, **chosen)
    return linear_cross_entropy(x, weight, labels, vocab_size=19, traits=traits, chunk_tokens=5, store=store)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("main_grad", [None, torch.float32, torch.bfloat16])
def test_chunks_add_weight_gradients_like_linear_layers(main_grad, deferred):
    x, weight, labels, grad = problem(19, 24, torch.bfloat16)
    x, weight = x.requires_grad_(), torch.nn.Parameter(weight)
    calls = []
    if main_grad is not None:
        calls = give_main_grad(weight, torch.ones(weight.shape, dtype=main_grad))
    else:
        weight.register_post_accumulate_grad_hook(calls.append)
    store = WeightGradientStore() if deferred else None
    chunked(x, weight, labels, store=store).backward(grad.float())
    if store is not None:
        assert calls == [] and weight.grad is None and len(store) == 1
        for compute in store.take():
            compute()
    assert len(calls) == 1
    _, grad_x, grad_weight = expected(19, 24, torch.bfloat16)
    torch.testing.assert_close(x.grad.double(), grad_x, rtol=3e-2, atol=3e-2)
    actual = weight.grad if main_grad is None else weight.main_grad - 1
    torch.testing.assert_close(actual.double(), grad_weight, rtol=3e-2, atol=3e-2)


def test_a_tied_weight_keeps_the_gradient_of_its_other_use():
    x, weight, labels, grad = problem(19, 24)
    weight = torch.nn.Parameter(weight)
    arrivals = give_main_grad(weight, torch.zeros(24, HIDDEN, dtype=DOUBLE))
    losses = chunked(x.requires_grad_(), weight, labels, WeightGradientStore(), weight_has_other_uses=True)
    ((losses * grad).sum() + 3 * weight.sum()).backward()
    assert not arrivals
    torch.testing.assert_close(weight.main_grad, expected(19, 24)[2])
    assert weight.grad.eq(3).all()


def test_frozen_tensors_get_no_gradient_and_evaluation_keeps_nothing():
    x, weight, labels, grad = problem(19, 24)
    losses, grad_x, _ = expected(19, 24)
    chunked(x.requires_grad_(), weight, labels, store=WeightGradientStore()).backward(grad)
    torch.testing.assert_close(x.grad, grad_x)
    assert weight.grad is None
    with torch.no_grad():
        torch.testing.assert_close(chunked(x, weight, labels), losses)


def test_settings_that_cannot_be():
    x, weight, labels, _ = problem(19, 24)
    with pytest.raises(ValueError, match="negative"):
        linear_cross_entropy(x, weight, labels, vocab_size=19, traits=LinearTraits(SINGLE_PROCESS.tp), chunk_tokens=-1)
    with pytest.raises(IndexError, match="vocabulary of 19"):
        chunked(x, weight, labels + 19)
    with pytest.raises(ValueError, match="not the result of a computation"):
        vocab_parallel_cross_entropy(weight.requires_grad_(), labels.new_zeros(24), reuse_logits=True)


def test_chunks_fill_their_memory_in_full_tiles():
    assert tokens_of_a_chunk(128256 * 2) == 1024 and tokens_of_a_chunk(CHUNK_BYTES // 3) == 3
    assert tokens_of_a_chunk(2 * CHUNK_BYTES) == 1


@pytest.mark.parametrize(
    "world_size, sequence_parallel, tied", [(1, False, True), (2, False, False), (2, True, False), (2, True, True)]
)
def test_training_in_chunks_equals_training_on_full_logits(gloo_pool, tied, world_size, sequence_parallel):
    model = (("share_embeddings_and_output_weights", tied),)
    overrides = {"cross_entropy_chunk_tokens": 5, "sequence_parallel": sequence_parallel}
    steps = run(gloo_pool, world_size, world_size, model, overrides)
    compare(steps, cached_run(gloo_pool, model, ()))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_tokens", [0, 384])
@pytest.mark.parametrize("vocab", [50257, 128256])
def test_chunks_and_full_logits_agree_on_a_gpu(vocab, chunk_tokens):
    """bf16 against float32, with fp32 main gradients; the chunked form must hold far less."""
    torch.manual_seed(0)
    tokens, hidden, stored = 2048, 512, -(-vocab // 128) * 128
    x = torch.randn(tokens, 1, hidden, device="cuda", dtype=torch.bfloat16)
    weight = F.pad(torch.randn(vocab, hidden, device="cuda") * hidden**-0.5, (0, 0, 0, stored - vocab)).bfloat16()
    labels = torch.randint(0, vocab, (tokens, 1), device="cuda")
    grad = torch.randn(tokens, 1, device="cuda")
    results, peaks = [], []
    for how in ("exact", "whole", "chunked"):
        mine = x.detach().to(torch.float32 if how == "exact" else torch.bfloat16).requires_grad_()
        parameter = torch.nn.Parameter(weight.to(mine.dtype))
        give_main_grad(parameter, torch.zeros(stored, hidden, device="cuda"))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if how == "chunked":
            losses = linear_cross_entropy(
                mine, parameter, labels, vocab_size=vocab, traits=LinearTraits(SINGLE_PROCESS.tp),
                chunk_tokens=chunk_tokens,
            )
        else:
            logits = parallel_linear(mine, parameter, None, LinearTraits(SINGLE_PROCESS.tp))
            losses = vocab_parallel_cross_entropy(logits, labels, vocab_size=vocab, reuse_logits=True)
            del logits
        losses.backward(grad)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        results.append((losses.detach(), mine.grad.float(), parameter.main_grad))
    for result in results[1:]:
        torch.testing.assert_close(result[0], results[0][0], rtol=1e-2, atol=2e-2)
        for part, exact in zip(result[1:], results[0][1:]):
            assert (part - exact).norm() / exact.norm() < 2e-2
    assert peaks[1] < 2 * tokens * stored * 2, "more than the logits and little else"
    assert peaks[2] < peaks[1] * (0.75 if chunk_tokens else 1.05), "chunks that fill 256 MiB may be one"


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_biases_of_the_vocabulary_in_chunks(soft_cap):
    x, weight, labels, grad = problem(19, 19)
    bias = torch.linspace(-1, 1, 19, dtype=DOUBLE)
    chunked, full = ([item.clone().requires_grad_() for item in (x, weight, bias)] for _ in range(2))
    traits, steps = LinearTraits(SINGLE_PROCESS.tp), LogitSteps(chunked[2], soft_cap)
    losses = linear_cross_entropy(
        *chunked[:2], labels, vocab_size=19, traits=traits, chunk_tokens=5, logits=steps
    )  # fmt: skip
    logits = F.linear(*full)
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    torch.testing.assert_close(losses, expected)
    for actual, requested in zip(torch.autograd.grad(losses, chunked, grad), torch.autograd.grad(expected, full, grad)):
        torch.testing.assert_close(actual, requested)
