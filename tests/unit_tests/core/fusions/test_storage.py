"""Storage of weights: kinds by dtype, rounding ties, and writes that leave the caller's tensor as it is."""

import pytest
import torch

from megatron.core.fusions.storage import Copy, FSDPStorage, Remainder, Storage, build_storage

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TIE = 1.0 + 2.0**-8
"""Between the bf16 numbers 1 and 1 + 2^-7; rounds to even, to 1."""
BELOW = 1.0 + 2.0**-8 - 2.0**-23

CHOICES = [
    # values, compute dtype, split, kind, kept, moves ties, live, saves a master
    (FP32, FP32, True, Storage, None, False, True, False),
    (FP64, FP64, True, Storage, None, False, True, False),
    (BF16, BF16, True, Remainder, torch.int16, True, False, True),
    (BF16, BF16, False, Copy, FP32, True, True, True),
    (FP16, FP16, True, Copy, FP32, False, True, True),
    (FP32, BF16, True, FSDPStorage, None, True, True, True),
    (FP32, FP16, True, FSDPStorage, None, False, True, True),
]


def build(values, compute, split, saved):
    storage = build_storage(torch.ones(3, dtype=values), compute, split=split)
    if saved is not None:
        storage.kept = torch.zeros(3, dtype=saved)
        storage.refresh()
    return storage


@pytest.mark.parametrize("values, compute, split, kind, kept, nudges, is_live, saves", CHOICES)
def test_kind_follows_from_dtypes(values, compute, split, kind, kept, nudges, is_live, saves):
    storage = build(values, compute, split, kept)
    assert type(storage) is kind and storage.kept_dtype == kept and storage.dtype == (FP32 if kept else values)
    assert (storage.nudges_ties, storage.is_live, storage.saves_master) == (nudges, is_live, saves)
    assert storage.read().dtype == storage.dtype and storage.read().tolist() == [1.0] * 3


@pytest.mark.parametrize("values, compute, split, kind, kept, nudges, is_live, saves", CHOICES)
def test_writes_move_only_ties_of_bf16_models(values, compute, split, kind, kept, nudges, is_live, saves):
    storage = build(values, compute, split, kept)
    above = TIE + 2.0**-7  # a tie that rounds up needs no move
    value = torch.tensor([TIE, above, -TIE], dtype=storage.dtype)
    passed = value.clone()
    storage.write(value)
    assert torch.equal(value, passed), "the caller's tensor changed"
    expected = [BELOW, above, -BELOW] if nudges else [TIE, above, -TIE]
    assert storage.read().tolist() == expected
    if kept is not None:
        assert torch.equal(storage.weight, torch.tensor(expected, dtype=FP32).to(values))
    storage.weight.fill_(0.5)
    storage.refresh()
    assert storage.read().tolist() == [0.5] * 3
