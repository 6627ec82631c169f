"""Several optimizer steps on tensor-parallel ranks, through the gradient buffers: losses, gradients, norms and weights
of one rank, in fp64, with dropout on."""

import functools

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.sharded_tensor import from_spec
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    partial_gradients,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.placement import Replicate, global_name, named_specs
from megatron.core.transformer.transformer_config import TransformerConfig

DOUBLE = torch.float64
STEPS, BATCH, LENGTH, VOCAB = 4, 4, 8, 53


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
    """(global name, global shape, offsets, values) of what ``value`` gives for each parameter."""
    found = []
    for name, parameter, spec in named_specs(model):
        shard = from_spec(global_name(name, spec), value(parameter), spec, groups)
        found.append((shard.name, shard.global_shape, shard.offsets, shard.local.detach().clone()))
    return found


def assembled(per_rank):
    """Name -> global tensor; what several ranks hold must agree."""
    whole, seen = {}, {}
    for rank_shards in per_rank:
        for name, shape, offsets, values in rank_shards:
            target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
            region = target[tuple(slice(start, start + n) for start, n in zip(offsets, values.shape))]
            if (name, offsets) in seen:
                torch.testing.assert_close(values, region, rtol=1e-11, atol=1e-13, msg=f"{name}: replicas differ")
            seen[name, offsets] = True
            region.copy_(values)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


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
            (micro_loss / BATCH).backward()
            loss += micro_loss.detach()
    finalize_model_grads([ddp], mask[torch.cat(rows)].sum(), expected_tokens=float(BATCH), groups=groups)
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


LLAMA = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "qk_layernorm": True}
MODELS = {
    "gpt2, tied": ({"share_embeddings_and_output_weights": True}, {}),
    "gpt2, untied": ({}, {"apply_layernorm_1p": True}),
    "llama, 2 groups": ({"position_embedding_type": "rope"}, {**LLAMA, "num_query_groups": 2}),
    "one group, biases": ({"position_embedding_type": "rope", "share_embeddings_and_output_weights": True},
                          {**LLAMA, "num_query_groups": 1, "add_qkv_bias": True}),
    "post-norm residual": ({}, {"apply_residual_connection_post_layernorm": True, "num_query_groups": 2}),
}  # fmt: skip


def frozen(settings):
    return tuple(sorted(settings.items()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("world_size", "tp", "more"),
    [(2, 2, {}), (2, 2, {"sequence_parallel": True}), (4, 4, {"sequence_parallel": True}), (4, 2, {}),
     (4, 4, {"sequence_parallel": True, "tp_comm_overlap": True})],
    ids=["tp2", "tp2-sp", "tp4-sp", "tp2-dp2", "tp4-pieces"],
)  # fmt: skip
def test_training_steps_equal_those_of_one_rank(gloo_pool, name, world_size, tp, more):
    model, overrides = MODELS[name]
    reference = cached_run(gloo_pool, frozen(model), frozen(overrides))
    compare(run(gloo_pool, world_size, tp, model, {**overrides, **more}), reference)


def test_sums_come_right_after_overlapped_reductions(gloo_pool):
    """Every bucket is launched as soon as it is full, before any partial sum."""
    model, overrides = MODELS["one group, biases"]
    reference = cached_run(gloo_pool, frozen(model), frozen(overrides))
    settings = {"overlap_grad_reduce": True, "bucket_size": 100}
    compare(run(gloo_pool, 4, 2, model, {**overrides, "sequence_parallel": True}, settings), reference)


@pytest.mark.parametrize("name", ["gpt2, tied", "one group, biases"])
def test_without_the_derived_sums_replicas_drift_apart(gloo_pool, name):
    model, overrides = MODELS[name]
    with pytest.raises(AssertionError, match="replicas differ"):
        run(gloo_pool, 2, 2, model, {**overrides, "sequence_parallel": True}, sabotage="no partial sums")


def test_every_replicated_parameter_of_split_ranks_is_declared(gloo_pool):
    """Under sequence parallelism a replicated parameter sees some of the tokens, unless it stands before the split."""
    for names in gloo_pool.run(_undeclared, 2):
        assert names == ["embedding.position_embeddings.weight"]


def _undeclared(rank, world_size):
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model = build(groups, sequence_parallel=True, qk_layernorm=True)
    return [
        name for name, _, spec in named_specs(model)
        if isinstance(spec.mesh.get("tp", Replicate()), Replicate) and "tp" not in spec.grad
    ]  # fmt: skip
