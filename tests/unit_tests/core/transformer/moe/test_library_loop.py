"""A loop of a program's own, without the trainer: ``finalize_model_grads`` moves the expert bias of routers."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from tests.test_utils.training_steps import BATCH, DOUBLE, LENGTH, VOCAB, build

STEPS, RATE = 3, 0.01
EXPERTS = {
    "num_moe_experts": 4, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": RATE, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def biases(rank, world_size, ep, pp=1, sums=True):
    """Expert biases by layer after a few steps, each of a global batch in two micro-batches."""
    groups = parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ep, pipeline_model_parallel_size=pp
    )
    place = {} if pp == 1 else {"pre_process": groups.pp.is_first, "post_process": groups.pp.is_last}
    model = build(
        groups, place, expert_model_parallel_size=ep, pipeline_model_parallel_size=pp, pipeline_dtype=DOUBLE, **EXPERTS
    )
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(), model, groups=groups)
    for step in range(STEPS):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        ddp.zero_grad_buffer()
        for part in torch.arange(BATCH).chunk(groups.dp.size)[groups.dp.rank].chunk(2):
            if not model.pre_process:
                generator = torch.Generator().manual_seed(step)
                model.set_input_tensor(torch.randn(LENGTH, len(part), 16, generator=generator, dtype=DOUBLE))
            ddp(tokens[part, :-1], torch.arange(LENGTH).expand(len(part), -1), labels=tokens[part, 1:]).sum().backward()
        finalize_model_grads([ddp], groups=groups, sum_statistics=sums)
    return {layer.layer_number: layer.mlp.router.expert_bias for layer in model.decoder.layers}


def test_a_plain_loop_moves_expert_biases_once_a_step_by_the_load_of_all_ranks(gloo_pool):
    (expected,) = gloo_pool.run(biases, 1, 1)
    assert all(bias.abs().max() > 1.5 * RATE for bias in expected.values())
    for bias in expected.values():  # at most one step of RATE each time
        torch.testing.assert_close((bias / RATE).round() * RATE, bias, rtol=1e-4, atol=1e-8)
        assert bias.abs().max() <= STEPS * RATE * 1.0001
    for ep in (1, 2):
        for results in gloo_pool.run(biases, 2, ep):
            assert results.keys() == expected.keys()
            assert all(torch.equal(results[layer], expected[layer]) for layer in results)


def test_a_caller_with_separate_sums_moves_them(gloo_pool):
    (results,) = gloo_pool.run(biases, 1, 1, 1, False)
    assert all(not bias.any() for bias in results.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_every_pipeline_stage_moves_those_of_its_layers(gloo_pool, rank):
    result = gloo_pool.run(biases, 2, 1, 2)[rank]
    assert list(result) == [rank + 1] and result[rank + 1].any()
