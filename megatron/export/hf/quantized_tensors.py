"""Quantized weights of Hugging Face folders: read as bf16, one tensor at a time; written as fp8 blocks.

    fp8    <name> e4m3 [.., r, c], <name>_scale_inv [.., ceil(r / 128), ceil(c / 128)]     value * scale of its block
    mxfp4  <name>_blocks uint8 [e, r, g, 16], <name>_scales uint8 [e, r, g]; HF weight [e, 32 g, r]
           two e2m1 values per byte (the lower bits first), 32 values per scale            value * 2^(scale - 127)

Legend: e experts, r rows, c columns, g groups of 32 columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.errors import UserError, counted, listed
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.hf.conversion import Placement
from megatron.export.hf.quantization import BLOCK_SIZE, Format

E4M3 = torch.float8_e4m3fn
SUFFIXES: dict[Format, tuple[str, str]] = {"fp8": ("", "_scale_inv"), "mxfp4": ("_blocks", "_scales")}
"""Endings of the names of values and scales."""
SCALE_DTYPES = {"fp8": (torch.float32, torch.bfloat16), "mxfp4": (torch.uint8,)}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of MXFP4."""
NAN_SCALE = 255
LINEAR = re.compile(r"(decoder|mtp)\.layers\.\d+\..*\.linear_\w+\.weight")
"""Local names of the matrices that fp8 folders have in fp8: attention, feed-forward networks and experts."""


