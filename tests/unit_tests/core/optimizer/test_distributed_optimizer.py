"""A sharded update equals one rank: any buckets, any order of use, any number of instances."""

import pytest
import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    check_replicas,
    finalize_model_grads,
)
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.sharding.placement import Normal, Replicate, Shard, Zeros, initialize_parameters, parameter

SAMPLES, WIDTH, OUT = 12, 5, 3


class Net(nn.Module):
    """Odd sizes; ``first`` runs twice, ``tied`` again as the output, ``unused`` never, and not in creation order."""

    def __init__(self, dtype=torch.float64, groups=SINGLE_PROCESS):
        super().__init__()
        built = {"dtype": dtype, "groups": groups}
        self.unused = parameter((3,), init=Normal(1.0), **built)
        self.scale = parameter((1,), init=Normal(1.0), **built)
        self.last, self.first = nn.Module(), nn.Module()
        self.last.weight = parameter((WIDTH, WIDTH), init=Normal(0.4), **built)
        self.first.weight = parameter((WIDTH, WIDTH), init=Normal(0.4), **built)
        self.table = Table(dtype, groups)
        initialize_parameters(self, 3, groups)
        self.last.forward = lambda x: x @ self.last.weight
        self.first.forward = lambda x: torch.tanh(x @ self.first.weight)

    def forward(self, x):
        x = self.table(x)
        x = self.last(self.first(self.first(x)))
        return (x * self.scale) @ self.table.weight[:7].T


class Table(nn.Module):
    """Padded to 8 rows."""

    def __init__(self, dtype, groups):
        super().__init__()
        self.weight = parameter((7, WIDTH), init=Normal(0.5), stored=(8, WIDTH), dtype=dtype, groups=groups)

    def forward(self, ids):
        return self.weight[ids]


def losses(output, ids):
    return torch.logsumexp(output.float() if output.dtype != torch.float64 else output, dim=-1) - output[:, 0]


def batch(step):
    return torch.randint(0, 7, (SAMPLES,), generator=torch.Generator().manual_seed(step))


def settings(kind, clip=0.3):
    return OptimizerConfig(optimizer=kind, lr=0.05, weight_decay=0.1, clip_grad=clip, log_num_zeros_in_grad=True)


def step_once(ddp, optimizer, step, groups, micro_batches=2):
    ids = batch(step).chunk(groups.dp.size)[groups.dp.rank]
    optimizer.zero_grad()
    pieces = ids.chunk(micro_batches)
    for index, piece in enumerate(pieces):
        loss = optimizer.scale_loss(losses(ddp(piece), piece).sum() / SAMPLES)
        if index == len(pieces) - 1:
            loss.backward()
        else:
            with ddp.no_sync():
                loss.backward()
    finalize_model_grads([ddp], groups=groups)


def wrap(net, groups, options):
    options = dict(options)
    if options.pop("fsdp2", False):
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        return TorchFullyShardedDataParallel(config, net, [net.last], groups)
    config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **options})
    return DistributedDataParallel(None, config, net, groups=groups)


def trained(rank, world, kind, options, instances=1, dtype=torch.float64, steps=4, clip=0.3):
    """Per step: gathered gradients, norm, zeros, weights, moments: all as {name: [(offsets, numpy array)]}."""
    groups = parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    ddp = wrap(Net(dtype), groups, options)
    optimizer = get_megatron_optimizer(settings(kind, clip), [ddp], groups=groups)
    history = []
    for step in range(steps):
        step_once(ddp, optimizer, step, groups)
        gradients = pieces(optimizer.gradient_shards())
        updated, norm, zeros = optimizer.step()
        assert updated
        ddp.eval()
        ddp(batch(99))  # an evaluation between two steps
        ddp.train()
        history.append((gradients, norm, zeros, float(optimizer.params_norm_on_device())))
    from megatron.core.sharding.sharded_tensor import module_tensors

    state = pieces(optimizer.sharded_tensors().values()), pieces(module_tensors(ddp.module, groups=groups).values())
    assert check_replicas([ddp], groups, optimizer.replicas()) == []
    return history, state


def pieces(shards):
    return [(shard.name, shard.global_shape, shard.offsets, shard.local.double().numpy().copy()) for shard in shards]


def gathered(per_rank):
    """{name: whole tensor}; every element must come from somewhere."""
    full = {}
    for shards in per_rank:
        for name, shape, offsets, local in shards:
            target = full.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
            target[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape))] = torch.from_numpy(local)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


