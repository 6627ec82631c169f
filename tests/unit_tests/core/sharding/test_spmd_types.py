"""Declarations of parameters proven by types (``spmd_types``), on a fake process group of any size.

A replicated parameter whose gradient is declared a partial sum is R, any other is I: I times a tensor that
differs by rank is a type error (the gradient misses the other ranks), and so is R times an equal one (summed twice).
No number is compared, so that the proof holds for layouts that are too large to run.
"""

from unittest import mock

import pytest

from tests.test_utils.gloo_pool import RankPool

pytest.importorskip("spmd_types", reason="pip install spmd-types: it checks the types")

MODELS = ("full", "full-rms", "full-latent", "full-latent-plain", "full-latent-fused", "llama", "mqa", "yarn")


def check(rank, world_size, model, ranks, sequence_parallel):
    """A task of the pool: (type of the loss, parameters whose other type passes too, number of those tried)."""
    import spmd_types as spmd
    import spmd_types.checker
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core import parallel_state
    from megatron.core.groups.process_groups import RankGrid, build_process_groups
    from megatron.training.start.parallelize import build_model
    from megatron.training.tasks.language_model import task_class
    from megatron.training.verify.layout_trace import with_synthetic_data
    from tests.test_utils import layout_table, spmd_rules
    from tests.test_utils.layouts import VOCAB_SIZE, Layout, configure

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    flags = f"{layout_table.MODELS[model]} {layout_table.NO_DROPOUT} --num-layers 1 --num-attention-heads 8"
    layout = f"--micro-batch-size 2 --tensor-model-parallel-size {ranks} {'--sequence-parallel' * sequence_parallel}"
    cfg = configure(Layout(flags, layout, ranks).argv, ranks, "fp32")
    groups = build_process_groups(RankGrid(tp=ranks), ranks - 1, lambda name, lists: (dist.group.WORLD, None))
    group = groups.tp
    with mock.patch.object(parallel_state, "get_process_groups", lambda: groups):
        (gpt,) = build_model(with_synthetic_data(task_class("gpt"), VOCAB_SIZE)(cfg), torch.device("cpu"))
    spmd_rules.register()

    def run(changed=None):
        """The type of the loss; SpmdTypeError where types do not fit. One parameter has the other replicated type."""
        for name, parameter in gpt.named_parameters():
            kind = spmd_rules.declared_type(parameter, group)
            if name == changed:
                kind = {spmd.R: spmd.I, spmd.I: spmd.R}[kind]
            vars(parameter).pop("_local_type", None)  # assert_type only checks an existing type
            spmd.assert_type(parameter, {group.handle: kind})
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCAB_SIZE, (2, 32), generator=generator)
        positions, mask = torch.arange(32).expand(2, -1), torch.ones(2, 32)
        for x in (ids, positions, mask):
            spmd.assert_type(x, {group.handle: spmd.I})
        with spmd.set_current_mesh([group.handle]), spmd.checker.typecheck():
            losses = gpt(ids, positions, labels=ids, loss_mask=mask)
            return spmd.get_axis_local_type((losses * mask).sum(), group.handle)

    result = run().value
    replicated = [name for name, item in gpt.named_parameters() if spmd_rules.declared_type(item, group) is not spmd.V]
    undetected = []
    for name in replicated:
        try:
            run(name)
            undetected.append(name)
        except spmd.SpmdTypeError:
            pass
    return result, undetected, len(replicated)


@pytest.fixture(scope="module")
def separate_pool():
    """A rank of its own: the rules change the library's functions in the process, and ranks compare these."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_declared_gradients_are_those_of_the_types(separate_pool, model, sequence_parallel):
    """Every replicated parameter passes as it is declared and fails as anything else."""
    ((loss, undetected, tried),) = separate_pool.run(check, 1, model, 8, sequence_parallel)
    assert loss == "I" and undetected == [] and tried >= 3
