"""Tensor, pipeline and expert parallelism give the tokens and log-probabilities of one rank."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.evaluation.scoring import score
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from tests.unit_tests.core.inference.test_engine import LATENT, LATENT_WINDOW, MODELS, ROPE, prompts
from tests.unit_tests.core.models.test_gpt_model import make_config, make_model

EXPERTS = {**MODELS["experts"], "moe_token_dispatcher_type": "alltoall"}
CASES = {
    "tp": ({"tensor": 2}, MODELS["grouped"]),
    "tp of latents": ({"tensor": 2}, {**ROPE, **LATENT}),
    "tp of latents with window": ({"tensor": 2}, MODELS[LATENT_WINDOW]),
    "tp with sequence parallelism": ({"tensor": 2}, {**MODELS["learned"], "sequence_parallel": True}),
    "tp of latents with sequence parallelism": ({"tensor": 2}, {**ROPE, **LATENT, "sequence_parallel": True}),
    "pp": ({"pipeline": 2}, MODELS["tied"]),
    "ep": ({"expert": 2}, EXPERTS),
    "tp, ep": ({"tensor": 2, "expert": 2, "expert_tensor": 1}, {**EXPERTS, "sequence_parallel": True}),
    "tp, pp": ({"tensor": 2, "pipeline": 2}, MODELS["grouped"]),
}
SIZES = {"tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size",
         "expert": "expert_model_parallel_size", "expert_tensor": "expert_tensor_parallel_size"}  # fmt: skip


def completions(rank, world_size, ranks, fields):
    """Return tokens and log-probabilities of all prompts, then scores of prompts as continuations; ranks other than 0
    return nothing."""
    sizes = {SIZES[name]: size for name, size in ranks.items()}
    groups = parallel_state.initialize_model_parallel(**sizes)
    options = names(fields)
    config = make_config(**fields, **sizes)
    model = make_model(config, **options, pre_process=groups.pp.is_first, post_process=groups.pp.is_last)
    engine = Engine(model, Limits(max_length=16, max_tokens=5, max_sequences=3), num_pages=9, page_size=4)
    requests = [
        Request(prompt=x, max_new_tokens=5, prompt_logprobs=n % 2 == 0, top_logprobs=2, sampling=Sampling(seed=n))
        for n, x in enumerate(prompts())
    ]
    finished = engine.generate(requests)
    values = [x.logprob for item in finished for x in (*item.prompt_scores, *item.scores) if x is not None]
    if finished:
        values += [item.logprob for item in score(engine, [*zip(prompts(), prompts()[1:]), ([3], [4]), ([3], [5])])]
        engine.stop()
    else:
        engine.follow()
    return [item.tokens for item in finished], torch.tensor(values, dtype=torch.float64)


def damaged(rank, world_size):
    """Return the error of each rank for a model whose last layer has NaN."""
    groups = parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = make_config(pipeline_model_parallel_size=2)
    model = make_model(config, pre_process=groups.pp.is_first, post_process=groups.pp.is_last)
    if groups.pp.is_last:
        model.decoder.final_layernorm.weight.data.fill_(torch.nan)
    engine = Engine(model, Limits(max_length=16), num_pages=9, page_size=4)
    try:
        engine.generate([Request(prompt=[1, 2])])
    except UserError as error:
        return str(error)
    return "finished"


def test_a_damaged_stage_is_one_message_and_no_rank_waits(gloo_pool):
    first, second = gloo_pool.run(damaged, 2)
    assert "logits are NaN or infinite" in first and second == "finished"


def names(fields):
    """Arguments of the model among ``fields``; removes them."""
    chosen = ("position_embedding_type", "share_embeddings_and_output_weights")
    return {name: fields.pop(name) for name in chosen if name in fields}


@pytest.mark.parametrize("case", CASES)
def test_ranks_generate_the_same_text_as_one_rank(gloo_pool, case):
    ranks, fields = CASES[case]
    single = {name: value for name, value in fields.items() if name != "sequence_parallel"}
    ((tokens, logprobs),) = gloo_pool.run(completions, 1, {}, single)
    (first, values), *rest = gloo_pool.run(completions, 4 if case == "tp, pp" else 2, ranks, fields)
    assert first == tokens and all(other[0] == [] for other in rest)
    torch.testing.assert_close(values, logprobs, atol=1e-10, rtol=0)
