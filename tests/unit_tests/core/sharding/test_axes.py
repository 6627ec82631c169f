"""Everything about a parameter follows from its mesh: a toy model of dense and expert parameters on any layout equals
one rank in gradients, their norm, clipping, ZeRO-1 state, weights, and through a checkpoint of another layout.

Experts are split over ``ep`` and ``etp``; every rank routes its own tokens, the ranks of ``etp_ep`` gather their
tokens, and each rank computes its shard of every local expert.

Legend: t tokens, h hidden, f feed-forward, e experts.
"""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import load, save
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    check_replicas,
    finalize_model_grads,
)
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.sharding.placement import Normal, Ones, Replicate, Shard, initialize_parameters, parameter
from megatron.core.sharding.sharded_tensor import module_tensors
from megatron.core.tensor_parallel.operators import (
    gather_from_sequence,
    reduce_scatter_to_sequence,
)
from tests.test_utils.gloo_pool import WorkerError

TOKENS, HIDDEN, FFN, EXPERTS, STEPS = 32, 5, 8, 4, 2


class Dense(nn.Module):
    """Column and row split over tp; each rank has its own positions between them (sequence parallelism)."""

    def __init__(self, groups):
        super().__init__()
        built = {"groups": groups, "dtype": torch.float64}
        self.tp = groups.tp
        self.scale = parameter((HIDDEN,), init=Ones(), partial=("tp",), **built)
        self.up = parameter((FFN, HIDDEN), init=Normal(0.6), mesh={"tp": Shard(0)}, **built)
        self.down = parameter((HIDDEN, FFN), init=Normal(0.6), mesh={"tp": Shard(1)}, **built)

    def forward(self, x_th):
        whole_th = gather_from_sequence(x_th * self.scale, self.tp)
        partial_th = torch.tanh(whole_th @ self.up.T) @ self.down.T
        return x_th + reduce_scatter_to_sequence(partial_th, self.tp)


class Experts(nn.Module):
    """Every kind of expert parameter."""

    def __init__(self, groups):
        super().__init__()
        built = {"groups": groups, "dtype": torch.float64}
        self.ep, self.etp = groups.ep, groups.etp
        both = {"ep": Shard(0), "etp": Shard(1)}
        self.up = parameter((EXPERTS, FFN, HIDDEN), init=Normal(0.6), mesh=both, ndim=2, **built)
        self.down = parameter((EXPERTS, HIDDEN, FFN), init=Normal(0.6), mesh={"ep": Shard(0), "etp": Shard(2)}, **built)
        self.bias = parameter((EXPERTS, HIDDEN), init=Normal(0.6), mesh={"ep": Shard(0)}, partial=("etp",), **built)
        shared = {"ep": Replicate(), "etp": Shard(0)}
        self.gain = parameter((FFN,), init=Ones(), mesh=shared, partial=("ep",), **built)

    def forward(self, x_th, gates_te):
        num_local = EXPERTS // self.ep.size
        up_efh, out_th = self.up.view(num_local, -1, HIDDEN), torch.zeros_like(x_th)
        for index in range(num_local):
            y_th = (torch.tanh(x_th @ up_efh[index].T) * self.gain) @ self.down[index].T
            if self.etp.is_first:
                y_th = y_th + self.bias[index]
            out_th = out_th + gates_te[:, self.ep.rank * num_local + index, None] * y_th
        return out_th


class Mixture(nn.Module):
    """All experts for all tokens, weighted by a dense router."""

    def __init__(self, groups):
        super().__init__()
        self.group = groups.etp_ep
        self.router = parameter(
            (EXPERTS, HIDDEN), init=Normal(0.6), partial=("tp",), groups=groups, dtype=torch.float64
        )  # fmt: skip
        self.experts = Experts(groups)

    def forward(self, x_th):
        gates_te = torch.softmax(x_th @ self.router.T, dim=-1)
        everyone = gather_from_sequence(torch.cat((x_th, gates_te), dim=-1), self.group)
        out_th = self.experts(everyone[:, :HIDDEN], everyone[:, HIDDEN:])
        return x_th + reduce_scatter_to_sequence(out_th, self.group)


