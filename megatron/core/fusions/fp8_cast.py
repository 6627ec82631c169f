"""Casts to 8-bit floating point: the fp8 copy of a matrix and the fp8 copy of its transpose, in one pass.

    per tensor   scale = largest / amax of the tensor, or a given scale               q = round(clip(x scale))
    per block    the same for blocks of 1 x 128 (activations, gradients) or 128 x 128 (weights), with scales that are
                 powers of two

``largest`` is the largest finite fp8 value: 448 for e4m3, 57344 for e5m2. The stored ``scale`` of a :class:`Quantized`
is the inverse, x = q * scale. Hopper's fp8 GEMMs read only matrices whose summed dim is contiguous, so that the weight
gradient needs transposed copies. Products x * scale are rounded to fp32, then to fp8 (to nearest, ties to even). Finite
values beyond the range are clipped; infinities and NaN become NaN, so that checks of losses and gradients find them;
-0 becomes 0. With amax 0, infinite or NaN the scale is 1.

A maximum does not depend on the order of its arguments: scales, and therefore the bytes, are equal on every layout if
the maximum is taken over all ranks that hold parts of the matrix.

Legend: t rows (tokens, or output features of a weight), i columns (input features)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

BLOCK = 128
"""Side of a block."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""Largest finite number of each format."""
FLOAT_MAX = torch.finfo(torch.float32).max
NOTED = 64
"""Elements of :func:`new_amax`: few enough to read, many enough that atomics do not wait for each other."""

_AMAX_BLOCK, _AMAX_PROGRAMS = 4096, 1024
"""Equal on all GPUs and for all sizes, so that ranks with other sizes can exchange the results; 8 per SM of an H200."""
_TILE_T, _TILE_I, _NUM_WARPS = 128, 64, 4
"""Tile of a program of the per-tensor cast, the best of 13 on an H200 (3.3 TB/s; a copy reaches 4.3)."""
_PART, _BLOCK_WARPS = 64, 4
"""Rows, then columns, of a block that a program casts at a time."""


class Quantized(NamedTuple):
    """Matrix in fp8; its values are ``data * scale``."""

    data: Tensor
    """fp8 [m, k], contiguous."""
    scale: Tensor
    """fp32: [1]; with blocks of 1 x 128 [m, ceil(k / 128)] with the first dim contiguous; with blocks of 128 x 128
    [ceil(m / 128), ceil(k / 128)]."""


class Copies(NamedTuple):
    """Copies of a matrix [t, i]."""

    rows: Quantized | None
    """[t, i]."""
    columns: Quantized | None
    """The transpose, [i, t]."""


class Scale(NamedTuple):
    """Scale of a per-tensor cast that is known before (delayed scaling)."""

    factor: Tensor
    """fp32 [1]: multiplies the values."""
    inverse: Tensor
    """fp32 [1]: 1 / factor."""


class CastTarget(NamedTuple):
    """Cast that the producer of a matrix does in place of its reader."""

    dtype: torch.dtype
    scale: Scale
    noted: Tensor | None
    """int32 [NOTED], see :func:`new_amax`: the producer raises it to the largest magnitude; None: not recorded."""


def cast_factor(amax: Tensor, largest: float) -> Tensor:
    """Return the fp32 factor(s) largest / amax of the largest magnitudes ``amax`` fp32; 1 where it is 0, infinite or
    NaN, and the largest fp32 number where the quotient overflows."""
    usable = amax.isfinite() & (amax > 0)
    # not largest / amax, for which torch multiplies by the rounded reciprocal
    quotient = torch.full_like(amax, largest) / amax
    return torch.where(usable, quotient.clamp(max=FLOAT_MAX), 1.0)


def block_factors(amax: Tensor, largest: float) -> Tensor:
    """Return the factors of blocks: the largest power of two in each :func:`cast_factor` of ``amax``."""
    return (cast_factor(amax, largest).view(torch.int32) & 0x7F800000).view(torch.float32)


# ---- torch


