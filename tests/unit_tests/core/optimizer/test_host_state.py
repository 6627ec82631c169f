"""Offloaded optimizer state gives the bits of state on the device, in every storage, rule and slicing."""

import numpy as np
import pytest
import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, host_state
from megatron.core.optimizer.host_state import select_offloaded
from megatron.core.optimizer.rule_choice import declare_update_rules
from megatron.core.sharding.buffer_layout import NUM_SLOTS
from megatron.core.sharding.placement import declare
from tests.test_utils.block_storage import Blocks
from tests.test_utils.lazy_streams import LazyStream

FORMATS = {
    "fp32": {},
    "fp64": {},
    "remainder": {"bf16": True},
    "copy": {"bf16": True, "store_param_remainders": False},
    "bf16 moments": {"bf16": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "blocks": {},
}
OFFLOAD = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}


def network(form, width=70):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, width), nn.LayerNorm(width), nn.Linear(width, 3), nn.Linear(3, 1, bias=False))
    if form == "blocks":
        for each in (net[0].weight, net[2].weight):
            declare(each, storage=Blocks)
    return net.to({"fp32": torch.float32, "blocks": torch.float32, "fp64": torch.float64}.get(form, torch.bfloat16))


def build(form="remainder", kind="adam", *, device="cpu", width=70, **changes):
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(None, settings, network(form, width).to(device))
    config = OptimizerConfig(optimizer=kind, lr=0.02, weight_decay=0.1, **FORMATS[form], **changes)
    return ddp, get_megatron_optimizer(config, [ddp])


def train(run, steps, first=0):
    ddp, optimizer = run
    for step in range(first, first + steps):
        optimizer.zero_grad()
        data = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
        ddp(data.to(next(ddp.parameters()))).float().square().sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()


def tensors(run):
    ddp, optimizer = run
    state = optimizer.state_dict()
    named = {f"{kind} {name}": value for kind, held in state.items() if isinstance(held, dict)
             for name, value in held.items()}  # fmt: skip
    return {**named, **dict(ddp.module.named_parameters()), "step": torch.tensor(state["step"])}


def same(one, other):
    one, other = tensors(one), tensors(other)
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name].cpu(), other[name].cpu())] == []


@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("form", FORMATS)
def test_offloaded_updates_equal_those_on_the_device(form, kind):
    plain, offloaded = build(form, kind), build(form, kind, **OFFLOAD)
    train(plain, 4)
    train(offloaded, 4)
    state = offloaded[1].host_state
    assert len(state.names) == len(offloaded[1].storage) and len(state._slices) >= 3 + 3 * (kind != "muon")
    assert same(plain, offloaded)