class Toy(nn.Module):
    """Two blocks with a loss each, so that pipeline ranks need no messages; the first has no expert."""

    def __init__(self, groups):
        super().__init__()
        kinds = {"first": Dense, "second": lambda groups: nn.Sequential(Mixture(groups), Dense(groups))}
        per_stage = len(kinds) // groups.pp.size
        local = list(kinds)[groups.pp.rank * per_stage :][:per_stage]
        self.blocks = nn.ModuleDict({name: kinds[name](groups) for name in local})
        initialize_parameters(self, 3, groups)

    def forward(self, x_th):
        return sum(block(x_th).square().sum(dim=-1) for block in self.blocks.values())


def batch(step):
    """Return the tokens of the full batch and their loss mask."""
    generator = torch.Generator().manual_seed(step)
    x_th = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    return x_th, (torch.rand(TOKENS, generator=generator) < 0.7).double()


def own_tokens(tensor, groups):
    """The part of this data- and context-parallel rank."""
    return tensor.chunk(groups.dp_cp.size)[groups.dp_cp.rank]


def step_once(ddp, optimizer, step, groups, micro_batches=2):
    x_th, mask_t = (own_tokens(item, groups) for item in batch(step))
    optimizer.zero_grad()
    for index, (x, mask) in enumerate(zip(x_th.chunk(micro_batches), mask_t.chunk(micro_batches))):
        with contextlib.nullcontext() if index == micro_batches - 1 else ddp.no_sync():
            x, mask = (item.chunk(groups.tp.size)[groups.tp.rank] for item in (x, mask))
            (ddp(x) * mask).sum().backward()
    counted = mask_t.sum() * float(groups.pp.is_last)
    finalize_model_grads([ddp], counted, groups=groups)


def wrap(model, groups, options):
    if options == "fsdp2":
        return TorchFullyShardedDataParallel(DistributedDataParallelConfig(), model, model.blocks.values(), groups)
    return DistributedDataParallel(None, DistributedDataParallelConfig(**options), model, groups=groups)


def build(sizes, options, kind="adam"):
    groups = parallel_state.initialize_model_parallel(**sizes)
    return groups, *build_on(groups, options, kind)


def build_on(groups, options, kind):
    ddp = wrap(Toy(groups), groups, options)
    config = OptimizerConfig(optimizer=kind, lr=0.05, weight_decay=0.1, clip_grad=0.3, log_num_zeros_in_grad=True)
    return ddp, get_megatron_optimizer(config, [ddp], groups=groups)


def tensors_of(ddp, optimizer, groups, state=None):
    ddp.finish_param_sync()
    weights = module_tensors(ddp.module, prefix="model.", groups=groups)
    return {**weights, **optimizer.sharded_tensors(state=state)}


def trained(rank, world, sizes, options, kind="adam", steps=STEPS, load_from=None, save_to=None, fault=None):
    """Per step (gradients, numbers), and weights and state at the end."""
    with faults[fault]() if fault else contextlib.nullcontext():
        groups, ddp, optimizer = build(sizes, options, kind)
        first = 0
        if load_from:
            first = STEPS
            resume(ddp, optimizer, groups, load_from)
        history = []
        for step in range(first, first + steps):
            step_once(ddp, optimizer, step, groups)
            gradients = pieces(optimizer.gradient_shards())
            _, *numbers = optimizer.step()
            history.append((gradients, [*numbers, float(optimizer.params_norm_on_device())]))
        live = tensors_of(ddp, optimizer, groups)
        if save_to:
            save(live, save_to)
        differing = check_replicas([ddp], groups, optimizer.replicas())
        return history, pieces(live.values()), differing


def resume(ddp, optimizer, groups, folder):
    """Load the checkpoint of step ``STEPS``."""
    state = optimizer.state_dict()
    load(tensors_of(ddp, optimizer, groups, state), folder)
    optimizer.load_state_dict({**state, "step": STEPS})


def changed_by_a_resume(rank, world, sizes, options, folder):
    """Optimizer -> (names of its state, tensors that differ in a bit from an uninterrupted run)."""
    groups, result = parallel_state.initialize_model_parallel(**sizes), {}
    for kind in ("adam", "sgd"):
        runs = []
        for load_from in (None, f"{folder}/{kind}"):
            ddp, optimizer = build_on(groups, options, kind)
            if load_from:
                resume(ddp, optimizer, groups, load_from)
            for step in range(STEPS if load_from else 0, 2 * STEPS):
                step_once(ddp, optimizer, step, groups)
                optimizer.step()
                if step == STEPS - 1:
                    save(tensors_of(ddp, optimizer, groups), f"{folder}/{kind}")
            runs.append({name: item.local.clone() for name, item in tensors_of(ddp, optimizer, groups).items()})
        straight, resumed = runs
        assert straight.keys() == resumed.keys()
        changed = [name for name, tensor in straight.items() if not torch.equal(tensor, resumed[name])]
        result[kind] = {name.split(".")[1] for name in straight if not name.startswith("model.")}, changed
    return result