def to_fp8(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 ``x`` times ``factor`` in fp8 ``dtype``, clipped to its range; NaN for infinities and NaN."""
    clipped = (x * factor).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (clipped + (x - x)).to(dtype)  # x - x is 0, or NaN for an infinity


def amax_plain(x: Tensor) -> Tensor:
    """Return the largest magnitude of ``x``, fp32 [1]; NaN if ``x`` has NaN, 0 if it is empty."""
    return x.detach().float().abs().amax().view(1) if x.numel() else x.new_zeros(1, dtype=torch.float32)


def _raise_plain(noted: Tensor, x: Tensor) -> None:
    torch.maximum(noted, amax_plain(x).view(torch.int32), out=noted)


def _cast_plain(x: Tensor, dtype: torch.dtype, scale: Tensor | Scale) -> tuple[Tensor, Tensor]:
    """Return ``x`` in fp8 and the inverse scale [1]."""
    if isinstance(scale, Scale):
        factor, inverse = scale
    else:
        factor = cast_factor(scale.amax().view(1), LARGEST[dtype])
        inverse = 1.0 / factor
    return to_fp8(x.float(), factor, dtype), inverse


def cast_tensor_plain(
    x: Tensor, dtype: torch.dtype, scale: Tensor | Scale, rows: bool, columns: bool, noted: Tensor | None = None
) -> Copies:
    """See :func:`cast_tensor`."""
    data, inverse = _cast_plain(x, dtype, scale)
    if noted is not None:
        _raise_plain(noted, x)
    transposed = data.view(torch.uint8).t().contiguous().view(dtype) if columns else None
    return Copies(
        Quantized(data, inverse) if rows else None, None if transposed is None else Quantized(transposed, inverse)
    )


def cast_rows_in_blocks(x: Tensor, dtype: torch.dtype) -> Quantized:
    """Return ``x`` [t, i] in fp8 with a scale per 1 x 128 block of each row; the last block may be shorter."""
    height, width = x.shape
    blocks = F.pad(x.float(), (0, -width % BLOCK)).view(height, -(-width // BLOCK), BLOCK)
    factor = block_factors(blocks.abs().amax(-1), LARGEST[dtype])
    data = to_fp8(blocks, factor.unsqueeze(-1), dtype).flatten(1)[:, :width].contiguous()
    return Quantized(data, (1.0 / factor).t().contiguous().t())


def cast_square_blocks(
    weight: Tensor, dtype: torch.dtype, factors: Callable[[Tensor, float], Tensor] = block_factors
) -> Quantized:
    """Return ``weight`` [o, i] in fp8 with a scale per 128 x 128 block; the last blocks may be smaller. ``factors``:
    function of (amax of every block, largest fp8 value)."""
    height, width = weight.shape
    padded = F.pad(weight.float(), (0, -width % BLOCK, 0, -height % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    factor = factors(blocks.abs().amax((1, 3)), LARGEST[dtype])
    data = to_fp8(blocks, factor[:, None, :, None], dtype).view(padded.shape)[:height, :width].contiguous()
    return Quantized(data, 1.0 / factor)


# ---- Triton

if triton is not None:

    @triton.jit
    def magnitude_bits(value):
        """Return the bits of |value|, int32: they order non-negative numbers, with NaN above infinity."""
        return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    @triton.jit
    def raise_amax(amax_bits, value, COUNT: tl.constexpr):
        """Raise one of COUNT ``amax_bits`` to the largest magnitude of the 2-d ``value``."""
        most = tl.max(tl.max(magnitude_bits(value), axis=1), axis=0)
        tl.atomic_max(amax_bits + tl.program_id(0) % COUNT, most)

    @triton.jit
    def _factor(bits, largest):
        usable = (bits > 0) & (bits < 0x7F800000)
        amax = tl.where(usable, bits, 0x3F800000).to(tl.float32, bitcast=True)
        factor = tl.minimum(tl.div_rn(tl.zeros_like(amax) + largest, amax), 3.4028234663852886e38)
        return tl.where(usable, factor, 1.0)

    @triton.jit
    def _floor_to_power_of_two(factor):
        return (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)

    @triton.jit
    def fp8_value(value, factor, dtype: tl.constexpr):
        """Round ``value * factor`` to ``dtype``; NaN for infinities. The hardware's conversion clips."""
        return (value * factor + (value - value)).to(dtype)

    @triton.jit
    def _amax(x, bits, size, STEPS: tl.constexpr, BLOCK: tl.constexpr):
        """Write the bits of the largest magnitude to this program's element of ``bits``."""
        first = tl.program_id(0).to(tl.int64) * STEPS * BLOCK
        most = tl.zeros((BLOCK,), dtype=tl.int32)
        for step in range(STEPS):
            at = first + step * BLOCK + tl.arange(0, BLOCK)
            most = tl.maximum(most, magnitude_bits(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)))
        tl.store(bits + tl.program_id(0), tl.max(most, axis=0))

    @triton.jit
    def _cast_tensor(
        x, amax_bits, factors, data, transposed, inverse, height, pitch, width, tiles_i, count, largest,
        COUNT: tl.constexpr, SCALED: tl.constexpr, NOTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        TILE_T: tl.constexpr, TILE_I: tl.constexpr,
    ):  # fmt: skip
        """Cast one tile of ``x`` [height, width] to ``data`` (ROWS) and to ``transposed`` (COLUMNS), whose rows have
        ``pitch`` elements, with zeros at the end. SCALED reads the factor, and NOTED > 0 raises one of NOTED
        ``amax_bits`` to the largest magnitude of the tile. Else the factor follows from the largest of ``count``
        amaxes, and the first program writes its ``inverse``."""
        program = tl.program_id(0)
        row = (program // tiles_i).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
        column = (program % tiles_i) * TILE_I + tl.arange(0, TILE_I)
        inside = (row < height)[:, None] & (column < width)[None, :]
        value = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        part = tl.arange(0, COUNT)
        if SCALED:  # as a sum of one term: the compiler then schedules the rest as in the other case, a fifth faster
            factor = tl.sum(tl.load(factors + part, mask=part < 1, other=0.0), axis=0)
        else:
            factor = _factor(tl.max(tl.load(amax_bits + part, mask=part < count, other=0), axis=0), largest)
            if program == 0:
                tl.store(inverse, tl.div_rn(factor * 0.0 + 1.0, factor))
        quantized = fp8_value(value, factor, data.dtype.element_ty)
        if ROWS:
            tl.store(data + row[:, None] * width + column[None, :], quantized, mask=inside)
        if COLUMNS:
            at = transposed + column.to(tl.int64)[:, None] * pitch + row[None, :]
            tl.store(at, tl.trans(quantized), mask=(column < width)[:, None] & (row < pitch)[None, :])
        if NOTED:
            raise_amax(amax_bits, value, NOTED)

    @triton.jit
    def _transpose(x, out, height, width, tiles_i, TILE_T: tl.constexpr, TILE_I: tl.constexpr):
        row = (tl.program_id(0) // tiles_i).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
        column = (tl.program_id(0) % tiles_i).to(tl.int64) * TILE_I + tl.arange(0, TILE_I)
        inside = (row < height)[:, None] & (column < width)[None, :]
        value = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0)
        tl.store(out + column[:, None] * height + row[None, :], tl.trans(value), mask=tl.trans(inside))

    @triton.jit
    def _block_factor(most, largest, SQUARE: tl.constexpr):
        """SQUARE: one factor for all of ``most``."""
        if SQUARE:
            most = tl.zeros_like(most) + tl.max(most, axis=0)
        return _floor_to_power_of_two(_factor(most, largest))

    @triton.jit
    def _cast_blocks(
        x, data, scales, transposed, transposed_scales, height, width, tiles_t, tiles_i, largest,
        SQUARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr, PART: tl.constexpr,
    ):  # fmt: skip
        """Cast one SIDE x SIDE tile of ``x`` to ``data`` with a scale per row of the tile (ROWS) and to ``transposed``
        with a scale per column (COLUMNS), PART rows, then PART columns, at a time; SQUARE: one scale per tile (PART is
        SIDE). Stored scales: rows [tiles_i, height], columns [tiles_t, width], tiles [tiles_t, tiles_i] and [tiles_i,
        tiles_t]."""
        tile_t, tile_i = (tl.program_id(0) // tiles_i).to(tl.int64), tl.program_id(0) % tiles_i
        for part in tl.static_range(SIDE // PART if ROWS else 0):
            row = tile_t * SIDE + part * PART + tl.arange(0, PART)
            column = tile_i * SIDE + tl.arange(0, SIDE)
            at = row[:, None] * width + column[None, :]
            inside = (row < height)[:, None] & (column < width)[None, :]
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            factor = _block_factor(tl.max(magnitude_bits(value), axis=1), largest, SQUARE)
            tl.store(data + at, fp8_value(value, factor[:, None], data.dtype.element_ty), mask=inside)
            inverse = tl.div_rn(tl.zeros_like(factor) + 1.0, factor)
            if SQUARE:
                tl.store(scales + tile_t * tiles_i + tile_i, tl.max(inverse, axis=0))
            else:
                tl.store(scales + tile_i.to(tl.int64) * height + row, inverse, mask=row < height)
        for part in tl.static_range(SIDE // PART if COLUMNS else 0):
            row = tile_t * SIDE + tl.arange(0, SIDE)
            column = tile_i * SIDE + part * PART + tl.arange(0, PART)
            inside = (row < height)[:, None] & (column < width)[None, :]
            value = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
            factor = _block_factor(tl.max(magnitude_bits(value), axis=0), largest, SQUARE)
            quantized = fp8_value(value, factor[None, :], transposed.dtype.element_ty)
            at = transposed + column.to(tl.int64)[:, None] * height + row[None, :]
            tl.store(at, tl.trans(quantized), mask=(column < width)[:, None] & (row < height)[None, :])
            inverse = tl.div_rn(tl.zeros_like(factor) + 1.0, factor)
            if SQUARE:
                tl.store(transposed_scales + tile_i * tiles_t + tile_t, tl.max(inverse, axis=0))
            else:
                tl.store(transposed_scales + tile_t * width + column, inverse, mask=column < width)


def amax_triton(x: Tensor) -> Tensor:
    """Return largest magnitudes of parts of ``x``, fp32 [1024]; compared as integers their bits order NaN above all."""
    x = x.contiguous()
    steps = triton.cdiv(x.numel(), _AMAX_BLOCK * _AMAX_PROGRAMS)
    parts = torch.empty(_AMAX_PROGRAMS, dtype=torch.float32, device=x.device)
    _amax[(_AMAX_PROGRAMS,)](x, parts.view(torch.int32), x.numel(), STEPS=steps, BLOCK=_AMAX_BLOCK, num_warps=8)
    return parts


def cast_tensor_triton(
    x: Tensor, dtype: torch.dtype, scale: Tensor | Scale, rows: bool, columns: bool, noted: Tensor | None = None
) -> Copies:
    """See :func:`cast_tensor`; one launch."""
    x = x.contiguous()
    height, width = x.shape
    if not x.numel():
        return cast_tensor_plain(x, dtype, scale, rows, columns)
    data = torch.empty((height, width), dtype=dtype, device=x.device) if rows else None
    transposed = torch.empty((width, height), dtype=dtype, device=x.device) if columns else None
    inverse = _launch_cast(x, scale, data, transposed, noted)
    return Copies(
        None if data is None else Quantized(data, inverse),
        None if transposed is None else Quantized(transposed, inverse),
    )


def transpose_triton(x: Tensor) -> Tensor:
    """Return the transpose of fp8 ``x`` [t, i], contiguous; one launch."""
    x = x.contiguous()
    height, width = x.shape
    out = torch.empty((width, height), dtype=x.dtype, device=x.device)
    tiles_i = triton.cdiv(width, _TILE_I)
    if x.numel():
        _transpose[(triton.cdiv(height, _TILE_T) * tiles_i,)](
            x.view(torch.uint8), out.view(torch.uint8), height, width, tiles_i, TILE_T=_TILE_T, TILE_I=_TILE_I,
            num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


def _launch_cast(
    x: Tensor, scale: Tensor | Scale, data: Tensor | None, transposed: Tensor | None, noted: Tensor | None
) -> Tensor:
    """Write ``data`` [t, i] and ``transposed`` [i, t or more, at most the next multiple of 128], zeros at the end of
    its rows. Return the inverse scale [1], new unless ``scale`` is a :class:`Scale`; a tensor holds amaxes, fp32 [n].
    ``x`` is contiguous."""
    height, width = x.shape
    some = data if data is not None else transposed
    assert some is not None, "at least one copy"
    has_scale = isinstance(scale, Scale)
    inverse = scale.inverse if isinstance(scale, Scale) else torch.empty(1, dtype=torch.float32, device=x.device)
    amax = scale.factor if isinstance(scale, Scale) else scale
    bits = amax.view(torch.int32) if noted is None else noted
    pitch = height if transposed is None else transposed.shape[1]
    tiles_i = triton.cdiv(width, _TILE_I)
    _cast_tensor[(triton.cdiv(height, _TILE_T) * tiles_i,)](
        x, bits, amax, some if data is None else data, some if transposed is None else transposed,
        inverse, height, pitch, width, tiles_i, amax.numel(), LARGEST[some.dtype],
        COUNT=triton.next_power_of_2(amax.numel()), SCALED=has_scale, NOTED=0 if noted is None else len(noted),
        ROWS=data is not None, COLUMNS=transposed is not None, TILE_T=_TILE_T, TILE_I=_TILE_I, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return inverse


def cast_blocks_triton(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, *, square: bool) -> Copies:
    """See :func:`cast_in_blocks`; one launch."""
    x = x.contiguous()
    height, width = x.shape
    tiles_t, tiles_i = triton.cdiv(height, BLOCK), triton.cdiv(width, BLOCK)
    data = torch.empty((height, width) if rows else (0, width), dtype=dtype, device=x.device)
    transposed = torch.empty((width, height) if columns else (0, height), dtype=dtype, device=x.device)
    shape, shape_t = ((tiles_t, tiles_i), (tiles_i, tiles_t)) if square else ((tiles_i, height), (tiles_t, width))
    scales, scales_t = (torch.empty(size, dtype=torch.float32, device=x.device) for size in (shape, shape_t))
    if x.numel():
        _cast_blocks[(tiles_t * tiles_i,)](
            x, data, scales, transposed, scales_t, height, width, tiles_t, tiles_i, LARGEST[dtype], SQUARE=square,
            ROWS=rows, COLUMNS=columns, SIDE=BLOCK, PART=BLOCK if square else _PART,
            num_warps=_BLOCK_WARPS,
        )  # fmt: skip
    if not square:
        scales, scales_t = scales.t(), scales_t.t()
    return Copies(Quantized(data, scales) if rows else None, Quantized(transposed, scales_t) if columns else None)


# ---- dispatch


def _on_gpu(x: Tensor) -> bool:
    return triton is not None and x.is_cuda and x.dtype != torch.float64


def _casts_on_gpu(x: Tensor) -> bool:
    """Triton 3.6 stores wrong copies of fp32 tiles."""
    return _on_gpu(x) and x.element_size() == 2


def amax_parts(x: Tensor) -> Tensor:
    """Return fp32 [n] whose maximum is the largest magnitude of ``x`` (NaN counts). n is fixed. No host sync."""
    noted = noted_amax(x)
    if noted is not None:
        return noted
    return amax_triton(x) if _on_gpu(x) else amax_plain(x)


def noted_amax(x: Tensor) -> Tensor | None:
    """Return the parts that :func:`note_amax` attached to ``x``, which must not be changed; None without any."""
    note = getattr(x, "_amax_note", None)
    return note.parts if note is not None and note.version == x._version else None


class _AmaxNote(NamedTuple):
    parts: Tensor
    version: int
    """Version of the tensor, which in-place operations change."""


def note_amax(x: Tensor, bits: Tensor) -> None:
    """Note the amaxes of ``x`` in ``bits`` (:func:`new_amax`), raised by the kernel that wrote ``x``, for
    :func:`amax_parts`. In-place changes of ``x`` make the note invalid, and views do not have it. Inference tensors,
    which have no version, take no note."""
    if x.is_inference():
        return
    x._amax_note = _AmaxNote(bits.view(torch.float32), x._version)  # type: ignore[attr-defined]


def new_amax(device: torch.device) -> Tensor:
    """Return zeros, int32 [NOTED], to which kernels raise bits of magnitudes, each program one element."""
    return torch.zeros(NOTED, dtype=torch.int32, device=device)


def cast_flat(x: Tensor, dtype: torch.dtype, scale: Scale) -> Tensor:
    """Return the flat ``x`` [n] in fp8 ``dtype``, [n]. As a matrix of one row, most threads of each tile would idle."""
    aligned = x.numel() - x.numel() % _TILE_I
    parts = [part for part in (x[:aligned].view(-1, _TILE_I), x[aligned:].view(1, -1)) if part.numel()]
    copies = [cast_tensor(part, dtype, scale, columns=False).rows for part in parts]
    flat = [copy.data.view(-1) for copy in copies if copy is not None]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def cast_tensor(
    x: Tensor, dtype: torch.dtype, scale: Tensor | Scale, *, rows: bool = True, columns: bool,
    noted: Tensor | None = None,
) -> Copies:  # fmt: skip
    """Cast ``x`` [..., i], as a matrix [t, i], to fp8 ``dtype`` with one scale. Return the wanted copies, with inverse
    scales [1].

    Args:
        scale: a :class:`Scale`, or amaxes fp32 [n], whose maximum gives the scale.
        rows, columns: whether to return the copy and the transposed copy; at least one.
        noted: int32 [NOTED] (:func:`new_amax`), only with a :class:`Scale`: the same pass over memory raises it to the
            largest magnitude of ``x``."""
    cast = cast_tensor_triton if _casts_on_gpu(x) else cast_tensor_plain
    return cast(x.detach().reshape(-1, x.shape[-1]), dtype, scale, rows, columns, noted)


def transpose_fp8(x: Tensor) -> Tensor:
    """Return the transpose of fp8 ``x`` [t, i], contiguous."""
    if triton is not None and x.is_cuda:
        return transpose_triton(x)
    return x.view(torch.uint8).t().contiguous().view(x.dtype)


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # later carriers may need gradients
        return torch.full((), torch.nan, dtype=dtype, device=device)


def carry(copies: Copies, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor that carries the fp8 ``copies`` of a matrix in place of its values, for :func:`carried`. All its
    elements are NaN in the memory of one, so that a reader of values is noticed. Views do not carry the copies."""
    some = copies.rows or copies.columns
    assert some is not None, "at least one copy"
    x = _nan(dtype, some.data.device).expand(tuple(shape))
    x._fp8_copies = copies  # type: ignore[attr-defined]
    return x


def carried(x: Tensor) -> Copies | None:
    """Return the copies that :func:`carry` attached to ``x``; None for other tensors."""
    return getattr(x, "_fp8_copies", None)


def cast_in_blocks(x: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool, square: bool = False) -> Copies:
    """Cast ``x`` [..., i], as a matrix [t, i], to fp8 ``dtype`` with a scale per 1 x 128 elements of each row in one
    copy, and per 128 elements of each column in the transposed copy; both read ``x``. ``square``: one scale per 128 x
    128 elements in both. Factors are powers of two."""
    x = x.detach().reshape(-1, x.shape[-1])
    if _casts_on_gpu(x):
        return cast_blocks_triton(x, dtype, rows, columns, square=square)
    cast = cast_square_blocks if square else cast_rows_in_blocks
    return Copies(cast(x, dtype) if rows else None, cast(x.t().contiguous(), dtype) if columns else None)


def padded_rows(ranges: Sequence[slice]) -> list[slice]:
    """Return the ranges of groups of rows if each group is padded to a multiple of 128."""
    ends = list(accumulate(-(-(rows.stop - rows.start) // BLOCK) * BLOCK for rows in ranges))
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


def columns_of_groups(columns: Tensor, ranges: Sequence[slice]) -> list[Tensor]:
    """View the transposed copies of :func:`cast_groups` as one matrix [i, rows of the group, padded] per group."""
    width = columns.shape[1]
    return [columns[rows].view(width, rows.stop - rows.start) for rows in padded_rows(ranges)]


def cast_groups(
    x: Tensor, dtype: torch.dtype, scale: Tensor | Scale, ranges: Sequence[slice], *, rows: bool, columns: bool,
    noted: Tensor | None = None,
) -> Copies:  # fmt: skip
    """Cast the rows of ``x`` [t, i], which consecutive groups share, to fp8 ``dtype`` with one scale, and transpose
    each group separately. Return the wanted copies: ``rows`` [t, i], undefined outside of the groups, and ``columns``
    [padded rows, i], which holds the transpose of each group in the memory of its rows (:func:`columns_of_groups`).
    Groups are padded to multiples of 128 rows by zeros, so that products over the rows of a group read aligned
    matrices. ``scale`` and ``noted`` are as in :func:`cast_tensor`."""
    x, width = x.detach().contiguous(), x.shape[1]
    data = torch.empty(x.shape, dtype=dtype, device=x.device) if rows else None
    flat: Tensor | None = None
    parts: Sequence[Tensor | None] = [None] * len(ranges)
    if columns:
        flat = torch.empty(padded_rows(ranges)[-1].stop, width, dtype=dtype, device=x.device)
        parts = columns_of_groups(flat, ranges)
    inverse = scale.inverse if isinstance(scale, Scale) else torch.ones(1, device=x.device)
    for group, part in zip(ranges, parts):
        if group.stop == group.start:
            continue
        copy = None if data is None else data[group]
        if _casts_on_gpu(x):
            inverse = _launch_cast(x[group], scale, copy, part, noted)
            continue
        quantized, inverse = _cast_plain(x[group], dtype, scale)
        if noted is not None:
            _raise_plain(noted, x[group])
        if copy is not None:
            copy.copy_(quantized)
        if part is not None:
            part.view(torch.uint8).copy_(F.pad(quantized.view(torch.uint8).t(), (0, part.shape[1] - len(quantized))))
    return Copies(*(None if values is None else Quantized(values, inverse) for values in (data, flat)))
