"""Optimizer steps on tensor-parallel ranks give the losses, gradients, norms and weights of one rank."""

import pytest

from megatron.core import parallel_state
from megatron.core.sharding.placement import Replicate
from tests.test_utils.specs import named_specs
from tests.test_utils.training_steps import build, cached_run, compare, frozen, run

LLAMA = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "qk_layernorm": True}
MODELS = {
    "gpt2, tied": ({"share_embeddings_and_output_weights": True}, {}),
    "gpt2, untied": ({}, {"apply_layernorm_1p": True}),
    "llama, 2 groups": ({"position_embedding_type": "rope"}, {**LLAMA, "num_query_groups": 2}),
    "one group, biases": ({"position_embedding_type": "rope", "share_embeddings_and_output_weights": True},
                          {**LLAMA, "num_query_groups": 1, "add_qkv_bias": True}),
    "post-norm residual": ({}, {"apply_residual_connection_post_layernorm": True, "num_query_groups": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("world_size", "tp", "more"),
    [(2, 2, {}), (2, 2, {"sequence_parallel": True}), (4, 4, {"sequence_parallel": True}), (4, 2, {}),
     (4, 4, {"sequence_parallel": True, "tp_comm_overlap": True})],
    ids=["tp2", "tp2-sp", "tp4-sp", "tp2-dp2", "tp4-interleaved"],
)  # fmt: skip
def test_training_steps_equal_those_of_one_rank(gloo_pool, name, world_size, tp, more):
    if more.get("tp_comm_overlap") and name not in ("gpt2, tied", "one group, biases"):
        pytest.skip("GEMMs per slice of the sequence concern linear layers, with and without biases")
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
    """Under sequence parallelism a replicated parameter sees a part of the tokens, unless it precedes the split."""
    for names in gloo_pool.run(_undeclared, 2):
        assert names == ["embedding.position_embeddings.weight"]


def _undeclared(rank, world_size):
    groups = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model = build(groups, sequence_parallel=True, qk_layernorm=True)
    return [
        name for name, _, spec in named_specs(model)
        if isinstance(spec.mesh.get("tp", Replicate()), Replicate) and "tp" not in spec.grad
    ]  # fmt: skip
