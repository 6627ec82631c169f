"""Greedy generation with the cache gives the text of ``transformers`` for every family of models."""

import random

import pytest
import torch

from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from tests.functional_tests.test_foreign_models import FAMILIES, both_models
from tests.test_utils.foreign_models import VOCAB

pytest.importorskip("transformers", reason="pip install transformers: it is what the texts are compared with")


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_equals_that_of_transformers(name):
    foreign, native = both_models(FAMILIES[name])
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 5, 11, 17)]
    engine = Engine(native, Limits(max_length=64, max_tokens=7, max_sequences=3), num_pages=20, page_size=4)
    greedy = {"max_new_tokens": 10, "sampling": Sampling(temperature=0)}
    finished = engine.generate([Request(prompt=prompt, **greedy) for prompt in prompts])
    for prompt, completion in zip(prompts, finished, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(10):
                ids = torch.cat([ids, foreign(ids).logits[:, -1:].argmax(-1)], dim=1)
        assert completion.tokens == ids[0, len(prompt) :].tolist()
