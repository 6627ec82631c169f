"""Divergences of a student from a teacher: ``F.kl_div``, ModelOpt's loss, slices of the vocabulary, stored entries."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.tensor_parallel import distillation
from megatron.core.tensor_parallel.distillation import Divergence, slice_of_entries, top_entries

SINGLE = SINGLE_PROCESS.tp
TOKENS, VOCABULARY, PADDED = (2, 3), 13, 16


def logits(seed, dtype=torch.float64, scale=4.0):
    torch.manual_seed(seed)
    full = torch.randn((*TOKENS, PADDED), dtype=dtype) * scale
    full[..., VOCABULARY:] = -torch.inf
    return full


def definition(student, teacher, temperature, reverse):
    q, p = ((x[..., :VOCABULARY] / temperature).log_softmax(-1) for x in (student, teacher))
    if reverse:
        p, q = q, p
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1) * temperature**2


KINDS = [(1.0, False), (2.5, False), (1.0, True), (0.7, True)]


@pytest.mark.parametrize("temperature, reverse", KINDS)
@pytest.mark.parametrize("block", [distillation.BLOCK, 2 * VOCABULARY], ids=["one block", "three blocks"])
def test_value_and_gradient_are_those_of_kl_div(monkeypatch, temperature, reverse, block):
    monkeypatch.setattr(distillation, "BLOCK", block)
    student, teacher, weight = logits(1).requires_grad_(), logits(2), torch.rand(TOKENS, dtype=torch.float64)
    actual = Divergence(VOCABULARY, SINGLE, temperature, reverse)(student, teacher)
    expected = definition(student, teacher, temperature, reverse)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    gradients = [torch.autograd.grad((values * weight).sum(), student)[0] for values in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)
    assert actual.min() > 0.1 and not gradients[0][..., VOCABULARY:].any()


ORACLE = """
import sys, torch
from modelopt.torch.distill import LogitsDistillationLoss

student, teacher = torch.load(sys.argv[1])
values = LogitsDistillationLoss(temperature=2.5, reduction="none")(student.requires_grad_(), teacher)
torch.save((values.detach(), *torch.autograd.grad(values.sum(), student)), sys.argv[1])
"""


@pytest.mark.skipif(find_spec("modelopt") is None, reason="pip install nvidia-modelopt: it is what is compared with")
def test_value_and_gradient_are_those_of_model_optimizer(tmp_path):
    """In a process without this package, which ModelOpt takes for Megatron-LM."""
    student, teacher = logits(1).requires_grad_(), logits(2)
    torch.save([x.detach()[..., :VOCABULARY].clone() for x in (student, teacher)], tmp_path / "values.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", ORACLE, tmp_path / "values.pt"]
    subprocess.run(words, check=True, cwd=tmp_path, env=environment)
    actual = Divergence(VOCABULARY, SINGLE, 2.5)(student, teacher)
    (gradient,) = torch.autograd.grad(actual.sum(), student)
    expected = torch.load(tmp_path / "values.pt")
    torch.testing.assert_close((actual.detach(), gradient[..., :VOCABULARY]), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
def test_equal_logits_have_no_divergence_and_no_gradient(dtype, reverse):
    student = logits(3, dtype, 50.0).requires_grad_()
    values = Divergence(VOCABULARY, SINGLE, 2.0, reverse)(student, student.detach().clone())
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert values.dtype == torch.float32 and not values.any() and not gradient.any()


def test_large_logits_of_half_precision_are_computed_in_fp32():
    student, teacher = (logits(seed, torch.bfloat16, 300.0) for seed in (4, 5))
    actual = Divergence(VOCABULARY, SINGLE)(student, teacher)
    expected = definition(student.double(), teacher.double(), 1.0, False)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


def slices(rank, world_size, temperature, reverse):
    """A task of the pool: values and this rank's gradient, of slices with padding at the end."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    try:
        group, size = parallel_state.get_process_groups().tp, PADDED // world_size
        student, teacher = (x[..., rank * size : (rank + 1) * size].clone() for x in (logits(1), logits(2)))
        num_true = max(0, min(size, VOCABULARY - rank * size))
        values = Divergence(num_true, group, temperature, reverse)(student.requires_grad_(), teacher)
        (gradient,) = torch.autograd.grad(values.sum(), student)
        top = top_entries(teacher, 6, num_true, group)
        return values.detach(), gradient, top, slice_of_entries(*top, size, group)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("ranks, temperature, reverse", [(2, *KINDS[1]), (8, *KINDS[0]), (8, *KINDS[3])])
def test_slices_of_the_vocabulary_give_the_full_values(gloo_pool, ranks, temperature, reverse):
    """On 8 ranks the last one has padding only."""
    results = gloo_pool.run(slices, ranks, temperature, reverse)
    student, teacher = logits(1).requires_grad_(), logits(2)
    expected = definition(student, teacher, temperature, reverse)
    (gradient,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(torch.cat([part[1] for part in results], -1), gradient, rtol=1e-11, atol=1e-13)
    values, ids = teacher[..., :VOCABULARY].log_softmax(-1).topk(6)
    dense = torch.full_like(teacher, distillation.ABSENT).scatter(-1, ids, values)
    torch.testing.assert_close(torch.cat([part[3] for part in results], -1), dense, rtol=1e-12, atol=1e-13)
    for actual, _, (top, top_ids), _ in results:
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(top, values, rtol=1e-12, atol=1e-13)
        assert torch.equal(top_ids, ids)


@pytest.mark.parametrize("number", [4, VOCABULARY])
def test_stored_entries_are_a_distribution_over_these_entries(number):
    student, teacher = logits(1).requires_grad_(), logits(2)
    values, ids = top_entries(teacher, number, VOCABULARY, SINGLE)
    actual = Divergence(VOCABULARY, SINGLE, 2.0)(student, slice_of_entries(values, ids, PADDED, SINGLE))
    p = (values / 2).log_softmax(-1)
    q = (student[..., :VOCABULARY] / 2).log_softmax(-1).gather(-1, ids)
    expected = 4 * (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    gradients = [torch.autograd.grad(result.sum(), student)[0] for result in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)
    if number == VOCABULARY:
        torch.testing.assert_close(actual, definition(student, teacher, 2.0, False), rtol=1e-12, atol=1e-13)