@pytest.mark.parametrize("kind", ["adam", "muon"])
@pytest.mark.parametrize("overlap", [False, True])
def test_copies_may_be_as_late_as_their_events(monkeypatch, kind, overlap):
    monkeypatch.setattr(host_state, "CopyStream", LazyStream)
    flags = {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": overlap}
    plain, offloaded = build(kind=kind), build(kind=kind, **flags)
    for first in (0, 3):
        train(plain, 3, first)
        train(offloaded, 3, first)
        assert same(plain, offloaded)


@pytest.mark.parametrize("fault", ["loads", "settle", "slots"])
def test_a_missing_wait_is_found(monkeypatch, fault):
    """Faults in the order of copies change results with lazy copies."""
    monkeypatch.setattr(host_state, "CopyStream", LazyStream)
    plain, offloaded = build(), build(**OFFLOAD)
    state = offloaded[1].host_state
    if fault == "loads":
        state._loads.wait = lambda event: None
    elif fault == "settle":
        state.settle = lambda: None
    else:
        copy = state._loads.copy
        state._loads.copy = lambda pairs, after=(): copy(pairs)
    train(plain, 3)
    train(offloaded, 3)
    assert not same(plain, offloaded)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_a_fraction_of_the_elements_is_offloaded(kind, fraction):
    plain, offloaded = build(kind=kind), build(kind=kind, **OFFLOAD, optimizer_offload_fraction=fraction)
    train(plain, 3)
    train(offloaded, 3)
    assert same(plain, offloaded)
    sizes = {name: each.weight.numel() for name, each in offloaded[1].storage.items()}
    held = sum(sizes[name] for name in offloaded[1].host_state.names)
    assert held <= fraction * sum(sizes.values()) and bool(held) == (fraction > 0)


def test_the_largest_parameters_that_fit_are_selected():
    sizes = {"a": 10, "b": 60, "c": 30}
    found = {part: sorted(select_offloaded(sizes, part)) for part in (0, 0.1, 0.35, 0.7, 0.9, 1)}
    assert found == {0: [], 0.1: ["a"], 0.35: ["c"], 0.7: ["a", "b"], 0.9: ["b", "c"], 1: ["a", "b", "c"]}


def test_slices_cover_every_element_once_in_order_and_fit_in_a_slot():
    state = build(**OFFLOAD)[1].host_state
    covered = {}
    for pieces in state._slices:
        for piece in pieces:
            assert covered.get(piece.name, 0) == piece.start and piece.start % 64 == 0
            covered[piece.name] = piece.stop
    assert covered == {name: each.weight.numel() for name, each in state._storages.items()}
    assert 3 * len(state._slots[0]) == state.device_bytes and any(len(each) > 1 for each in state._slices)


def test_state_is_interchangeable_with_and_without_offload():
    runs = [build(), build(**OFFLOAD)]
    for run in runs:
        train(run, 2)
    for source in runs:
        for target in (build(), build(**OFFLOAD)):
            train(target, 1, first=9)  # loaded ahead: these slices are old after the load
            target[0].module.load_state_dict(source[0].module.state_dict())
            target[1].load_state_dict(source[1].state_dict())
            train(target, 2, first=2)
            expected = build()
            train(expected, 4)
            assert same(expected, target)


def test_changes_between_steps_reach_the_next_update():
    runs = [build(), build(**OFFLOAD)]
    for run in runs:
        train(run, 1)
        for value in run[1].optimizer.state.values():
            value["exp_avg"].zero_()
            value["exp_avg_sq"] = torch.full_like(value["exp_avg_sq"], 0.5)
        for parameter in run[0].parameters():
            parameter.data.mul_(0.5)
        run[1].reload_model_params()
        train(run, 1, first=1)
    assert same(*runs)
    assert runs[0][1].params_norm_on_device() == runs[1][1].params_norm_on_device()


def test_edits_of_weights_after_an_update_reach_the_next_one():
    runs = [build(), build(**OFFLOAD)]
    factors = torch.linspace(0.5, 1.0, 70)
    for ddp, optimizer in runs:
        optimizer.weight_edits.append(lambda scale_rows, _, ddp=ddp: scale_rows(ddp.module[0].weight, factors))
        train((ddp, optimizer), 3)
    assert same(*runs)


def test_skipped_steps_and_parameters_without_gradient_keep_their_state():
    run = build(**OFFLOAD)
    train(run, 2)
    before = {name: value.clone() for name, value in tensors(run).items()}
    run[1].update(torch.tensor(True))
    assert all(torch.equal(value, before[name]) for name, value in tensors(run).items())
    net = network("fp32")  # no wrapper: gradients may be None
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, **OFFLOAD), [net], groups=SINGLE_PROCESS)
    net[0](torch.ones(2, 40)).sum().backward()
    weights = {name: each.detach().clone() for name, each in net.named_parameters()}
    optimizer.step()
    changed = {name for name, each in net.named_parameters() if not torch.equal(each, weights[name])}
    assert changed == {"0.weight", "0.bias"}


def test_parameters_below_a_unit_of_elements_fill_slices():
    runs = []
    for more in ({}, OFFLOAD):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).bfloat16()
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, bf16=True, **more), [net], groups=SINGLE_PROCESS)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 5).bfloat16()).float().square().sum().backward()
            optimizer.step()
        runs.append(list(net.parameters()))
    assert all(map(torch.equal, *runs))
    assert select_offloaded({"empty": 0, "full": 3}, 0.0) == frozenset()
    assert select_offloaded({"empty": 0, "full": 3}, 1.0) == {"full"}


