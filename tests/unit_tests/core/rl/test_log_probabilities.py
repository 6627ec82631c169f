"""Log-probabilities of sequences by the pipeline schedules equal the engine's scores, bit for bit, in every layout."""

import random
from functools import cache

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.rl import log_probabilities
from megatron.core.rl.log_probabilities import (
    full_log_probabilities,
    pack,
    token_log_probabilities,
    token_statistics,
    vocab_parallel_entropies,
)
from tests.unit_tests.core.inference.test_batch_invariant import DTYPES, SIZES, VOCAB, build
from tests.unit_tests.core.inference.test_engine import MODELS
from tests.unit_tests.core.models.test_gpt_model import make_config, make_model

ROW = 32
LENGTHS = 5, 17, 1, 30, 9, 12, 2
TEMPERATURE = 0.7


def sequences():
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def scored(rank, world_size, name, dtype, sizes):
    parallel_state.initialize_model_parallel(**{SIZES[key]: size for key, size in sizes.items()})
    model = build(name, DTYPES[dtype], **sizes).train()
    result = token_log_probabilities([model], sequences(), row_length=ROW)
    assert model.training
    scaled = token_log_probabilities([model], sequences(), row_length=ROW, temperature=TEMPERATURE)
    return result, full_log_probabilities([model], sequences(), row_length=ROW), scaled


@cache
def generated(name, dtype, scaled):
    """Scores by the engine, on one rank, from logits divided by TEMPERATURE if ``scaled``."""
    fields = {"sampling": Sampling(temperature=TEMPERATURE), "logprobs_at_temperature": True} if scaled else {}
    engine = Engine(build(name, DTYPES[dtype]), Limits(max_length=31, max_tokens=7), num_pages=40, page_size=4)
    requests = [Request(prompt=x, max_new_tokens=0, prompt_logprobs=True, **fields) for x in sequences()]
    return [
        torch.tensor([score.logprob for score in item.prompt_scores[1:]], dtype=torch.float32)
        for item in engine.generate(requests)
    ]


LAYOUTS = [
    ("dense", {}, 1), ("dense", {}, 2), ("dense", {"tp": 2}, 2), ("dense", {"cp": 2}, 2), ("dense", {"pp": 2}, 2),
    ("latent", {"tp": 2, "pp": 2}, 4), ("experts", {"tp": 2, "ep": 2, "etp": 1}, 2),
    ("experts", {"pp": 2, "ep": 2}, 4), ("experts", {"cp": 2, "ep": 2}, 4),
]  # fmt: skip


IN_BF16 = [LAYOUTS[1], LAYOUTS[3], *LAYOUTS[5:8]]  # every model and every axis
CASES = [*((*layout, "fp32") for layout in LAYOUTS), *((*layout, "bf16") for layout in IN_BF16)]


@pytest.mark.parametrize(("name", "sizes", "world_size", "dtype"), CASES)
def test_log_probabilities_of_every_layout_equal_the_engines_scores(gloo_pool, name, sizes, world_size, dtype):
    expected, hot = generated(name, dtype, False), generated(name, dtype, True)
    for tokens, rows, scaled in gloo_pool.run(scored, world_size, name, dtype, sizes):
        assert [len(x) for x in tokens] == [length - 1 for length in LENGTHS]
        assert all(torch.equal(x, y) for x, y in zip(tokens, expected, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(scaled, hot, strict=True))
        for x, row, sequence in zip(tokens, rows, sequences(), strict=True):
            assert torch.equal(row[:-1].gather(1, torch.tensor(sequence)[1:, None])[:, 0], x)


def statistics(rank, world_size, sizes, temperature, options):
    log_probabilities.PIECE = 5
    sizes = {SIZES[key]: size for key, size in sizes.items()}
    groups = parallel_state.initialize_model_parallel(**sizes)
    fields = {**MODELS["grouped"], **sizes}
    ends = {"pre_process": groups.pp.is_first, "post_process": groups.pp.is_last}
    names = {"position_embedding_type": fields.pop("position_embedding_type")}
    model = make_model(make_config(**fields), **names, **ends, **options)
    return token_statistics([model], sequences(), row_length=ROW, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
@pytest.mark.parametrize(("sizes", "options"), [
    ({}, {}), ({"tp": 2}, {}), ({"tp": 2}, {"parallel_output": False}), ({"cp": 2}, {}), ({"pp": 2}, {}),
    ({"tp": 2, "cp": 2}, {}), ({"tp": 2, "pp": 2}, {}),
])  # fmt: skip
def test_statistics_of_every_layout_equal_their_definition(gloo_pool, sizes, options, temperature):
    model, expected = make_model(**MODELS["grouped"]).eval(), []
    for sequence in sequences():
        ids = torch.tensor([sequence])
        with torch.no_grad():
            logits = model(ids, torch.arange(len(sequence))[None])[0, :-1, :VOCAB]
        weights = (logits / temperature).exp()
        chances = weights / weights.sum(-1, keepdim=True)
        chosen = chances.gather(1, ids[0, 1:, None])[:, 0].log()
        expected.append((chosen, -(chances * chances.log()).sum(-1)))
    world_size = 1
    for size in sizes.values():
        world_size *= size
    for actual in gloo_pool.run(statistics, world_size, sizes, temperature, options):
        for item, requested in zip(actual, expected, strict=True):
            torch.testing.assert_close(tuple(item), requested, atol=1e-10, rtol=0)


def entropies(rank, world_size, logits):
    group = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size).tp
    local = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    result = vocab_parallel_entropies(local, group)
    (result * torch.arange(1.0, 4.0)).sum().backward()
    return result.detach(), local.grad


def test_entropies_and_their_gradients_equal_those_of_torch(gloo_pool):
    logits = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5
    logits[:, 5:] += 900  # exponentials of unshifted logits overflow
    true = logits[:, :9].clone().requires_grad_()
    logits[:, 9:] = -torch.inf
    expected = torch.distributions.Categorical(logits=true).entropy()
    (expected * torch.arange(1.0, 4.0)).sum().backward()
    for size in (1, 2, 4):  # the last of four ranks holds padding only
        results = gloo_pool.run(entropies, size, logits)
        assert all(torch.allclose(actual, expected.detach(), atol=1e-12, rtol=0) for actual, _ in results)
        gradient = torch.cat([grad for _, grad in results], -1)
        torch.testing.assert_close(gradient[:, :9], true.grad, atol=1e-12, rtol=0)
        assert not gradient[:, 9:].any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperatures_that_divide_by_nothing_are_rejected(temperature):
    with pytest.raises(UserError, match="must be above 0"):
        token_log_probabilities([], [[1, 2]], row_length=ROW, temperature=temperature)


def test_sequences_that_fit_in_no_row_are_rejected():
    assert [row.places for row in pack([[1] * 3, [2] * 5, [3]], 6)] == [[(1, 0), (2, 5)], [(0, 0)]]
    for wrong in ([], [1] * 7):
        with pytest.raises(UserError, match="must be 1 to 6"):
            pack([[1], wrong], 6)
