"""Offloaded optimizer state gives the bits of state on the device, in every storage, rule and slicing."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, weight_updates
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
        for x in (net[0].weight, net[2].weight):
            declare(x, storage=Blocks)
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
    named = {f"{kind} {name}": torch.as_tensor(value) for kind, stored in state.items() if isinstance(stored, dict)
             for name, value in stored.items()}  # fmt: skip
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


@pytest.fixture
def lazy(monkeypatch):
    for module in (host_state, weight_updates):
        monkeypatch.setattr(module, "SideStream", LazyStream)


@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("overlap", [False, True])
def test_copies_and_updates_may_be_as_late_as_their_events(lazy, kind, overlap):
    flags = {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": overlap}
    plain, offloaded = build(kind=kind), build(kind=kind, **flags)
    for first in (0, 3):
        train(plain, 3, first)
        train(offloaded, 3, first)
        assert same(plain, offloaded)


@pytest.mark.parametrize("fault", ["loads", "settle", "slots", "modules", "gradients", "zeros"])
def test_a_missing_wait_is_found(lazy, monkeypatch, fault):
    """Faults in the order of work change results with lazy streams."""
    plain, offloaded = build(), build(**OFFLOAD)
    state, updates = offloaded[1].host_state, offloaded[1]._updates
    if fault == "loads":
        run = updates.run
        monkeypatch.setattr(updates, "run", lambda work, after=(), parameters=(): run(work, (), parameters))
    elif fault == "settle":
        monkeypatch.setattr(state, "settle", lambda: None)
    elif fault == "slots":
        copy = state._loads.copy
        monkeypatch.setattr(state._loads, "copy", lambda pairs, after=(): copy(pairs))
    elif fault == "modules":
        monkeypatch.setattr(updates, "wait_for", lambda parameters: None)
    elif fault == "gradients":
        monkeypatch.setattr(offloaded[0], "finish_updates", lambda: None)
    elif fault == "zeros":
        monkeypatch.setattr(offloaded[0], "updates", None)
    train(plain, 3)
    if fault == "modules":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # by an update during forward
            train(offloaded, 3)
        return
    train(offloaded, 3)
    assert not same(plain, offloaded)


def test_a_module_waits_for_its_update_only(lazy):
    ddp, optimizer = run = build(**OFFLOAD)
    reference = build()
    train(run, 2)
    before = {name: item.clone() for name, item in ddp.state_dict().items()}
    train(reference, 3)
    train(run, 1, first=2)
    after = dict(reference[0].module.named_parameters())

    def updated():
        """Return the modules of which all weights are new; others have old ones."""
        weights = dict(ddp.module.named_parameters())
        new = {name for name in weights if torch.equal(weights[name], after[name])}
        assert all(torch.equal(weights[name], before[name]) for name in weights if name not in new)
        return {name[0] for name in weights} - {name[0] for name in weights if name not in new}

    assert updated() == set()
    hidden = ddp.module[0](torch.ones(2, 40).bfloat16())
    assert "0" in updated() and not {"2", "3"} & updated()
    ddp.module[1](hidden)
    assert "1" in updated() and "3" not in updated()
    ddp.zero_grad_buffer()
    assert any(parameter.main_grad.any() for parameter in ddp.module.parameters()), "gradients may still be in use"
    ddp(torch.ones(2, 40).bfloat16())
    assert updated() == {"0", "1", "2", "3"} and not any(
        parameter.main_grad.any() for parameter in ddp.module.parameters()
    )


READERS = (
    "state_dict", "module", "masters", "live masters", "live masters on the host", "norm", "moments", "update", "rows",
    "exact", "scores",
)  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_readers_after_a_step_see_its_result(lazy, reader):
    form = "fp32" if "live" in reader else "remainder"
    runs = [build(form, **more, optimizer_offload_fraction=0.5) for more in ({}, OFFLOAD)]
    results = []
    for ddp, optimizer in runs:
        train((ddp, optimizer), 3)
        if reader == "state_dict":
            results.append([value.clone() for value in optimizer.state_dict()["main_param"].values()])
        elif reader == "module":
            results.append([value.clone() for value in ddp.state_dict().values()])
        elif reader == "masters":
            results.append([optimizer.host_state.read(name).clone() for name in ("0.weight", "3.weight")])
        elif "live" in reader:
            names, on_host = ("0.weight", "3.weight"), "host" in reader
            results.append([optimizer.host_state.read(name, on_host=on_host).clone() for name in names])
        elif reader == "norm":
            results.append([optimizer.params_norm_on_device()])
        elif reader == "moments":
            results.append([optimizer.optimizer.state[parameter]["exp_avg"].clone() for parameter in ddp.parameters()])
        elif reader == "update":
            optimizer.update()
            results.append([*optimizer.state_dict()["exp_avg"].values()])
        elif reader == "rows":
            optimizer._scale_rows(ddp.module[0].weight, torch.full((70,), 0.5))
            results.append([ddp.module[0].weight.detach().clone()])
        elif reader == "scores":
            with torch.no_grad():
                results.append([ddp(torch.ones(2, 40).bfloat16())])
        else:
            optimizer.gather_exact_weights()
            results.append([parameter.detach().clone() for parameter in ddp.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("case", ["clip", "overflow", "groups", "fp16"])
def test_clipped_skipped_and_grouped_updates_overlap(lazy, case):
    runs = []
    for more in ({}, OFFLOAD):
        changes = {"clip_grad": 0.1 if case == "clip" else 1.0, **more}
        if case == "fp16":
            changes |= {"fp16": True, "bf16": False, "initial_loss_scale": 2.0**16, "hysteresis": 1}
        torch.manual_seed(0)
        net = network("remainder")
        if case == "fp16":
            net = net.half()
        ddp = DistributedDataParallel(None, DistributedDataParallelConfig(grad_reduce_in_fp32=True), net)
        config = OptimizerConfig(**{"lr": 0.02, "weight_decay": 0.1, "bf16": True, **changes})
        scale = (lambda name, parameter: name.startswith("2")) if case == "groups" else None
        optimizer = get_megatron_optimizer(config, [ddp], scale_lr_cond=scale, lr_mult=0.3)
        for step in range(6):
            optimizer.zero_grad()
            data = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
            if case == "overflow" and step == 2:
                data[0, 0] = torch.nan
            loss = ddp(data.to(next(ddp.parameters()))).float().square().sum()
            optimizer.scale_loss(loss).backward()
            ddp.finish_grad_sync()
            optimizer.step()
        runs.append((ddp, optimizer))
    assert runs[1][1]._updates.overlaps and same(*runs)
    assert runs[0][1].step_count == {"overflow": 5, "fp16": 4}.get(case, 6)


def test_updates_overlap_only_if_all_readers_can_wait():
    assert build(**OFFLOAD)[1]._updates.overlaps
    assert not build(kind="muon", **OFFLOAD)[1]._updates.overlaps
    assert not build(**{**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": False})[1]._updates.overlaps
    assert not build(**OFFLOAD, optimizer_offload_fraction=0.0)[1]._updates.overlaps
    config = OptimizerConfig(lr=0.1, **OFFLOAD)
    assert not get_megatron_optimizer(config, [network("fp32")], groups=SINGLE_PROCESS)._updates.overlaps


def test_slices_of_several_rules_are_in_the_order_of_the_forward_pass(lazy):
    runs = []
    for more in ({}, OFFLOAD):
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        ddp, config = DistributedDataParallel(None, settings, network("remainder")), OptimizerConfig(bf16=True, **more)
        rule = lambda name, parameter: "sgd" if name.startswith("0") else "adam"  # noqa: E731
        runs.append((ddp, get_megatron_optimizer(config, [ddp], update_rule=rule)))
        for group in runs[-1][1].param_groups:
            group["lr"] = 0.02
        train(runs[-1], 3)
    state = runs[1][1].host_state
    assert len({part for part, _ in state._slices}) == 2
    firsts = [pieces[0].name for _, pieces in state._slices]
    assert firsts == sorted(firsts, key=[name for name, _ in runs[0][0].module.named_parameters()].index)
    assert same(*runs)


def zero_runs(rank, world_size, kind, overlap_gather, fraction):
    """Return the weights and moments of ZeRO-1 runs without and with offload, with late side streams."""
    groups, results = parallel_state.initialize_model_parallel(), []
    streams = host_state.SideStream
    host_state.SideStream = weight_updates.SideStream = LazyStream
    try:
        for more in ({}, OFFLOAD):
            net = network("remainder")
            settings = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=True,
                overlap_param_gather=overlap_gather, bucket_size=1000,
            )  # fmt: skip
            config = OptimizerConfig(optimizer=kind, lr=0.02, bf16=True, muon_fp32_matmul_prec="highest", **more)
            config.optimizer_offload_fraction = fraction
            declare_update_rules(net, config)
            ddp = DistributedDataParallel(None, settings, net, groups=groups)
            optimizer = get_megatron_optimizer(config, [ddp], groups=groups)
            for step in range(4):
                optimizer.zero_grad()
                data = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))
                ddp(data.bfloat16()).float().square().sum().backward()
                ddp.finish_grad_sync()
                optimizer.update()
            overlaps = optimizer._updates.overlaps
            named = {**ddp.state_dict(), **{f"m {k}": v for k, v in optimizer.state_dict()["main_param"].items()}}
            results.append({name: value.float().numpy().copy() for name, value in named.items()})
    finally:
        host_state.SideStream = weight_updates.SideStream = streams
    return overlaps, results


@pytest.mark.parametrize("kind, overlap_gather, fraction", [
    ("adam", False, 1.0), ("adam", True, 1.0), ("adam", True, 0.5), ("muon", False, 1.0), ("muon", True, 0.5),
])  # fmt: skip
def test_sharded_updates_overlap_with_gathers(gloo_pool, kind, overlap_gather, fraction):
    result = gloo_pool.run(zero_runs, 2, kind, overlap_gather, fraction)
    # with half of the elements, one rank has no tensor that fits
    assert {overlaps for overlaps, _ in result} >= {overlap_gather and kind == "adam"}
    for _, (plain, offloaded) in result:
        assert plain.keys() == offloaded.keys()
        assert all(np.array_equal(plain[name], offloaded[name]) for name in plain)
    weights = [{k: v for k, v in results[1].items() if not k.startswith("m ")} for _, results in result]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_a_fraction_of_the_elements_is_offloaded(kind, fraction):
    plain, offloaded = build(kind=kind), build(kind=kind, **OFFLOAD, optimizer_offload_fraction=fraction)
    train(plain, 3)
    train(offloaded, 3)
    assert same(plain, offloaded)
    sizes = {name: item.weight.numel() for name, item in offloaded[1].storage.items()}
    stored = sum(sizes[name] for name in offloaded[1].host_state.names)
    assert stored <= fraction * sum(sizes.values()) and bool(stored) == (fraction > 0)


def test_the_last_parameters_that_fit_are_selected():
    sizes = {"a": 10, "b": 60, "c": 30}
    result = {part: sorted(select_offloaded(sizes, part)) for part in (0, 0.1, 0.35, 0.7, 0.9, 1)}
    assert result == {0: [], 0.1: ["a"], 0.35: ["c"], 0.7: ["a", "c"], 0.9: ["b", "c"], 1: ["a", "b", "c"]}


def test_slices_cover_every_element_once_in_order_and_fit_in_a_slot():
    state = build(**OFFLOAD)[1].host_state
    covered = {}
    for _, pieces in state._slices:
        for piece in pieces:
            assert covered.get(piece.name, 0) == piece.start and piece.start % 64 == 0
            covered[piece.name] = piece.stop
    assert covered == {name: storage.weight.numel() for name, storage in state._storages.items()}
    assert NUM_SLOTS * len(state._slots[0]) == state.device_bytes
    assert any(len(pieces) > 1 for _, pieces in state._slices)


def test_state_is_interchangeable_with_and_without_offload(lazy):
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


def test_changes_between_steps_reach_the_next_update(lazy):
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


def test_edits_of_weights_after_an_update_reach_the_next_one(lazy):
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
    weights = {name: item.detach().clone() for name, item in net.named_parameters()}
    optimizer.step()
    changed = {name for name, item in net.named_parameters() if not torch.equal(item, weights[name])}
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
        net = nn.Sequential(*(nn.Linear(*item, bias=False) for item in zip(widths, widths[1:])))
        config = OptimizerConfig(optimizer="muon", lr=0.02, muon_fp32_matmul_prec="highest", **more)
        declare_update_rules(net, config)
        fsdp = TorchFullyShardedDataParallel(DistributedDataParallelConfig(), net, [], groups)
        optimizer = get_megatron_optimizer(config, [fsdp], groups=groups)
        slices = [[piece.name for piece in pieces] for _, pieces in optimizer.host_state._slices]
        everywhere = [None] * world_size
        torch.distributed.all_gather_object(everywhere, slices)
        if any(item != slices for item in everywhere):
            return slices, []
        for step in range(3):
            optimizer.zero_grad()
            fsdp(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            fsdp.finish_grad_sync()
            optimizer.step()
        results.append([parameter.full_tensor().detach().numpy().copy() for parameter in net.parameters()])
    return slices, results


@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize("world_size", [3, 4])
def test_ranks_with_uneven_rows_have_the_same_slices(gloo_pool, world_size, fraction):
    result = gloo_pool.run(uneven, world_size, fraction)
    assert all(slices == result[0][0] for slices, _ in result) and len(result[0][0]) > 1
    for _, (plain, offloaded) in result:
        assert all(map(np.array_equal, plain, offloaded))


def test_saving_keeps_no_memory():
    run = build(**OFFLOAD)
    train(run, 1)
    stored = {name: value.data_ptr() for kind in run[1].moments.values() for name, value in kind.items()}
    for _ in range(2):
        state = run[1].state_dict()
        del state
        train(run, 1)
    assert stored == {name: value.data_ptr() for kind in run[1].moments.values() for name, value in kind.items()}
    assert len(run[1].host_state._loaded) == NUM_SLOTS


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["nothing", "loads", "stores", "updates", "forward"])
@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("form", FORMATS)
def test_offloaded_updates_equal_those_on_the_device_gpu(form, kind, late):
    """Also if work of one kind is so slow that a missing wait would read or overwrite the wrong values."""
    plain, offloaded = (build(form, kind, device="cuda", width=5000, **more) for more in ({}, OFFLOAD))
    state, updates = offloaded[1].host_state, offloaded[1]._updates
    sleep = partial(torch.cuda._sleep, 1_000_000)
    if late in ("loads", "stores"):
        stream = getattr(state, f"_{late}")
        copy = stream.copy
        stream.copy = lambda pairs, after=(): stream.run(sleep) and copy(pairs, after)
    elif late == "updates":
        run = updates.run
        updates.run = lambda work, *more: run(lambda: sleep() or work(), *more)
    elif late == "forward":
        offloaded[0].module.register_forward_pre_hook(lambda *_: sleep())
    train(plain, 4)
    train(offloaded, 4)
    assert all(item.is_pinned() for item in state._state("0.weight"))
    assert same(plain, offloaded)


@pytest.mark.gpu
def test_offloaded_state_takes_no_device_memory_gpu():
    stored = []
    for more in ({}, OFFLOAD, {**OFFLOAD, "optimizer_offload_fraction": 0.0}):
        before = torch.cuda.memory_allocated()
        run = build(device="cuda", width=1 << 20, **more)
        train(run, 2)
        run[1].zero_grad()
        stored.append(torch.cuda.memory_allocated() - before)
        run[1].state_dict()
        del run
    elements = 45 << 20
    assert stored[0] - stored[1] > 7 * elements and abs(stored[0] - stored[2]) < 1 << 20
