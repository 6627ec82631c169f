"""Log-probabilities of sequences by the pipeline schedules equal the engine's scores, bit for bit, in every layout."""

import random

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.scheduler import Limits
from megatron.core.rl.log_probabilities import full_log_probabilities, pack, token_log_probabilities
from tests.unit_tests.core.inference.test_batch_invariant import DTYPES, SIZES, VOCAB, build

ROW = 32
LENGTHS = 5, 17, 1, 30, 9, 12, 2


def sequences():
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def scored(rank, world_size, name, dtype, sizes):
    parallel_state.initialize_model_parallel(**{SIZES[key]: size for key, size in sizes.items()})
    model = build(name, DTYPES[dtype], **sizes).train()
    found = token_log_probabilities([model], sequences(), row_length=ROW)
    assert model.training
    return found, full_log_probabilities([model], sequences(), row_length=ROW)


def generated(name, dtype):
    engine = Engine(build(name, DTYPES[dtype]), Limits(max_length=31, max_tokens=7), num_pages=40, page_size=4)
    requests = [Request(prompt=x, max_new_tokens=0, prompt_logprobs=True) for x in sequences()]
    return [
        torch.tensor([score.logprob for score in each.prompt_scores[1:]], dtype=torch.float32)
        for each in engine.generate(requests)
    ]


LAYOUTS = [
    ("dense", {}, 1), ("dense", {}, 2), ("dense", {"tp": 2}, 2), ("dense", {"cp": 2}, 2), ("dense", {"pp": 2}, 2),
    ("latent", {"tp": 2, "pp": 2}, 4), ("experts", {"tp": 2, "ep": 2, "etp": 1}, 2),
    ("experts", {"pp": 2, "ep": 2}, 4), ("experts", {"cp": 2, "ep": 2}, 4),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "sizes", "world_size"), LAYOUTS)
def test_log_probabilities_of_every_layout_equal_the_engines_scores(gloo_pool, name, sizes, world_size, dtype):
    expected = generated(name, dtype)
    for tokens, rows in gloo_pool.run(scored, world_size, name, dtype, sizes):
        assert [len(x) for x in tokens] == [length - 1 for length in LENGTHS]
        assert all(torch.equal(x, y) for x, y in zip(tokens, expected, strict=True))
        for x, row, sequence in zip(tokens, rows, sequences(), strict=True):
            assert torch.equal(row[:-1].gather(1, torch.tensor(sequence)[1:, None])[:, 0], x)


def test_sequences_that_fit_in_no_row_are_rejected():
    assert [row.places for row in pack([[1] * 3, [2] * 5, [3]], 6)] == [[(1, 0), (2, 5)], [(0, 0)]]
    for wrong in ([], [1] * 7):
        with pytest.raises(UserError, match="must be 1 to 6"):
            pack([[1], wrong], 6)
