"""A few optimizer steps of a small GPT on tensor- and data-parallel ranks, through the gradient buffers, in fp64, with
dropout on: losses, global gradients, norms and global weights after each."""

import functools

import torch

from megatron.core import parallel_state
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    partial_gradients,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.sharding.sharded_tensor import flat_range_tensors
from tests.test_utils.specs import named_specs

DOUBLE = torch.float64
STEPS, BATCH, LENGTH, VOCAB = 2, 4, 8, 53  # the second step sees the first one's weights, moments, buffers


def build(groups, model=(), **overrides):
    """A small GPT with everything on that is not overridden."""
    settings = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": DOUBLE, "init_method_std": 0.2,
        "hidden_dropout": 0.1, "attention_dropout": 0.1, "use_cpu_initialization": True,
        "tensor_model_parallel_size": groups.tp.size, **overrides,
    }  # fmt: skip
    if groups.tp.size == 1:
        settings.update(sequence_parallel=False, tp_comm_overlap=False, distribute_saved_activations=False)
    config = TransformerConfig(**settings)
    spec = get_gpt_decoder_block_spec(config)
    return GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, groups=groups, **dict(model))


def shards(model, groups, value):
    """Return (global name, global shape, offsets, values) of the shards of ``value(parameter)`` for each parameter."""
    result = []
    for name, parameter, _ in named_specs(model):
        full = (0, parameter.numel())
        for shard in flat_range_tensors(name, value(parameter), parameter, full, groups=groups).values():
            result.append((shard.name, shard.global_shape, shard.offsets, shard.local.detach().clone()))
    return result


def assembled(per_rank):
    """Name -> global tensor; what several ranks hold must agree."""
    full, observed = {}, {}
    for rank_shards in per_rank:
        for name, shape, offsets, values in rank_shards:
            target = full.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
            region = target[tuple(slice(start, start + n) for start, n in zip(offsets, values.shape))]
            if (name, offsets) in observed:
                torch.testing.assert_close(values, region, rtol=1e-11, atol=1e-13, msg=f"{name}: replicas differ")
            observed[name, offsets] = True
            region.copy_(values)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


def step_results(ddp, optimizer, groups, step):
    """Forward and backward of this rank's half of the batch in two micro-batches, sums, update."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    mask = torch.rand((BATCH, LENGTH), generator=generator) < 0.8
    rows = torch.arange(BATCH).chunk(groups.dp.size)[groups.dp.rank].chunk(2)
    ddp.zero_grad_buffer()
    loss = torch.zeros((), dtype=DOUBLE)
    for index, part in enumerate(rows):
        with ddp.no_sync() if index < len(rows) - 1 else torch.enable_grad():
            losses = ddp(
                tokens[part, :-1], torch.arange(LENGTH).expand(len(part), -1), labels=tokens[part, 1:],
                sample_index=part + step * BATCH,
            )  # fmt: skip
            micro_loss = (losses * mask[part]).sum()
            micro_loss.backward()
            loss += micro_loss.detach()
    finalize_model_grads([ddp], mask[torch.cat(rows)].sum(), groups=groups)
    gradients = shards(ddp.module, groups, lambda parameter: parameter.main_grad)
    _, norm, _ = optimizer.step()
    return loss, gradients, norm, shards(ddp.module, groups, lambda parameter: parameter)


def train(rank, world_size, tp, sabotage, model, overrides, ddp_settings):
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    if sabotage == "no partial sums":
        partial_gradients._all_reduce, real = lambda sums, group: None, partial_gradients._all_reduce
    try:
        module = build(groups, model, **overrides)
        ddp = DistributedDataParallel(None, DistributedDataParallelConfig(**ddp_settings), module, groups=groups)
        # key biases have no gradient but rounding, which Adam would scale up to 1 with a small epsilon
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=1.0, adam_eps=1e-4), [ddp], groups=groups)
        return groups.tp.size, [step_results(ddp, optimizer, groups, step) for step in range(STEPS)]
    finally:
        if sabotage == "no partial sums":
            partial_gradients._all_reduce = real


def run(pool, world_size, tp, model=(), overrides=(), ddp_settings=(), sabotage=None):
    """Per step: (loss, global gradients, norm, global weights)."""
    ranks = pool.run(train, world_size, tp, sabotage, dict(model), dict(overrides), dict(ddp_settings))
    steps = []
    for results in zip(*(steps for _, steps in ranks)):
        losses, gradients, norms, weights = zip(*results)
        assert len(set(norms)) == 1
        steps.append((sum(losses) / tp, assembled(gradients), norms[0], assembled(weights)))
    return steps


@functools.cache
def cached_run(pool, model, overrides):
    return run(pool, 1, 1, model, overrides)


def compare(steps, reference):
    for mine, expected in zip(steps, reference, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def frozen(settings):
    return tuple(sorted(settings.items()))


def give_main_grad(parameter, total):
    """Set ``total`` as ``main_grad`` like a gradient buffer. Return a list that grows with every gradient arrival."""
    parameter.main_grad, parameter.grad_added_to_main_grad = total, False
    parameter.grad_ready = torch.zeros((), device=parameter.device, requires_grad=True)
    arrivals = []
    parameter.grad_ready.register_post_accumulate_grad_hook(arrivals.append)
    return arrivals
