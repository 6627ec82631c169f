"""The AdamW kernel against torch's operator; 16-bit master remainders; moments in bf16."""

import dataclasses

import pytest
import torch

from megatron.core.fp8.storage import Fp8Gathered
from megatron.core.fusions import adam
from megatron.core.fusions.adam import AdamStep, adam_reference_, choose_adam
from megatron.core.fusions.address_table import is_read_by_kernels
from megatron.core.fusions.storage import (
    Copy,
    FSDPStorage,
    OptimizerEntry,
    Remainder,
    Storage,
    by_rates,
    join_fp32,
    nudge_rounding_ties_,
    split_fp32,
)

SIZES = (5, 4096, 4097, 32)  # less than a block, one, one and a bit; all aligned, not all a multiple of 16


def updated(size, weight, kind, moments, gradient, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed + size)
    exact = torch.randn(size, generator=generator).to(device)
    master = kind(exact.to(weight))
    if kind.kept_dtype is not None:
        master.kept = torch.zeros(size, dtype=kind.kept_dtype, device=device)
        master.write(exact)
    first, second = (0.1 * torch.randn(size, generator=generator).to(device) for _ in range(2))
    states = (first.to(moments[0]), second.square().to(moments[1]))
    built = torch.randn(size, generator=generator).to(device, gradient)
    return OptimizerEntry(master, built, states, 1e-3, 0.1)


def numbers(device="cpu", skip=0.0, factor=0.3, decoupled=True, step=3.0):
    built = (torch.tensor(value, device=device) for value in (step, skip))
    scale = None if factor is None else torch.tensor(factor, dtype=torch.float64, device=device)
    return AdamStep(0.9, 0.999, 1e-8, decoupled, *built, scale)


FORMATS = {
    "fp32": (torch.float32, Storage, (torch.float32, torch.float32), torch.float32),
    "bf16, copy": (torch.bfloat16, Copy, (torch.float32, torch.float32), torch.bfloat16),
    "fp16, copy": (torch.float16, Copy, (torch.float32, torch.float32), torch.float32),
    "fp32, gathered": (torch.float32, FSDPStorage, (torch.float32, torch.float32), torch.float32),
    "bf16, remainder": (torch.bfloat16, Remainder, (torch.float32, torch.float32), torch.float32),
    "all in 16 bits": (torch.bfloat16, Remainder, (torch.bfloat16, torch.bfloat16), torch.bfloat16),
    "one moment in 16 bits": (torch.float32, Storage, (torch.bfloat16, torch.float32), torch.float32),
}


def entries_of(make):
    rates = [(0.01, 0.1), (0.01, 0.1), (0.02, 0.0), (0.02, 0.0)]
    return [dataclasses.replace(make(size), lr=lr, weight_decay=decay) for size, (lr, decay) in zip(SIZES, rates)]


def compare(kernel, name, device):
    make = lambda size: updated(size, *FORMATS[name], device)  # noqa: E731
    for changes in ({}, {"factor": None, "decoupled": False}, {"skip": 1.0}):
        local, foreign, before = (entries_of(make) for _ in range(3))
        kernel(local, numbers(device, **changes))
        adam_reference_(foreign, numbers(device, **changes))
        for mine, reference, old in zip(local, foreign, before):
            check(mine, reference, old, bool(changes.get("skip")))


def check(mine, reference, old, skipped):
    """Triton's interpreter cuts bf16 off where a GPU rounds to nearest."""
    for result, expected in zip(mine.moments, reference.moments):
        wide = result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=1e-5 if wide else 2**-7, atol=1e-7)
    exact = mine.storage.read()
    torch.testing.assert_close(exact, reference.storage.read(), rtol=1e-5, atol=1e-6)
    weight = mine.storage.weight
    if weight.is_cuda or weight.dtype != torch.bfloat16 or isinstance(mine.storage, Remainder):
        assert torch.equal(weight, exact.to(weight.dtype))
    else:
        torch.testing.assert_close(weight, exact.to(weight.dtype), rtol=2**-7, atol=0.0)
    assert torch.equal(exact, old.storage.read()) == skipped
    if skipped:
        assert all(torch.equal(a, b) for a, b in zip(mine.moments, old.moments))


