"""A table with ``main_grad`` gets there what torch's own lookup gives, tied or not, split or not."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.sharding.placement import Normal, initialize_parameters
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding, VocabParallelOutput
from tests.test_utils.specs import named_specs
from tests.test_utils.training_steps import assembled, shards


class _Net(torch.nn.Module):
    def __init__(self, config, tied, groups):
        super().__init__()
        built = {"config": config, "init_method": Normal(1.0), "groups": groups, "divisible_by": 4}
        self.embedding = VocabParallelEmbedding(19, 6, **built)
        self.output = VocabParallelOutput(6, 19, weight_is_shared=tied, **built)
        self.tied = tied

    def forward(self, ids, labels):
        return self.output(self.embedding(ids).tanh(), self.embedding.weight if self.tied else None, labels)


def _main_gradients(rank, world_size, tied, fused):
    """After two micro-batches in which ids repeat, and how the table's gradient arrived."""
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    config = TransformerConfig(
        num_layers=1, hidden_size=6, num_attention_heads=2, params_dtype=torch.float64,
        tensor_model_parallel_size=world_size, gradient_accumulation_fusion=fused,
    )  # fmt: skip
    net = _Net(config, tied, groups)
    initialize_parameters(net, 3, groups)
    arrivals = []
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), net, groups=groups)
    net.embedding.weight.register_post_accumulate_grad_hook(lambda _: arrivals.append("dense"))
    net.embedding.weight.grad_ready.register_post_accumulate_grad_hook(lambda _: arrivals.append("fused"))
    ddp.zero_grad_buffer()
    for seed in range(2):
        ids = torch.randint(0, 19, (2, 13), generator=torch.Generator().manual_seed(seed))
        ids[:, ::2] = 18
        ddp(ids, ids.roll(1, dims=1)).sum().backward()
    assert [name for name, *_ in named_specs(net)] == ["embedding.weight"] + ["output.weight"] * (not tied)
    return shards(net, groups, lambda parameter: parameter.main_grad), arrivals


@pytest.mark.parametrize("tied", [False, True])
def test_main_gradients_equal_those_of_a_plain_lookup(gloo_pool, tied):
    ((plain, arrivals),) = gloo_pool.run(_main_gradients, 1, tied, False)
    assert arrivals == ["dense", "dense"]
    reference = assembled([plain])
    for world_size in (1, 2):
        per_rank = gloo_pool.run(_main_gradients, world_size, tied, True)
        assert all(arrivals == ["fused", "fused"] for _, arrivals in per_rank)
        torch.testing.assert_close(assembled([result for result, _ in per_rank]), reference, rtol=1e-12, atol=1e-13)