def pieces(shards):
    return [(shard.name, shard.global_shape, shard.offsets, shard.local.detach().clone().numpy()) for shard in shards]


def gathered(per_rank):
    """{name: whole tensor}; every element must come from somewhere."""
    full = {}
    for name, shape, offsets, local in (shard for shards in per_rank for shard in shards):
        target = full.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
        target[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape))] = torch.from_numpy(local)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


def sizes(tp=1, pp=1, cp=1, ep=1, etp=None, instances=1):
    return {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp,
        "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp,
        "num_distributed_optimizer_instances": instances,
    }  # fmt: skip


ZERO = {"use_distributed_optimizer": True, "bucket_size": 30}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 30}
ZERO_OVERLAP = {**ZERO, **OVERLAP, "overlap_param_gather": True}
LAYOUTS = {
    "dp2": (2, sizes(), {}),
    "ep2": (2, sizes(ep=2), ZERO),
    "ep2·dp2, overlap": (4, sizes(ep=2), OVERLAP),
    "ep2·dp2, zero": (4, sizes(ep=2), ZERO),
    "ep2·dp2, two instances": (4, sizes(ep=2, instances=2), ZERO_OVERLAP),
    "ep4": (4, sizes(ep=4), {}),
    "ep4, zero": (4, sizes(ep=4), ZERO_OVERLAP),
    "tp2·ep2": (4, sizes(tp=2, ep=2), {}),
    "tp2·ep2, zero": (4, sizes(tp=2, ep=2), ZERO_OVERLAP),
    "tp2·ep2·etp1": (4, sizes(tp=2, ep=2, etp=1), ZERO_OVERLAP),
    "tp2·ep4·etp1": (4, sizes(tp=2, ep=4, etp=1), ZERO),
    "tp2·ep4·etp1·dp4": (8, sizes(tp=2, ep=4, etp=1), ZERO),
    "tp2·etp1": (4, sizes(tp=2, etp=1), ZERO_OVERLAP),
    "etp2·ep2": (4, sizes(etp=2, ep=2), ZERO_OVERLAP),
    "etp2": (4, sizes(etp=2), ZERO_OVERLAP),
    "etp2, two instances": (4, sizes(etp=2, instances=2), ZERO),
    "cp2·ep2": (4, sizes(cp=2, ep=2), ZERO),
    "pp2·ep2": (4, sizes(pp=2, ep=2), ZERO_OVERLAP),
    "pp2·ep2, plain": (4, sizes(pp=2, ep=2), {}),
    "fsdp2": (2, sizes(), "fsdp2"),
    "ep2·dp2, fsdp2": (4, sizes(ep=2), "fsdp2"),
    "ep2, fsdp2": (2, sizes(ep=2), "fsdp2"),
}  # fmt: skip


def close(actual, expected, what):
    assert actual.keys() == expected.keys(), what
    for name, tensor in expected.items():
        assert torch.allclose(actual[name], tensor, rtol=1e-10, atol=1e-13), (what, name)


def compare(results, expected):
    """Compare every rank's history and state with one rank's."""
    history, state, _ = expected
    for step, (gradients, numbers) in enumerate(history):
        close(gathered([result[0][step][0] for result in results]), gathered([gradients]), f"gradients of step {step}")
        for result in results:
            assert result[0][step][1] == pytest.approx(numbers, rel=1e-10), f"norm, zeros, weights of step {step}"
    close(gathered([result[1] for result in results]), gathered([state]), "state")
    assert not any(result[2] for result in results), "copies differ"