@pytest.mark.skipif(adam.triton is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_equals_torch(name):
    kernel = adam.TritonAdam()
    compare(kernel, name, "cpu")
    group = next(iter(by_rates(entries_of(lambda size: updated(size, *FORMATS[name]))).values()))
    first, second = (kernel._current(group) for _ in range(2))
    assert first is second, "tables are built anew only when something moved"


class Declared(Copy):
    """A storage that the kernel does not know: its weight is the negative of the exact value."""

    def write(self, value):
        super().write(value)
        self.weight.neg_()


@pytest.mark.skipif(adam.triton is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_declared_storages_are_updated_without_the_kernel():
    kinds = {"mine": Declared, "built in": Copy}
    formats = {name: (torch.bfloat16, kind, *FORMATS["bf16, copy"][2:]) for name, kind in kinds.items()}
    local, foreign = ([updated(100, *value) for value in formats.values()] for _ in range(2))
    adam.TritonAdam()(local, numbers())
    adam_reference_(foreign, numbers())
    assert torch.equal(local[0].storage.weight, foreign[0].storage.weight)
    assert torch.equal(local[0].storage.weight, -local[0].storage.read().bfloat16())
    check(local[1], foreign[1], updated(100, *formats["built in"]), False)


def test_kernels_read_storages_that_inherit_reading_and_writing():
    weight = torch.zeros(4, dtype=torch.bfloat16)
    inheriting = [Fp8Gathered.build(weight, split=split) for split in (True, False)]
    assert all(is_read_by_kernels(x) for x in (*inheriting, Copy(weight)))
    assert not is_read_by_kernels(Declared(weight))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_equals_torch_on_a_gpu(name):
    chosen = choose_adam([updated(3, *FORMATS[name], "cuda").storage])
    assert isinstance(chosen, adam.TritonAdam)
    compare(chosen, name, "cuda")
    results = []
    for _ in range(2):
        entries = entries_of(lambda size: updated(size, *FORMATS[name], "cuda"))
        chosen(entries, numbers("cuda"))
        results.append([entry.storage.read().clone() for entry in entries])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_remainder_gives_every_fp32_number_back():
    patterns = torch.cat([
        torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(1)).to(torch.int32),
        torch.tensor([0, -(2**31), 0x7F7FFFFF, 0x7F800000, 0x00008000, 0x00018000, 0x7FFFFFFF, -1, 0x3F808000],
                     dtype=torch.int32),
    ])  # fmt: skip
    exact = patterns.view(torch.float32)
    weight, remainder = split_fp32(exact)
    assert torch.equal(join_fp32(weight, remainder).view(torch.int32), patterns)
    settled = nudge_rounding_ties_(exact.clone())
    changed = settled.view(torch.int32) != patterns
    assert torch.equal(changed, (patterns & 0x1FFFF) == 0x8000)
    weight, same = split_fp32(settled)[0].view(torch.int16), exact.bfloat16().view(torch.int16)
    assert bool(((weight == same) | exact.isnan()).all()), "rounded to nearest, halves to even"
    assert settled[patterns == 0x3F808000] == 1.00390625 - 2**-23


@pytest.mark.parametrize("decoupled", [True, False])
def test_masters_of_bf16_walk_the_same_path(decoupled):
    """From values that are halves, too."""
    kinds = {Remainder: torch.bfloat16, Copy: torch.bfloat16, FSDPStorage: torch.float32}
    many = [updated(4001, dtype, kind, (torch.float32, torch.float32), torch.float32) for kind, dtype in kinds.items()]
    for item in many:
        item.storage.write(many[0].storage.read().view(torch.int32).bitwise_or(0x8000).view(torch.float32))
    for step in range(8):
        gradient = torch.randn(4001, generator=torch.Generator().manual_seed(step))
        for item in many:
            item.gradient.copy_(gradient)
            adam_reference_([item], numbers(step=step + 1.0, decoupled=decoupled))
        for item in many[1:]:
            assert torch.equal(item.storage.read(), many[0].storage.read())
        for item in many[:2]:
            assert torch.equal(item.storage.weight, item.storage.read().bfloat16())
