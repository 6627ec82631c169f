"""Casts to fp8 have the bytes and scales of the independent definition (``tests/reference/fp8.py``), bit for bit.

Triton's interpreter rounds wrongly to fp8 where a value rounds up across a power of two, and does not clip: interpreted
kernels get values that are exact after scaling. Tests marked ``gpu`` show rounding, clipping and NaN of compiled ones.
"""

import pytest
import torch

from megatron.core.fusions import fp8_cast
from megatron.core.fusions.activation_kernels import GateTraits, gated_triton
from megatron.core.fusions.fp8_cast import Scale, amax_parts, cast_in_blocks, cast_tensor
from megatron.core.fusions.residual_norm import NormTraits, normalize_triton
from tests.reference import fp8 as reference
from tests.test_utils.kernels import DEVICE, filled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: reference.E4M3, E5M2: reference.E5M2}
both_formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])


def assert_same(actual, expected, dtype):
    """``found`` is a ``Quantized`` of the library, ``expected`` one of the reference."""
    assert actual.data.dtype == dtype and actual.data.is_contiguous() and actual.scale.dtype == torch.float32
    found_codes, codes = actual.data.view(torch.uint8), reference.codes(expected.grid, FORMATS[dtype])
    is_nan = actual.data.float().isnan()  # of either sign, and in e5m2 with any mantissa
    assert torch.equal(torch.where(is_nan, 0x7F, found_codes), codes)
    assert torch.equal(actual.scale.double(), expected.scale)


def grid(dtype):
    """All finite numbers of a format, in order, fp64."""
    numbers = torch.arange(256).to(torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def with_ties(dtype):
    """All numbers of a format, the ties between neighbors, and the fp32 numbers next to each of these; 448 or 57344 is
    the largest, so that the factor is 1."""
    numbers = grid(dtype)
    points = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2)).float()
    points = torch.cat((points, *(points.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))))
    return points.clamp(numbers[0], numbers[-1]).double().view(1, -1)


def special(*values):
    """A matrix with ordinary numbers and a few others, far apart from each other."""
    x = filled(140, 133, dtype=torch.float64)
    for index, value in enumerate(values):
        x[index * 37 % 140, index * 61 % 133] = value
    return x


MATRICES = {
    "odd": filled(37, 131, dtype=torch.float64),
    "one": torch.full((1, 1), -3.0, dtype=torch.float64),
    "aligned": filled(128, 256, dtype=torch.float64, seed=2),
    "narrow": filled(130, 5, dtype=torch.float64, seed=3) * 1e-3,
    "empty": torch.zeros(0, 7, dtype=torch.float64),
    "zeros": torch.zeros(40, 130, dtype=torch.float64),
    "negative-zeros": -torch.zeros(3, 4, dtype=torch.float64),
    "huge": special(3e38, -(2.0**100), 1e30),
    "beyond-fp32": special(1e300, 2.0),
    "tiny": filled(33, 129, dtype=torch.float64) * 1e-37,
    "subnormal": filled(33, 129, dtype=torch.float64) * 1e-41,
    "subnormal-and-large": special(1e-42, -1e-45, 1e4),
    "infinite": special(torch.inf, 1e9, -torch.inf),
    "nan": special(torch.nan, 1e9),
    "all-nan": torch.full((5, 3), torch.nan, dtype=torch.float64),
    "many-magnitudes": filled(64, 300, dtype=torch.float64) * torch.logspace(-12, 12, 300, dtype=torch.float64),
}


@both_formats
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("name", MATRICES)
def test_casts_have_the_bytes_and_scales_of_the_reference(name, input_dtype, dtype):
    x, to = MATRICES[name].to(input_dtype), FORMATS[dtype]
    check_per_tensor(x, dtype, to)
    check_blocks(x, dtype, to)