def uneven(rank, world_size, fraction):
    """Return the matrices of each slice on this rank, and the weights of an FSDP run without and with offload. Stops
    before the first step if slices differ between ranks: their collectives would not match."""
    groups, results = parallel_state.initialize_model_parallel(), []
    for more in ({}, {**OFFLOAD, "optimizer_offload_fraction": fraction}):
        torch.manual_seed(0)
        widths = (5, 9, 4, 2, 7, 13, 1, 10, 3)  # rows of 3 or 4 ranks: equal, fewer on the last, none there
        net = nn.Sequential(*(nn.Linear(*each, bias=False) for each in zip(widths, widths[1:])))
        config = OptimizerConfig(optimizer="muon", lr=0.02, muon_fp32_matmul_prec="highest", **more)
        declare_update_rules(net, config)
        fsdp = TorchFullyShardedDataParallel(DistributedDataParallelConfig(), net, [], groups)
        optimizer = get_megatron_optimizer(config, [fsdp], groups=groups)
        slices = [[piece.name for piece in pieces] for pieces in optimizer.host_state._slices]
        everywhere = [None] * world_size
        torch.distributed.all_gather_object(everywhere, slices)
        if any(each != slices for each in everywhere):
            return slices, []
        for step in range(3):
            optimizer.zero_grad()
            fsdp(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            fsdp.finish_grad_sync()
            optimizer.step()
        results.append([each.full_tensor().detach().numpy().copy() for each in net.parameters()])
    return slices, results


@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize("world_size", [3, 4])
def test_ranks_with_uneven_rows_have_the_same_slices(gloo_pool, world_size, fraction):
    found = gloo_pool.run(uneven, world_size, fraction)
    assert all(slices == found[0][0] for slices, _ in found) and len(found[0][0]) > 1
    for _, (plain, offloaded) in found:
        assert all(map(np.array_equal, plain, offloaded))


def test_saving_keeps_no_memory():
    run = build(**OFFLOAD)
    train(run, 1)
    held = {name: value.data_ptr() for kind in run[1].moments.values() for name, value in kind.items()}
    for _ in range(2):
        state = run[1].state_dict()
        del state
        train(run, 1)
    assert held == {name: value.data_ptr() for kind in run[1].moments.values() for name, value in kind.items()}
    assert len(run[1].host_state._loaded) == NUM_SLOTS


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["neither", "_loads", "_stores"])
@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("form", FORMATS)
def test_offloaded_updates_equal_those_on_the_device_gpu(form, kind, side):
    """Also if copies of one direction are so slow that a missing wait would read or overwrite the wrong slice."""
    plain, offloaded = (build(form, kind, device="cuda", width=5000, **more) for more in ({}, OFFLOAD))
    stream = getattr(offloaded[1].host_state, side, None)
    if stream is not None:
        copy = stream.copy

        def slow_copy(pairs, after=()):
            with torch.cuda.stream(stream._stream):
                torch.cuda._sleep(1_000_000)
            return copy(pairs, after)

        stream.copy = slow_copy
    train(plain, 4)
    train(offloaded, 4)
    assert all(each.is_pinned() for each in offloaded[1].host_state._state("0.weight"))
    assert same(plain, offloaded)


@pytest.mark.gpu
def test_offloaded_state_takes_no_device_memory_gpu():
    held = []
    for more in ({}, OFFLOAD, {**OFFLOAD, "optimizer_offload_fraction": 0.0}):
        before = torch.cuda.memory_allocated()
        run = build(device="cuda", width=1 << 20, **more)
        train(run, 2)
        run[1].zero_grad()
        held.append(torch.cuda.memory_allocated() - before)
        run[1].state_dict()
        del run
    elements = 45 << 20
    assert held[0] - held[1] > 7 * elements and abs(held[0] - held[2]) < 1 << 20