LAYOUTS = {
    "plain": (2, {}, 1),
    "sharded": (2, {"use_distributed_optimizer": True}, 1),
    "tiny buckets": (3, {"use_distributed_optimizer": True, "bucket_size": 1}, 1),
    "overlapped": (
        3, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
            "bucket_size": 30}, 1,
    ),
    "two buckets, padded": (
        2, {"use_distributed_optimizer": True, "num_buckets": 2, "pad_buckets_for_high_nccl_busbw": True}, 1,
    ),
    "instances": (
        4, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
            "bucket_size": 30}, 2,
    ),
    "fsdp2": (2, {"fsdp2": True}, 1),
    "fsdp2, more ranks than rows": (4, {"fsdp2": True}, 1),
    "hsdp": (4, {"fsdp2": True}, 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_every_layout_equals_one_rank(gloo_pool, kind):
    [(expected, state)] = gloo_pool.run(trained, 1, kind, {})
    expected_state = [gathered([part]) for part in state]
    for step, (gradients, norm, zeros, _) in enumerate(expected):
        values = torch.cat([tensor.flatten() for tensor in gathered([gradients]).values()])
        assert zeros == (values == 0).sum() > 0, "of true elements alone: a row of padding has zeros, too"
        assert norm == pytest.approx(values.norm().item(), rel=1e-12), step
    weights = torch.cat([tensor.flatten() for tensor in expected_state[1].values()])
    assert expected[-1][-1] == pytest.approx(weights.norm().item(), rel=1e-12)
    for name, (world, options, instances) in LAYOUTS.items():
        results = gloo_pool.run(trained, world, kind, options, instances)
        for step, (gradients, norm, zeros, params_norm) in enumerate(expected):
            actual = gathered([history[step][0] for history, _ in results])
            close(actual, gathered([gradients]), f"{name}, gradients of step {step}")
            for history, _ in results:
                assert history[step][1:] == pytest.approx((norm, zeros, params_norm), rel=1e-12), (name, step)
        for place, part in enumerate(expected_state):
            close(gathered([both[place] for _, both in results]), part, name)


class Branch(nn.Module):
    """A replicated layernorm before a weight that tensor parallelism splits; experts' bias, replicated over ``ep``."""

    def __init__(self, groups):
        super().__init__()
        self.norm = parameter((WIDTH,), init=Normal(1.0), groups=groups)
        self.weight = parameter((2, WIDTH), init=Normal(1.0), mesh={"tp": Shard(0)}, groups=groups)
        self.expert_bias = parameter((WIDTH,), init=Normal(1.0), mesh={"ep": Replicate()}, groups=groups)
        initialize_parameters(self, 3, groups)

    def forward(self, x):
        return (x * self.norm + self.expert_bias) @ self.weight.T


def step_with_planted(rank, world, sizes, options, name, value, planted_on, wrapped):
    """Result of a step with ``value`` in one element of the gradient ``name`` on one rank only, and whether weights
    of this rank changed."""
    groups = parallel_state.initialize_model_parallel(**sizes)
    net = Branch(groups)
    chunk = wrap(net, groups, options) if wrapped else net
    optimizer = get_megatron_optimizer(settings("adam"), [chunk], groups=groups)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    optimizer.zero_grad()
    chunk(torch.ones(2, WIDTH)).sum().backward()
    if wrapped:
        finalize_model_grads([chunk], groups=groups)
    if rank == planted_on:
        optimizer.local_gradients()[name].view(-1)[-1] = value
    result = optimizer.step()
    if wrapped:
        chunk.gather_exact_weights()
    changed = any(not torch.equal(before[key], tensor) for key, tensor in net.state_dict().items())
    return result[0], optimizer.found_nonfinite, changed


FORMS = {
    "no wrapper": ({}, False), "ddp": ({}, True), "zero-1": ({"use_distributed_optimizer": True}, True),
    "overlapped zero-1": (
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "wrapped"), FORMS.values(), ids=FORMS)
def test_nonfinite_copy_of_a_replicated_gradient_skips_the_step_on_all_ranks(gloo_pool, options, wrapped):
    """TP rank 0 counts replicated weights in the norm; a NaN in the copy of rank 1 must not reach the weights."""
    tp = {"tensor_model_parallel_size": 2}
    for value in (float("nan"), float("inf")):
        for planted_on in (0, 1):
            result = gloo_pool.run(step_with_planted, 2, tp, options, "norm", value, planted_on, wrapped)
            assert result == [(False, True, False)] * 2, (value, planted_on)
    assert gloo_pool.run(step_with_planted, 2, tp, options, "norm", 1.0, 1, wrapped) == [(True, False, True)] * 2
    if wrapped:
        ep = {"expert_model_parallel_size": 2}
        result = gloo_pool.run(step_with_planted, 2, ep, options, "expert_bias", float("nan"), 1, wrapped)
        assert result == [(False, True, False)] * 2


def close(actual, expected, what):
    assert actual.keys() == expected.keys(), what
    for key, tensor in expected.items():
        assert torch.allclose(actual[key], tensor, rtol=1e-11, atol=1e-13), (what, key)


def same_bits(results, rest):
    for (history, state), (other_history, other_state) in zip(results, rest, strict=True):
        for (gradients, *numbers), (other_gradients, *other_numbers) in zip(history, other_history, strict=True):
            assert numbers == other_numbers
            assert [g[3].tobytes() for g in gradients] == [g[3].tobytes() for g in other_gradients]
        for part, other in zip(state, other_state, strict=True):
            assert [t[3].tobytes() for t in part] == [t[3].tobytes() for t in other]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlap_changes_no_bit_at_equal_buckets(gloo_pool, dtype):
    buckets = {"use_distributed_optimizer": True, "bucket_size": 30}
    overlapped = {**buckets, "overlap_grad_reduce": True, "overlap_param_gather": True}
    for instances in (1, 2):
        arguments = (instances, dtype)
        plain = gloo_pool.run(trained, 4, "adam", buckets, *arguments)
        same_bits(plain, gloo_pool.run(trained, 4, "adam", overlapped, *arguments))


def test_sums_of_halves_are_rounded_once_if_asked(gloo_pool):
    """Three ranks' bf16 gradients: adding in fp32 comes closer to the exact sum."""
    exact = gloo_pool.run(trained, 3, "sgd", {}, 1, torch.bfloat16, 1, 0.0)
    options = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": False}
    errors = []
    for accumulating in (False, True):
        chosen = {**options, "reduce_scatter_with_fp32_accumulation": accumulating}
        results = gloo_pool.run(trained, 3, "sgd", chosen, 1, torch.bfloat16, 1, 0.0)
        result, expected = (gathered([history[0][0] for history, _ in x]) for x in (results, exact))
        errors.append(sum((result[name] - expected[name]).square().sum().item() for name in expected))
    assert 0 < errors[1] < 0.9 * errors[0] < 1e-2


def drifting(rank, world, instances, tp):
    groups = parallel_state.initialize_model_parallel(tp, num_distributed_optimizer_instances=instances)
    net = Net(torch.bfloat16, groups)
    net.split = nn.Module()
    net.split.weight = parameter((8, 4), init=Zeros(), mesh={"tp": Shard(0)}, groups=groups)
    ddp = wrap(net, groups, {"use_distributed_optimizer": True})
    optimizer = get_megatron_optimizer(settings("adam"), [ddp], groups=groups)
    assert check_replicas([ddp], groups, optimizer.replicas()) == []
    state = optimizer.state_dict()
    if rank == world - 1:
        with torch.no_grad():
            net.first.weight[1, 1] += 1
            next(iter(state["exp_avg"].values())).view(-1)[0] += 1
    return sorted({tuple(check_replica) for check_replica in check_replicas([ddp], groups, optimizer.replicas())})


def test_drifting_weights_and_moments_are_named(gloo_pool):
    results = gloo_pool.run(drifting, 4, 2, 1)  # ranks 0 and 1 are one instance, 2 and 3 the other
    moment, weight = results[0]
    assert moment[0].startswith("exp_avg:") and moment[1:] == (3, "dp_cp") and weight == ("first.weight", 3, "dp_cp")
    assert all(result == results[0] for result in results)
    results = gloo_pool.run(drifting, 4, 1, 2)
    assert ("first.weight", 3, "tp") in results[2] and ("first.weight", 3, "dp_cp") in results[1]
    assert results[0] == []
    assert not any("split" in name for result in results for name, *_ in result)


def used_early(rank, world):
    groups = parallel_state.initialize_model_parallel()
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = wrap(Net(), groups, {**options, "bucket_size": 30})
    optimizer = get_megatron_optimizer(settings("sgd"), [ddp], groups=groups)
    step_once(ddp, optimizer, 0, groups)
    optimizer.step()
    pending = [bucket._gather is not None for bucket in ddp.grad_buffers[0].buckets]
    ddp.module.table(batch(1))
    waited = [bucket._gather is not None for bucket in ddp.grad_buffers[0].buckets]
    weights = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    rest = [bucket._gather is not None for bucket in ddp.grad_buffers[0].buckets]
    return pending, waited, rest, {name: value.numpy() for name, value in weights.items()}


def test_module_waits_only_for_its_weights_and_readers_for_all(gloo_pool):
    (pending, waited, rest, weights), (*_, remaining) = gloo_pool.run(used_early, 2)
    assert all(pending) and len(pending) >= 3 and 0 < sum(waited) < len(waited) and not any(rest)
    assert all((weights[name] == remaining[name]).all() for name in weights)


def loaded_masters(rank, world):
    """Weights of a rank after a state with other masters was loaded."""
    parallel_state.initialize_model_parallel()
    net = nn.Linear(16, 16).bfloat16()
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(None, config, net)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, bf16=True, store_param_remainders=False), [ddp])
    state = optimizer.state_dict()
    masters = {name: torch.full_like(master, 2.5) for name, master in state["main_param"].items()}
    optimizer.load_state_dict({**state, "main_param": masters})
    return {value for parameter in net.parameters() for value in parameter.flatten().tolist()}


def test_loaded_masters_reach_the_weights_of_all_ranks(gloo_pool):
    assert gloo_pool.run(loaded_masters, 2) == [{2.5}, {2.5}]