def check_per_tensor(x, dtype, to):
    parts = amax_parts(x)
    assert torch.equal(parts.amax().double().view(1).nan_to_num(7.0), reference.find_amax(x.double()).nan_to_num(7.0))
    copies = cast_tensor(x, dtype, parts, columns=True)
    assert_same(copies.rows, reference.per_tensor(x.double(), to), dtype)
    assert_same(copies.columns, reference.per_tensor(x.double().T, to), dtype)
    factor, noted = torch.tensor([3.7], device=x.device), fp8_cast.new_amax(x.device)
    copies = cast_tensor(x, dtype, Scale(factor, 1 / factor), columns=True, noted=noted)
    # not the bits of NaN, which a GPU may change
    assert torch.equal(*(bits.max().view(torch.float32).nan_to_num(7.0) for bits in (noted, parts.view(torch.int32))))
    assert_same(copies.rows, reference.per_tensor(x.double(), to, factor.double()), dtype)
    assert_same(copies.columns, reference.per_tensor(x.double().T, to, factor.double()), dtype)


def check_blocks(x, dtype, to):
    copies = cast_in_blocks(x, dtype, columns=True)
    assert_same(copies.rows, reference.in_blocks(x.double(), to), dtype)
    assert_same(copies.columns, reference.in_blocks(x.double().T, to), dtype)
    assert all(copy.scale.shape[0] <= 1 or copy.scale.stride(0) == 1 for copy in copies), "layout of the GEMM"
    copies = cast_in_blocks(x, dtype, columns=True, square=True)
    assert_same(copies.rows, reference.in_blocks(x.double(), to, reference.BLOCK), dtype)
    assert_same(copies.columns, reference.in_blocks(x.double().T, to, reference.BLOCK), dtype)


@both_formats
def test_every_number_tie_and_neighbor_is_rounded_as_in_the_reference(dtype):
    x, to = with_ties(dtype), FORMATS[dtype]
    expected = reference.per_tensor(x, to)
    assert torch.equal(expected.scale, torch.ones(1)) and len(grid(dtype)) in (253, 247)
    assert_same(cast_tensor(x.float(), dtype, amax_parts(x), columns=False).rows, expected, dtype)
    assert torch.equal(reference.rounded(grid(dtype), to), grid(dtype))


@both_formats
def test_values_beyond_the_range_of_a_given_scale_are_clipped(dtype):
    largest, one = FORMATS[dtype].largest, torch.ones(1)
    x = torch.tensor([[1.5 * largest, -1e30, 3.4e38, largest, -torch.inf]])
    result = cast_tensor(x, dtype, Scale(4 * one, one / 4), columns=False).rows.data.float()
    assert result[0, :4].tolist() == [largest, -largest, largest, largest] and result[0, 4].isnan()


def test_only_wanted_copies_are_made():
    x = filled(8, 16, dtype=torch.float32)
    for rows, columns in ((True, False), (False, True)):
        for copies in (
            cast_tensor(x, E4M3, amax_parts(x), rows=rows, columns=columns),
            cast_in_blocks(x, E4M3, rows=rows, columns=columns),
        ):
            assert [copy is not None for copy in copies] == [rows, columns]


def test_the_transposed_copy_with_blocks_is_cast_from_the_matrix_itself():
    """A transposed fp8 copy would be rounded twice; its blocks differ."""
    x = filled(256, 256, dtype=torch.float32) * torch.logspace(-3, 3, 256)
    rows, columns = cast_in_blocks(x, E4M3, columns=True)
    assert not torch.equal(rows.data.view(torch.uint8).t(), columns.data.view(torch.uint8))


def test_leading_dims_are_rows():
    x = filled(3, 5, 16, dtype=torch.bfloat16)
    for cast in (
        lambda y: cast_tensor(y, E4M3, amax_parts(y), columns=True),
        lambda y: cast_in_blocks(y, E4M3, columns=True),
    ):
        for actual, expected in zip(cast(x), cast(x.view(15, 16))):
            assert torch.equal(actual.data.view(torch.uint8), expected.data.view(torch.uint8))


# ---- Triton kernels