def dequantized(stored: Mapping[str, LazyTensor], form: Format, folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a folder with lazy bf16 tensors in place of pairs of values and scales.

    Products with scales are computed in fp32 and rounded once. Raises CheckpointDamagedError: scales or values are
    missing or have a wrong shape or dtype; when a tensor is read, also for scales that are not positive and finite."""
    value_end, scale_end = SUFFIXES[form]
    scales = {name.removesuffix(scale_end): tensor for name, tensor in stored.items() if name.endswith(scale_end)}
    values = {
        name.removesuffix(value_end): tensor
        for name, tensor in stored.items()
        if (tensor.dtype == E4M3 if form == "fp8" else name.endswith(value_end))
    }
    problems = [f"{name}{scale_end} is missing" for name in values if name not in scales]
    partner = "fp8 tensor" if form == "fp8" else "tensor"
    problems += [f"{name}{scale_end}: there is no {partner} {name}{value_end}" for name in scales if name not in values]
    for name in values.keys() & scales.keys():
        problems += _mismatches(name, values[name], scales[name], form)
    if problems:
        raise CheckpointDamagedError(
            f"{folder}: quantized weights and scales do not fit ({counted(len(problems), 'problem')}): "
            f"{listed(sorted(problems), '; ')}"
        )
    result = {}
    for name, tensor in stored.items():
        stem = name.removesuffix(value_end)
        if stem in values and name == stem + value_end:
            where = f"{folder}: {stem}{scale_end}"
            lazy = _fp8_tensor if form == "fp8" else _mxfp4_tensor
            result[stem] = lazy(values[stem], scales[stem], where)
        elif not name.endswith(scale_end):
            result[name] = tensor
    return result


def _mismatches(name: str, values: LazyTensor, scales: LazyTensor, form: Format) -> list[str]:
    """Return the problems of the shapes and dtypes of a pair."""
    value_end, scale_end = SUFFIXES[form]
    shape, dtypes = values.shape, SCALE_DTYPES[form]
    if form == "mxfp4" and (len(shape) != 4 or shape[-1] != 16 or values.dtype != torch.uint8):
        return [f"{name}{value_end} is {values.dtype} {[*shape]}, expected uint8 [experts, rows, columns / 32, 16]"]
    if form == "fp8" and len(shape) < 2:
        return [f"{name} has shape {[*shape]}, expected a matrix"]
    blocks = [-(-size // side) for size, side in zip(shape[-2:], BLOCK_SIZE)]
    expected = (*shape[:-2], *blocks) if form == "fp8" else shape[:-1]
    problems = [] if scales.shape == expected else [f"has shape {[*scales.shape]}, expected {[*expected]}"]
    problems += [] if scales.dtype in dtypes else [f"is {scales.dtype}, expected {' or '.join(map(str, dtypes))}"]
    return [f"{name}{scale_end} {problem}" for problem in problems]


def _check_scales(invalid: Tensor, where: str) -> None:
    if count := int(invalid.sum()):
        raise CheckpointDamagedError(f"{where}: {count} of {invalid.numel()} scales are not positive and finite")


def _fp8_tensor(values: LazyTensor, scales: LazyTensor, where: str) -> LazyTensor:
    def widen(part: Tensor, scale: Tensor) -> Tensor:
        _check_scales(~(scale.isfinite() & (scale > 0)), where)
        return fp8_to_bf16(part, scale)

    def read_rows(start: int, stop: int) -> Tensor:
        return widen(values.rows(start, stop), scales.rows(start, stop))

    # a row of a matrix has only parts of blocks; a row of stacked experts is a matrix
    rows = read_rows if len(values.shape) > 2 else None
    return LazyTensor(values.shape, torch.bfloat16, lambda: widen(values.read(), scales.read()), rows)


def fp8_to_bf16(values: Tensor, scales: Tensor) -> Tensor:
    """Return e4m3 ``values`` [.., r, c] times ``scales`` [.., ceil(r / 128), ceil(c / 128)] in bf16."""
    height, width = BLOCK_SIZE
    wide = scales.float().repeat_interleave(width, -1)[..., : values.shape[-1]]
    result = torch.empty(values.shape, dtype=torch.bfloat16)
    for block in range(scales.shape[-2]):  # fp32 copies of 128 rows: of a full matrix they would take 4 times its size
        rows = slice(block * height, (block + 1) * height)
        result[..., rows, :] = values[..., rows, :].float() * wide[..., block : block + 1, :]
    return result


def _mxfp4_tensor(values: LazyTensor, scales: LazyTensor, where: str) -> LazyTensor:
    experts, rows, groups, _ = values.shape

    def read_rows(start: int, stop: int) -> Tensor:
        scale = scales.rows(start, stop)
        _check_scales(scale == NAN_SCALE, where)
        return mxfp4_to_bf16(values.rows(start, stop), scale)

    return LazyTensor((experts, groups * 32, rows), torch.bfloat16, lambda: read_rows(0, experts), read_rows)


def mxfp4_to_bf16(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return MXFP4 ``blocks`` [e, r, g, 16] with ``scales`` [e, r, g] as bf16 [e, 32 g, r]."""
    experts, rows, groups, _ = blocks.shape
    result, table = torch.empty(experts, groups * 32, rows, dtype=torch.bfloat16), torch.tensor(E2M1)
    for target, block, scale in zip(result, blocks, scales):  # one expert at a time, for the memory of fp32 copies
        values = table[torch.stack((block & 15, block >> 4), -1).int()].flatten(-2)
        target.copy_(torch.ldexp(values, scale.int().unsqueeze(-1) - 127).flatten(-2).T)
    return result


def quantized(tensors: Mapping[str, LazyTensor], plan: Iterable[Placement]) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return HF ``tensors`` with the linear layers of ``plan`` as e4m3 values and fp32 scales amax / 448 of 128 x 128
    blocks, and the names of the modules whose matrices keep their dtype (embedding, output layer, routers …). Raises
    UserError for linear layers that are not stored as a matrix [out, in] each."""
    parts = {part.name: part for placement in plan if LINEAR.fullmatch(placement.name) for part in placement.parts}
    for name, part in parts.items():
        if len(part.shape) != 2 or part.layout.transposed or not name.endswith(".weight"):
            reason = f"{name} {[*part.shape]} is not the matrix [out, in] of a linear layer; write the folder in bf16"
            raise UserError(f"--quantize fp8-blocks: {reason}")
    result = dict[str, LazyTensor]()
    for name, tensor in tensors.items():
        result |= _fp8_blocks(name, tensor) if name in parts else {name: tensor}
    matrices = (name for name, tensor in tensors.items() if len(tensor.shape) > 1 and name not in parts)
    return result, [name.removesuffix(".weight") for name in matrices]


def _fp8_blocks(name: str, tensor: LazyTensor) -> dict[str, LazyTensor]:
    """Return lazy values and scales; each of both reads ``tensor``, because files have them in separate ranges."""
    from megatron.core.fusions.fp8_cast import cast_factor, cast_square_blocks  # imports triton

    def values() -> Tensor:
        weight = tensor.read()
        data = cast_square_blocks(weight, E4M3, cast_factor).data
        return torch.copysign(data.float(), weight).to(E4M3)  # the cast drops the sign of -0, which fp8 files have

    def scales() -> Tensor:
        return cast_square_blocks(tensor.read(), E4M3, cast_factor).scale

    shape = tuple(-(-size // side) for size, side in zip(tensor.shape, BLOCK_SIZE))
    return {
        name: LazyTensor(tensor.shape, E4M3, values),
        f"{name}{SUFFIXES['fp8'][1]}": LazyTensor(shape, torch.float32, scales),
    }
