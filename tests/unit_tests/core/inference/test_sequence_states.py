"""Layers with a state per sequence generate what a full forward pass gives: in chunks, after preemption, and from
snapshots of equal beginnings."""

import random

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.sequence_states import NUM_RESERVED, UNUSED, SlotPool
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.test_utils.gated_recurrence import GatedRecurrence, mixed_layers

VOCAB, GREEDY = 32, Sampling(temperature=0)


def build(**sizes):
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=2, fp64=True, init_method_std=0.3, **sizes
    )
    pp = parallel_state.get_process_groups().pp if sizes else SINGLE_PROCESS.pp
    stage = {"pre_process": pp.is_first, "post_process": pp.is_last}
    return GPTModel(config, mixed_layers(config), VOCAB, 64, position_embedding_type="rope", **stage).eval()


def engine(model, pages=40, **limits):
    sizes = {"max_length": 40, "max_tokens": 7, "max_sequences": 3} | limits
    return Engine(model, Limits(**sizes), num_pages=pages, page_size=4)


def continued(model, prompt, count):
    """Greedy tokens by a full forward pass per token, and their log-probabilities."""
    ids, scores = list(prompt), []
    for _ in range(count):
        row = torch.tensor([ids])
        logits = model(row, torch.arange(len(ids))[None])[0, -1, :VOCAB]
        ids.append(int(logits.argmax()))
        scores.append(float(logits.log_softmax(-1)[ids[-1]]))
    return ids[len(prompt) :], scores


def prompts(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 19))] for _ in range(count)]


@torch.no_grad()
def check(model, engine, prompts, count=9):
    results = engine.generate([Request(prompt=x, max_new_tokens=count, sampling=GREEDY) for x in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        tokens, scores = continued(model, prompt, count)
        assert result.tokens == tokens
        assert [score.logprob for score in result.scores] == pytest.approx(scores, abs=1e-10)


def test_prompts_in_chunks_and_decoding_equal_the_full_forward_pass():
    model = build()
    check(model, engine(model), prompts(7))


def test_preempted_sequences_are_computed_again_from_the_zero_state():
    model = build()
    small = engine(model, pages=9)
    check(model, small, prompts(6, seed=1), count=12)
    assert small.scheduler.num_preemptions > 1


def test_equal_beginnings_continue_from_a_snapshot(monkeypatch):
    model = build()
    both, beginning = engine(model), prompts(1, seed=2)[0][:3] + list(range(10))  # three pages
    check(model, both, [beginning, [5, 6]])
    tokens, states = [], GatedRecurrence.states
    monkeypatch.setattr(
        GatedRecurrence, "states", lambda self, *args: tokens.append(len(args[0])) or states(self, *args)
    )
    (result,) = both.generate([Request(prompt=[*beginning, 7], max_new_tokens=1, sampling=GREEDY)])
    assert tokens == [1, 1], "of 13 tokens twelve are in three pages, whose last state is a snapshot"
    monkeypatch.undo()
    with torch.no_grad():
        assert result.tokens == continued(model, [*beginning, 7], 1)[0]


def test_a_snapshot_that_was_replaced_is_not_used():
    model = build()
    single = engine(model, max_sequences=1)  # and two snapshots
    check(model, single, [*prompts(3, seed=3), list(range(9)), list(range(9, 18)), list(range(9))], count=5)


def test_snapshots_of_earlier_weights_are_not_used():
    """After the weights change, a sequence writes the keys of earlier pages again, with other states."""
    model, beginning = build(), list(range(13))
    cached = engine(model)
    check(model, cached, [beginning])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    cached.discard_cache()
    check(model, cached, [beginning])
    check(model, cached, [[*beginning, 7]])


def test_snapshots_of_a_failed_sequence_are_not_used():
    """A fault that passes, such as a flipped bit, must not stay in the states of later sequences."""
    model, beginning = build(), list(range(13))
    cached = engine(model)
    weight = model.embedding.word_embeddings.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight[0] = torch.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        cached.generate([Request(prompt=beginning, max_new_tokens=1, sampling=GREEDY)])
    with torch.no_grad():
        weight.copy_(good)
    check(model, cached, [beginning])
    check(model, cached, [[*beginning, 7]])


def generated(rank, world_size, sizes):
    parallel_state.initialize_model_parallel(*sizes)
    names = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    model = build(**dict(zip(names, sizes)))
    requests = [Request(prompt=x, max_new_tokens=5, sampling=GREEDY) for x in prompts(5, seed=4)]
    return [result.tokens for result in engine(model).generate(requests)]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_layouts_generate_the_same_text(gloo_pool, sizes):
    expected = [result.tokens for result in engine(build()).generate(
        [Request(prompt=x, max_new_tokens=5, sampling=GREEDY) for x in prompts(5, seed=4)])]  # fmt: skip
    assert gloo_pool.run(generated, 2, sizes)[0] == expected


def test_slots_of_sequences_and_snapshots_do_not_overlap():
    pool = SlotPool(2, 2)
    slots = [pool.allocate(), pool.allocate(), pool.snapshot(b"a"), pool.snapshot(b"b")]
    assert sorted(slots) == [NUM_RESERVED + i for i in range(4)] and pool.num_slots == NUM_RESERVED + 4
    assert pool.snapshot(b"a") == UNUSED and pool.find(b"a") == slots[2]
    assert pool.snapshot(b"c") == slots[3] and pool.find(b"b") is None, "b was used before a"
    pool.withdraw([b"a"])
    assert pool.find(b"a") is None and pool.snapshot(b"d") == slots[2]


def test_two_sequences_of_a_step_never_write_one_snapshot():
    """An equal sequence wrote the key again in this step: a later one must not pass its slot on."""
    pool = SlotPool(2, 2)
    pool.begin_step()
    first = pool.snapshot(b"a")
    pool.begin_step()
    pool.withdraw([b"a"])
    repeated = pool.snapshot(b"a")
    pool.replace(b"a")
    assert pool.find(b"a") == repeated and pool.snapshot(b"b") != repeated
    pool.begin_step()
    pool.replace(b"a")
    assert pool.find(b"a") is None and pool.snapshot(b"c") == first == repeated


def test_equal_texts_in_progress_keep_their_snapshots_apart():
    model = build()
    three, prompt = engine(model, max_sequences=4), [3, 1, 4, 1, 5]
    check(model, three, [prompt, prompt, [2, 7], prompt, prompt], count=14)
    results = three.generate([Request(prompt=[*prompt, 9, 2], max_new_tokens=4, sampling=GREEDY)])
    with torch.no_grad():
        assert results[0].tokens == continued(model, [*prompt, 9, 2], 4)[0]