def exact(height, width, dtype, *, seed=0):
    """Numbers of ``dtype`` with 2 bits behind the point, of 4 magnitudes; every power of two of a factor keeps them
    exact. The largest is the format's, times 2^-9."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.randint(4, 8, (height, width), generator=generator) / 4
    sign = 1 - 2 * torch.randint(0, 2, (height, width), generator=generator)
    x = sign * mantissa * 2.0 ** torch.randint(-5, -1, (height, width), generator=generator)
    x[height // 2, width // 3] = -FORMATS[dtype].largest / 512
    return x


def kernels_of(x, dtype, monkeypatch):
    """Casts of ``x`` by the Triton kernels: interpreted on a CPU."""
    monkeypatch.setattr(fp8_cast, "_on_gpu", lambda x: True)
    if DEVICE == "cpu":  # 1,024 interpreted programs are slow
        monkeypatch.setattr(fp8_cast, "_AMAX_PROGRAMS", 4)
    return x.to(DEVICE)


triton_tests = pytest.mark.skipif(fp8_cast.triton is None, reason="needs Triton")
SIZES = [(1, 1), (64, 128), (37, 300), (130, 131), (129, 5), (2, 400)]


@triton_tests
@both_formats
@pytest.mark.parametrize("height, width", SIZES)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kernels_have_the_bytes_and_scales_of_the_reference(monkeypatch, height, width, input_dtype, dtype):
    x, to = kernels_of(exact(height, width, dtype), dtype, monkeypatch).to(input_dtype), FORMATS[dtype]
    wide, amax = x.double().cpu(), amax_parts(x)
    assert amax.max().item() == to.largest / 512
    factor = torch.full((1,), 512.0, device=DEVICE)
    for scale in (amax, Scale(factor, 1 / factor)):
        copies = cast_tensor(x, dtype, scale, columns=True)
        assert_same(on_cpu(copies.rows), reference.per_tensor(wide, to), dtype)
        assert_same(on_cpu(copies.columns), reference.per_tensor(wide.T, to), dtype)
    for square, side in ((False, 1), (True, reference.BLOCK)):
        copies = cast_in_blocks(x, dtype, columns=True, square=square)
        assert_same(on_cpu(copies.rows), reference.in_blocks(wide, to, side), dtype)
        assert_same(on_cpu(copies.columns), reference.in_blocks(wide.T, to, side), dtype)


def on_cpu(x):
    """Return a copy on the CPU, with the strides of its scale."""
    scale = x.scale.t().cpu().t() if x.scale.dim() == 2 else x.scale.cpu()
    return x._replace(data=x.data.cpu(), scale=scale)


@triton_tests
@pytest.mark.parametrize("height, width", [*SIZES, (0, 3)])
def test_kernels_transpose_bytes(height, width):
    x = torch.randint(0, 256, (height, width), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    result = fp8_cast.transpose_triton(x.view(E4M3).to(DEVICE))
    assert result.dtype == E4M3 and result.is_contiguous() and torch.equal(result.view(torch.uint8).cpu(), x.t())


def test_a_carrier_has_no_values_and_views_do_not_carry_copies():
    copies = cast_tensor(filled(3, 4, dtype=torch.float32), E4M3, torch.ones(1), columns=False)
    carrier = fp8_cast.carry(copies, (3, 1, 4), torch.bfloat16)
    assert fp8_cast.carried(carrier) is copies and carrier.shape == (3, 1, 4) and carrier.isnan().all()
    assert carrier.untyped_storage().nbytes() == 2
    other = fp8_cast.carry(copies._replace(rows=None, columns=copies.rows), (3, 1, 4), torch.bfloat16)
    assert fp8_cast.carried(other) is not copies and fp8_cast.carried(carrier) is copies
    assert fp8_cast.carried(carrier.flatten(1)) is None and fp8_cast.carried(torch.ones(2)) is None


@triton_tests
@pytest.mark.parametrize("rows", [True, False])
def test_kernels_make_one_copy(monkeypatch, rows):
    x = kernels_of(exact(70, 131, E4M3), E4M3, monkeypatch)
    expected = reference.per_tensor(x.double().cpu() if rows else x.double().cpu().T, reference.E4M3)
    assert_same(on_cpu(cast_tensor(x, E4M3, amax_parts(x), rows=rows, columns=not rows)[not rows]), expected, E4M3)
    expected = reference.in_blocks(x.double().cpu() if rows else x.double().cpu().T, reference.E4M3)
    assert_same(on_cpu(cast_in_blocks(x, E4M3, rows=rows, columns=not rows)[not rows]), expected, E4M3)


@triton_tests
@pytest.mark.parametrize("values", [(), (torch.nan,), (torch.inf,), (torch.inf, torch.nan), (-1e30,), (1e-42,)])
def test_kernels_find_the_largest_magnitude(monkeypatch, values):
    monkeypatch.setattr(fp8_cast, "_AMAX_BLOCK", 1024)
    x = kernels_of(special(*values) if values else torch.zeros(5, 7), E4M3, monkeypatch).float()
    parts = amax_parts(x)
    expected = x.abs().max()
    assert len(parts) > 1 or not values
    assert torch.equal(parts.amax().nan_to_num(7.0), expected.nan_to_num(7.0))


@triton_tests
@pytest.mark.parametrize("height, width", SIZES)
@pytest.mark.parametrize("rows, columns", [(True, True), (True, False), (False, True)])
def test_casts_raise_the_recorded_magnitude(monkeypatch, height, width, rows, columns):
    """Not lower it: micro-batches record to the same elements."""
    x, one = kernels_of(exact(height, width, E4M3), E4M3, monkeypatch), torch.ones(1, device=DEVICE)
    noted = fp8_cast.new_amax(x.device)
    for size, largest in ((1, 1), (4, 4), (2, 4)):
        cast_tensor(size * x, E4M3, Scale(one, one), rows=rows, columns=columns, noted=noted)
        assert noted.view(torch.float32).max() == largest * x.abs().max()


@triton_tests
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_kernels_keep_infinities_and_nan_as_nan(monkeypatch, value):
    """With the scale 1, and in blocks only there."""
    x = exact(130, 140, E5M2)
    x[3, 5] = value
    x = kernels_of(x, E5M2, monkeypatch)
    for copy in cast_tensor(x, E5M2, amax_parts(x), columns=True):
        assert copy.scale.item() == 1 and copy.data.float().isnan().sum() == 1
    rows, columns = cast_in_blocks(x, E5M2, columns=True)
    assert rows.scale[3, 0] == 1 and columns.scale[5, 0] == 1
    assert rows.data.float()[3, 5].isnan() and columns.data.float()[5, 3].isnan()
    assert rows.data.float().isnan().sum() == columns.data.float().isnan().sum() == 1


@triton_tests
def test_kernels_take_no_rows(monkeypatch):
    x = kernels_of(torch.zeros(0, 7), E4M3, monkeypatch)
    assert [tuple(copy.data.shape) for copy in cast_tensor(x, E4M3, amax_parts(x), columns=True)] == [(0, 7), (7, 0)]
    assert [tuple(copy.data.shape) for copy in cast_in_blocks(x, E4M3, columns=True)] == [(0, 7), (7, 0)]


def large(height, width):
    """Normal numbers of many magnitudes."""
    return filled(height, width, dtype=torch.float32, device="cuda") * torch.logspace(-6, 6, width, device="cuda")


@pytest.mark.gpu
@both_formats
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["special", "small", "ties", "8192-4096", "4100-777"])
def test_compiled_kernels_have_the_bytes_and_scales_of_the_reference(name, input_dtype, dtype):
    """Few shapes: each is compiled for several seconds."""
    to = FORMATS[dtype]
    if name in ("special", "small"):
        shape = {"special": (140, 133), "small": (33, 129)}[name]
        matrices = [x.cuda() for x in MATRICES.values() if x.shape == shape]
    else:
        matrices = [with_ties(dtype).cuda() if name == "ties" else large(*map(int, name.split("-")))]
    if name == "8192-4096":
        bad = matrices[0].clone()
        bad[7, 9], bad[8, 9], bad[5000, 3000] = torch.nan, torch.inf, 3e4
        matrices += [bad, large(8192, 4096) * 1e-40]
    assert matrices
    for x in matrices:
        check_per_tensor(x.to(input_dtype), dtype, to)
        check_blocks(x.to(input_dtype), dtype, to)


@triton_tests
@pytest.mark.parametrize("count", [1, 63, 64, 8192 + 65])
def test_flat_values_are_cast_as_a_matrix(count):
    values = (torch.arange(count, device=DEVICE) % 15 - 7).bfloat16()
    factor = torch.tensor([2.0], device=DEVICE)
    flat = fp8_cast.cast_flat(values, E4M3, Scale(factor, 1 / factor))
    assert flat.dtype == E4M3 and torch.equal(flat.bfloat16(), 2 * values)


@triton_tests
def test_parts_of_an_amax_do_not_depend_on_the_shape(monkeypatch):
    """Ranks with other numbers of rows exchange them."""
    matrices = [torch.ones(*shape, dtype=torch.bfloat16) for shape in [(0, 8), (3, 5), (30, 2048)]]
    parts = [fp8_cast.amax_triton(kernels_of(x, E4M3, monkeypatch)) for x in matrices]
    assert len({len(part) for part in parts}) == 1 and [part.max() for part in parts] == [0, 1, 1]


# ---- noted magnitudes


def test_a_noted_magnitude_ends_with_a_change_and_is_not_inherited():
    x = filled(4, 8, dtype=torch.float32)
    noted = fp8_cast.new_amax(x.device)
    noted[3] = torch.tensor(77.0).view(torch.int32)
    fp8_cast.note_amax(x, noted)
    assert amax_parts(x).max() == 77
    assert amax_parts(x.view(8, 4)).max() == amax_parts(x.clone()).max() == x.abs().max()
    x.mul_(2)
    assert amax_parts(x).max() == x.abs().max() != 77


def test_inference_tensors_take_no_note():
    """They have no version that in-place changes would raise."""
    with torch.inference_mode():
        x = filled(4, 8, dtype=torch.float32)
        fp8_cast.note_amax(x, fp8_cast.new_amax(x.device))
        assert amax_parts(x).max() == x.abs().max()


@triton_tests
@pytest.mark.parametrize("shape", [(7, 33), (40, 160)])
@pytest.mark.parametrize("centred", [True, False])
def test_norms_note_the_magnitudes_of_output_and_gradient(shape, centred):
    x, branch = (filled(*shape, dtype=torch.float32, seed=seed).to(DEVICE).requires_grad_() for seed in (0, 1))
    weight = filled(shape[1], dtype=torch.float32, seed=2).to(DEVICE).requires_grad_()
    _, out = normalize_triton(x, branch, weight, None, NormTraits(1e-5, centred, 0.0, notes_amax=True))
    assert_noted(out)
    observed = []
    x.register_hook(observed.append)
    out.backward(filled(*shape, dtype=torch.float32, seed=3).to(DEVICE))
    (grad,) = observed
    assert_noted(grad)


def assert_noted(x):
    assert x._amax_note.parts.max() == x.abs().max() == amax_parts(x).max()


@triton_tests
@pytest.mark.parametrize("width", [5, 2049])
def test_gated_activations_note_the_magnitudes_of_output_and_gradient(width):
    packed = filled(6, 2 * width, dtype=torch.bfloat16).to(DEVICE).requires_grad_()
    observed = []
    packed.register_hook(observed.append)
    out = gated_triton(packed, GateTraits(1.0, notes_amax=True))
    assert_noted(out)
    out.backward(filled(6, width, dtype=torch.bfloat16, seed=1).to(DEVICE))
    assert_noted(observed[0])
