"""The kernel that adds 16-bit parts to a sum in fp32 gives torch's bits."""

import pytest
import torch

from megatron.core.fusions import sum_parts as module
from megatron.core.fusions.sum_parts import sum_all, sum_parts, sum_parts_reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounds", [False, True], ids=["in place", "rounded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (5, 1, 3, 8), (17, 2, 3, 64)])
def test_the_kernel_equals_torch_and_writes_nothing_else(shape, dtype, rounds, device):
    if module.triton is None or (device == "cpu" and torch.cuda.is_available()):
        pytest.skip("the interpreter runs where there is Triton and no GPU")
    torch.manual_seed(0)
    total, part = torch.randn(shape, device=device), torch.randn(shape, device=device).to(dtype)
    outs = []
    for add in (module.sum_parts_triton, sum_parts_reference):
        so_far = torch.cat((total.flatten(), total.new_full((9,), 7.0)))
        saved = so_far[: total.numel()].view(shape)
        out = torch.full((total.numel() + 9,), 7.0, device=device, dtype=dtype) if rounds else so_far
        add(saved, part, out[: total.numel()].view(shape))
        outs.append(out)
    # Triton's interpreter cuts bf16 off instead of rounding it
    tolerance = 2**-7 if rounds and dtype == torch.bfloat16 and device == "cpu" else 0.0
    torch.testing.assert_close(*outs, rtol=tolerance, atol=0.0)
    assert (outs[0][-9:] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_strides_and_double_precision_are_served(dtype, device):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.randn(6, 5, 4, device=device).to(wide).transpose(0, 1)
    part = torch.randn(5, 6, 4, device=device).to(dtype)
    expected = total + part
    sum_parts(total, part, total)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_all_parts_are_added_in_fp32_in_their_order(count, dtype, device):
    if module.triton is None or (device == "cpu" and torch.cuda.is_available()):
        pytest.skip("the interpreter runs where there is Triton and no GPU")
    torch.manual_seed(count)
    parts = [torch.randn(7, 1, 333, device=device).to(dtype) for _ in range(count)]
    tolerance = 2**-7 if dtype == torch.bfloat16 and device == "cpu" else 0.0
    torch.testing.assert_close(
        module.sum_all_triton(parts), module.sum_all_reference(parts), rtol=tolerance, atol=0.0
    )


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_number_of_parts_and_double_precision_are_served(count, dtype):
    parts = list(torch.randn(count, 5, 6).to(dtype).transpose(1, 2))
    saved = [part.clone() for part in parts]
    expected = torch.stack(parts).double().sum(0)
    torch.testing.assert_close(sum_all(parts).double(), expected, rtol=2**-8, atol=1e-12)
    assert all(torch.equal(part, before) for part, before in zip(parts, saved))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    numel = 2**31 + 4097
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 13 GB")
    total = torch.zeros(numel, device="cuda")
    part = torch.zeros(numel, device="cuda", dtype=torch.bfloat16)
    total[-1], part[-1], part[0] = 1.0, 2.0, 3.0
    sum_parts(total, part, total)
    assert total[-1] == 3.0 and total[0] == 3.0 and total.count_nonzero() == 2