@pytest.fixture(scope="module")
def one_rank(gloo_pool, tmp_path_factory):
    """Return by optimizer the results of one rank and its checkpoint after the same steps."""
    actual = {}
    for kind in ("adam", "sgd"):
        folder = str(tmp_path_factory.mktemp(kind) / "checkpoint")
        [expected] = gloo_pool.run(trained, 1, sizes(), {}, kind, STEPS, None, folder)
        [extra] = gloo_pool.run(trained, 1, sizes(), {}, kind, STEPS, folder)
        actual[kind] = expected, extra, folder
    return actual


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_one_rank(gloo_pool, one_rank, name):
    for kind in ("adam", "sgd"):
        expected, _, _ = one_rank[kind]
        compare(gloo_pool.run(trained, *LAYOUTS[name], kind), expected)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("one rank", "tp2·ep2, zero"), ("ep4, zero", "etp2·ep2"), ("etp2·ep2", "pp2·ep2"),
     ("pp2·ep2", "ep2·dp2, two instances"), ("tp2·ep2·etp1", "one rank"), ("ep2·dp2, fsdp2", "ep4")],
)  # fmt: skip
def test_a_checkpoint_of_one_layout_goes_on_on_another(gloo_pool, one_rank, tmp_path, saved, loaded):
    layouts = {**LAYOUTS, "one rank": (1, sizes(), {})}
    _, extra, _ = one_rank["adam"]
    folder = str(tmp_path / "checkpoint")
    gloo_pool.run(trained, *layouts[saved], "adam", STEPS, None, folder)
    compare(gloo_pool.run(trained, *layouts[loaded], "adam", STEPS, folder), extra)


@pytest.mark.parametrize(
    "name",
    ["dp2", "ep2·dp2, zero", "ep2·dp2, two instances", "tp2·ep2·etp1", "etp2, two instances", "pp2·ep2",
     "fsdp2", "ep2·dp2, fsdp2"],
)  # fmt: skip
def test_a_resume_on_the_same_layout_changes_no_bit(gloo_pool, tmp_path, name):
    """For both optimizers, with state that is whole, sharded over all or some ranks, or sharded by FSDP2."""
    ranks = gloo_pool.run(changed_by_a_resume, *LAYOUTS[name], str(tmp_path))
    for kind, state in {"adam": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}.items():
        assert set().union(*(result[kind][0] for result in ranks)) >= state
        assert not any(result[kind][1] for result in ranks)


# ---- injected faults: at least one layout must find each


def experts_reduced_like_dense():
    """Gradients of experts are summed over the ranks of dense parameters."""
    return mock.patch.object(ProcessGroups, "expert", property(lambda self: self.dense))


def experts_not_in_the_norm():
    """The gradient norm covers only dense parameters."""
    return mock.patch.object(ProcessGroups, "data_parallel", property(lambda self: (self.dense,)))


def experts_reduced_over_the_model():
    """Gradients of experts are summed over the ranks that hold other experts."""
    correct = ProcessGroups.expert.fget
    wrong = property(lambda self: correct(self)._replace(reduce=self.ep, shard=self.ep))
    return mock.patch.object(ProcessGroups, "expert", wrong)


def replicated_experts_counted_everywhere():
    """Every rank counts its expert parameters, copies too."""
    correct = optimizer_module.counts_on_this_rank
    return mock.patch.object(
        optimizer_module, "counts_on_this_rank", lambda spec, groups: spec.is_expert or correct(spec, groups)
    )


def partial_gradients_of_experts_forgotten():
    """Partial sums of the ranks of etp and ep are not reduced."""
    correct = parameter

    def forgotten(shape, *, partial=(), **rest):
        return correct(shape, partial=tuple(set(partial) & {"tp"}), **rest)

    return mock.patch(f"{__name__}.parameter", forgotten)


faults = {x.__name__: x for x in (
    experts_reduced_like_dense, experts_not_in_the_norm, experts_reduced_over_the_model,
    replicated_experts_counted_everywhere, partial_gradients_of_experts_forgotten,
)}  # fmt: skip


@pytest.mark.parametrize("fault", faults)
@pytest.mark.parametrize("name", ["ep2·dp2, zero", "tp2·ep2"])
def test_a_planted_bug_is_found(gloo_pool, one_rank, fault, name):
    with pytest.raises(AssertionError) as result:
        compare(gloo_pool.run(trained, *LAYOUTS[name], "adam", STEPS, None, None, fault), one_rank["adam"][0])
    assert not isinstance(result.value, WorkerError), "it ends in wrong numbers, not in a crash"
