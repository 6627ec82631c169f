"""Weights and optimizer state move to the host and back with the same bits, and their memory is released."""

import gc
from unittest import mock

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing import save
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.rl.host_copy import HostCopy
from megatron.core.sharding.sharded_tensor import module_tensors
from tests.test_utils.layouts import VOCAB_SIZE, configure
from tests.unit_tests.training.test_live_weights import BASE, TP2

LAYOUTS = {
    "one rank": ("", 1), "tp2": (TP2, 2), "zero": ("--use-distributed-optimizer --overlap-grad-reduce", 2),
    "fsdp": ("--use-torch-fsdp2 --no-gradient-accumulation-fusion"
    " --untie-embeddings-and-output-weights", 2),
}  # fmt: skip


def trained(rank, world_size, flags, offloads):
    """Return the losses of four steps; before the third one everything is on the host for a while."""
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.trainer import Trainer
    from megatron.training.verify.layout_trace import with_synthetic_data

    cfg = configure([*BASE.split(), "--train-iters", "9", *flags.split()], world_size, "bf16")
    groups = initialize_megatron(cfg)
    parts = build_components(cfg, with_synthetic_data(task_class("gpt"), VOCAB_SIZE)(cfg), groups)
    results = []
    with ExitConditions(cfg) as exits:
        trainer = Trainer(cfg, parts, exits)
        for step in range(4):
            if step == 2 and offloads:
                copy = HostCopy(parts.model, parts.optimizer)
                released = [copy.offload(weights=False), copy.reload(), copy.offload()]
                assert 0 < released[0] < released[2] and copy.is_offloaded
                assert not any(local(p).untyped_storage().nbytes() for chunk in parts.model for p in chunk.parameters())
                with pytest.raises(UserError, match="call reload first"):
                    copy.offload()
                copy.reload()
                with pytest.raises(UserError, match="call offload first"):
                    copy.reload()
            metrics = trainer.step.run()
            results.append((float(metrics.losses["lm loss"]), float(metrics.grad_norm)))
    return results


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_continues_with_the_same_bits(gloo_pool, layout):
    flags, world_size = LAYOUTS[layout]
    assert gloo_pool.run(trained, world_size, flags, True) == gloo_pool.run(trained, world_size, flags, False)


def test_a_module_without_optimizer_moves_weights_and_buffers_and_drops_gradients():
    module = torch.nn.BatchNorm1d(6)
    module.running_mean.copy_(torch.arange(6.0))
    module.weight.grad = torch.ones(6)
    values = {name: value.clone() for name, value in module.state_dict().items()}
    copy = HostCopy([module])
    assert copy.offload(weights=False) == 4 * 6 and module.weight.grad.untyped_storage().nbytes() == 0
    copy.reload()
    assert copy.offload() == 4 * (2 * 6 + 2 * 6 + 6) + 8  # parameters, statistics, a gradient, the counter of batches
    assert not any(x.untyped_storage().nbytes() for x in [*module.parameters(), *module.buffers()])
    copy.reload()
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert torch.equal(module.weight.grad, torch.zeros(6))


def test_saved_weights_move_to_the_host_and_back(tmp_path):
    module = torch.nn.Linear(5, 7)
    values = [x.detach().clone() for x in module.parameters()]
    save(module_tensors(module, groups=SINGLE_PROCESS), tmp_path / "saved")
    copy = HostCopy([module])
    assert copy.offload() == 4 * (5 * 7 + 7) and not any(x.untyped_storage().nbytes() for x in module.parameters())
    copy.reload()
    assert all(torch.equal(x, value) for x, value in zip(module.parameters(), values))


def storages_of_live_tensors():
    """Return {address of the object: storage} of all tensors of this process that own memory, gradients among them."""
    tensors = [local(x).detach() for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    tensors += [x.grad for x in tensors if x.grad is not None]
    storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu" and x.layout == torch.strided]
    return {storage._cdata: storage for storage in storages}


def offloaded(rank, world_size, precision, flags):
    """Return ([released, freed bytes] without and with the weights, elements of parameters, largest gradient after
    :meth:`reload`, bytes of weights, gradients and optimizer state that the message of a failed allocation would show),
    of a run with two steps. New memory is not zero."""
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.initialize import initialize_megatron
    from megatron.training.report.out_of_memory import measure
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.trainer import Trainer
    from megatron.training.verify.layout_trace import with_synthetic_data

    argv = [*BASE.replace("--bf16", "").split(), "--train-iters", "9", *precision.split(), *flags.split()]
    cfg = configure(argv, world_size, "bf16")
    groups = initialize_megatron(cfg)
    parts = build_components(cfg, with_synthetic_data(task_class("gpt"), VOCAB_SIZE)(cfg), groups)
    with ExitConditions(cfg) as exits:
        trainer = Trainer(cfg, parts, exits)
        for _ in range(2):
            trainer.step.run()
    parameters = [parameter for chunk in parts.model for parameter in chunk.parameters()]
    gradients = [x for p in parameters for x in (getattr(p, "main_grad", None), p.grad) if x is not None]
    for gradient in gradients:
        local(gradient).fill_(7.0)
    resize = torch.UntypedStorage.resize_

    def resize_to_garbage(storage, size):
        resize(storage, size)
        if size:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x41)

    measured = measure(parts.model, parts.optimizer)
    copy, sizes = HostCopy(parts.model, parts.optimizer), []
    with mock.patch.object(torch.UntypedStorage, "resize_", resize_to_garbage):
        for weights in (False, True):
            before = {key: storage.nbytes() for key, storage in storages_of_live_tensors().items()}
            released = copy.offload(weights=weights)
            after = {key: storage.nbytes() for key, storage in storages_of_live_tensors().items()}
            sizes.append((released, sum(size - after.get(key, size) for key, size in before.items())))
            copy.reload()
    largest = max(float(local(gradient).abs().max()) for gradient in gradients)
    elements = sum(parameter.numel() for parameter in parameters)
    return sizes, elements, largest, (measured.weights, measured.gradients, measured.optimizer)


STATE_BYTES = {"--bf16": 4 + 2 + 8, "--bf16 --no-store-param-remainders": 4 + 4 + 8, "--fp16": 4 + 4 + 8, "": 4 + 8}
"""Per element: fp32 gradient, part of the master that the weight does not hold, two fp32 moments."""


@pytest.mark.parametrize("precision", STATE_BYTES)
def test_offload_releases_gradients_masters_and_moments(gloo_pool, precision):
    """Counted over all tensors of the process. Flat memory is padded, by at most 3 % here."""
    ((state, both), elements, largest, measured) = gloo_pool.run(offloaded, 1, precision, "")[0]
    assert state[0] == state[1] and both[0] == both[1], "the return value is the memory that was freed"
    expected = STATE_BYTES[precision] * elements
    assert expected <= state[0] <= 1.03 * expected
    weights = elements * (2 if precision else 4)
    assert state[0] + weights <= both[0] <= 1.03 * (expected + weights)
    assert largest == 0.0, "gradients are zero after reload"
    for size, per_element in zip(measured, (2 if precision else 4, 4, STATE_BYTES[precision] - 4), strict=True):
        assert per_element * elements <= size <= 1.03 * per_element * elements


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
def test_gradients_are_zero_after_reload_on_every_layout(gloo_pool, layout):
    flags, world_size = LAYOUTS[layout]
    for (state, both), _, largest, _ in gloo_pool.run(offloaded, world_size, "--bf16", flags):
        assert state[0] == state[1] and both[0] == both[1] and largest == 0.0
