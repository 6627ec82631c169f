"""The element-wise kernels of Muon against torch operations, in every storage."""

import pytest
import torch

from megatron.core.fusions import muon_update
from megatron.core.fusions.muon_update import MuonStep, MuonUpdate, TritonMuonUpdate, choose_muon_update
from megatron.core.fusions.storage import Copy, FSDPStorage, OptimizerEntry, Remainder, Storage

SHAPES = ((5, 1), (64, 64), (17, 241), (4, 8))  # less than a block, one, one and a bit; not all a multiple of 16
FORMATS = {
    "fp32": (torch.float32, Storage, torch.float32, torch.float32),
    "bf16, copy": (torch.bfloat16, Copy, torch.bfloat16, torch.bfloat16),
    "fp16, copy": (torch.float16, Copy, torch.float32, torch.float32),
    "fp32, gathered": (torch.float32, FSDPStorage, torch.float32, torch.bfloat16),
    "bf16, remainder": (torch.bfloat16, Remainder, torch.float32, torch.bfloat16),
}
CHANGES = {
    "defaults": {}, "no factor": {"factor": None}, "nesterov": {"nesterov": True}, "l2": {"decoupled": False},
    "skip": {"skip": 1.0},
}  # fmt: skip
interpreted = pytest.mark.skipif(
    muon_update.triton is None or torch.cuda.is_available(), reason="needs Triton's interpreter"
)


class Negative(Copy):
    """Storage that the kernels do not know."""

    def write(self, value):
        super().write(value)
        self.weight.neg_()


def entries_of(name, device, kind=None):
    weight, storage, gradient, _ = FORMATS[name]
    generator, results = torch.Generator().manual_seed(0), []
    for index, shape in enumerate(SHAPES):
        exact, momentum, built = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
        local = (kind if kind is not None and index == 1 else storage)(exact.to(weight))
        if local.kept_dtype is not None:
            local.kept = torch.zeros(shape, dtype=local.kept_dtype, device=device)
            local.write(exact)
        lr, decay = ((0.01, 0.1), (0.02, 0.0))[index % 2]
        results.append(OptimizerEntry(local, built.to(gradient), (0.1 * momentum,), lr, decay))
    return results


def numbers(device, skip=0.0, factor=0.3, nesterov=False, decoupled=True):
    scale = None if factor is None else torch.tensor(factor, dtype=torch.float64, device=device)
    return MuonStep(0.9, nesterov, decoupled, torch.tensor(skip, device=device), scale)


def run(update, name, device, changes, kind=None):
    entries, step = entries_of(name, device, kind), numbers(device, **changes)
    directions = update.advance(entries, step)
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(item, generator=generator).to(device, FORMATS[name][3]) for item in SHAPES]
    if step.skip:
        factors = [torch.full_like(factor, float("nan")) for factor in factors]
    update.apply(entries, factors, [2.0, 3.0, 2.0, 0.5], step)
    return entries, directions


def check(update, name, device, changes, kind=None):
    """Triton's interpreter cuts bf16 off where a GPU rounds to nearest."""
    (local, directions), (foreign, expected) = (
        run(x, name, device, changes, kind) for x in (update, MuonUpdate())
    )
    skipped, before = bool(changes.get("skip")), entries_of(name, device, kind)
    for mine, reference, old in zip(local, foreign, before):
        torch.testing.assert_close(mine.moments, reference.moments, rtol=1e-5, atol=1e-6)
        exact, weight = mine.storage.read(), mine.storage.weight
        torch.testing.assert_close(exact, reference.storage.read(), rtol=1e-5, atol=1e-6)
        assert torch.equal(exact, old.storage.read()) == skipped
        assert torch.equal(mine.moments[0], old.moments[0]) == skipped
        assert torch.equal(mine.gradient, old.gradient)
        if skipped:
            assert torch.equal(weight, old.storage.weight)
        elif device == "cuda" or isinstance(mine.storage, Remainder) or weight.dtype != torch.bfloat16:
            assert isinstance(mine.storage, Negative) or torch.equal(weight, exact.to(weight.dtype))
    if not skipped:
        torch.testing.assert_close(directions, expected, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernels_equal_torch(name, changes):
    check(TritonMuonUpdate(), name, "cpu", CHANGES[changes])


@interpreted
def test_declared_storages_are_updated_without_the_kernels():
    check(TritonMuonUpdate(), "bf16, copy", "cpu", {}, Negative)
    entries, _ = run(TritonMuonUpdate(), "bf16, copy", "cpu", {}, Negative)
    assert torch.equal(entries[1].storage.weight, -entries[1].storage.read().bfloat16())


def test_torch_operations_are_chosen_on_a_cpu():
    assert type(choose_muon_update([item.storage for item in entries_of("fp32", "cpu")])) is MuonUpdate
    assert type(choose_muon_update([])) is MuonUpdate


@pytest.mark.gpu
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernels_equal_torch_on_a_gpu(name, changes):
    chosen = choose_muon_update([item.storage for item in entries_of(name, "cuda")])
    assert isinstance(chosen, TritonMuonUpdate)
    check(chosen, name, "cuda", CHANGES[changes])
