"""Quantized weights of Hugging Face folders: read as bf16, one tensor at a time; written as fp8.

    fp8    <name> e4m3 [.., r, c], <name>_scale_inv [.., ceil(r / 128), ceil(c / 128)]     value * scale of its block
    float-quantized (compressed-tensors)
           <name> e4m3 [r, c], <name>_scale [1] or [r, 1]                                  value * scale
    mxfp4  <name>_blocks uint8 [e, r, g, 16], <name>_scales uint8 [e, r, g]; HF weight [e, 32 g, r]
           two e2m1 values per byte (the lower bits first), 32 values per scale            value * 2^(scale - 127)

Legend: e experts, r rows, c columns, g groups of 32 columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.errors import UserError, counted, listed
from megatron.core.config.quantization import LINEAR
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.hf.conversion import Placement
from megatron.export.hf.quantization import BLOCK_SIZE, Format, Quantize

E4M3 = torch.float8_e4m3fn
SUFFIXES: dict[Format, tuple[str, str]] = {
    "fp8": ("", "_scale_inv"),
    "float-quantized": ("", "_scale"),
    "mxfp4": ("_blocks", "_scales"),
}
"""Endings of the names of values and scales."""
FLOATS = (torch.float32, torch.bfloat16)
SCALE_DTYPES = {"fp8": FLOATS, "float-quantized": FLOATS, "mxfp4": (torch.uint8,)}
INPUT_SCALE = "input_scale"
"""Last part of the name of a static scale of a module's inputs."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of MXFP4."""
NAN_SCALE = 255


def dequantized(stored: Mapping[str, LazyTensor], form: Format, folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a folder with lazy bf16 tensors in place of pairs of values and scales.

    Products with scales are computed in fp32 and rounded once. Raises CheckpointDamagedError: scales or values are
    missing or have a wrong shape or dtype; when a tensor is read, also for scales that are not positive and finite."""
    value_end, scale_end = SUFFIXES[form]
    if form == "float-quantized":  # inputs are not quantized here
        stored = {name: tensor for name, tensor in stored.items() if not name.endswith(f".{INPUT_SCALE}")}
    scales = {name.removesuffix(scale_end): tensor for name, tensor in stored.items() if name.endswith(scale_end)}
    values = {
        name.removesuffix(value_end): tensor
        for name, tensor in stored.items()
        if (name.endswith(value_end) if form == "mxfp4" else tensor.dtype == E4M3)
    }
    problems = [f"{name}{scale_end} is missing" for name in values if name not in scales]
    partner = "tensor" if form == "mxfp4" else "fp8 tensor"
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
            lazy = {"fp8": _fp8_tensor, "mxfp4": _mxfp4_tensor, "float-quantized": _scaled_tensor}[form]
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
    if form != "mxfp4" and len(shape) < 2:
        return [f"{name} has shape {[*shape]}, expected a matrix"]
    blocks = [-(-size // side) for size, side in zip(shape[-2:], BLOCK_SIZE)]
    expected = (*shape[:-2], *blocks) if form == "fp8" else shape[:-1]
    if form == "float-quantized":
        expected = (shape[0], 1) if len(scales.shape) == 2 else (1,) * len(scales.shape[:1])
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


def _scaled_tensor(values: LazyTensor, scales: LazyTensor, where: str) -> LazyTensor:
    def read() -> Tensor:
        scale, result = scales.read(), torch.empty(values.shape, dtype=torch.bfloat16)
        _check_scales(~(scale.isfinite() & (scale > 0)), where)
        rows = scale.float().view(-1, 1).expand(len(result), 1)
        for target, part, factor in zip(result.split(128), values.read().split(128), rows.split(128)):
            target.copy_(part.float() * factor)  # few rows at a time: fp32 copies take memory
        return result

    return LazyTensor(values.shape, torch.bfloat16, read)


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


def quantized(
    tensors: Mapping[str, LazyTensor], plan: Iterable[Placement], quantize: Quantize
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return HF ``tensors`` with the linear layers of ``plan`` in fp8, and the names of the modules whose matrices
    keep their dtype (embedding, output layer, routers …). Raises UserError for linear layers that are not stored as a
    matrix [out, in] each, or without a static scale of their inputs."""
    form = quantize if isinstance(quantize, str) else "fp8"
    input_scales = {} if isinstance(quantize, str) else quantize
    written: dict[str, dict[str, LazyTensor]] = {}
    for layer, names in linear_layers(plan, form):
        if form == "fp8" and layer not in input_scales:
            raise UserError(f"--quantize fp8: there is no scale of the inputs of {layer}; calibrate on more texts")
        scale = _shared_scale([tensors[name] for name in names])
        for name in names:
            if form == "fp8-blocks":
                written[name] = _fp8_blocks(name, tensors[name])
            else:
                written[name] = _fp8_matrix(name, tensors[name], scale, input_scales.get(layer))
    result = dict[str, LazyTensor]()
    for name, tensor in tensors.items():
        result |= written.get(name, {name: tensor})
    matrices = (name for name, tensor in tensors.items() if len(tensor.shape) > 1 and name not in written)
    return result, [name.removesuffix(".weight") for name in matrices]


def linear_layers(plan: Iterable[Placement], form: str) -> list[tuple[str, list[str]]]:
    """Return the linear layers of ``plan``, each expert's apart: local name, and the HF names of its matrices. Raises
    UserError, which names the format ``form``, for none, or for one that is not stored as matrices [out, in]."""
    layers: dict[tuple[str, int | None], list[str]] = {}
    for placement in plan:
        layer, _, leaf = placement.name.rpartition(".")
        for part in placement.parts if leaf == "weight" and LINEAR.fullmatch(layer) else ():
            layers.setdefault((layer, part.expert), []).append(part.name)
            if len(part.shape) != 2 or part.layout.transposed or not part.name.endswith(".weight"):
                reason = f"{part.name} {[*part.shape]} is not the matrix [out, in] of a linear layer"
                raise UserError(f"--quantize {form}: {reason}; write the folder in bf16")
    if not layers:
        raise UserError(f"--quantize {form}: the model has no layers of attention, feed-forward networks or experts")
    return [(layer, names) for (layer, _), names in layers.items()]


def _shared_scale(parts: Sequence[LazyTensor]) -> Callable[[], Tensor]:
    """Return a function that returns the scale [1] of the matrices of one layer, amax / 448 rounded to bf16: servers
    compute them in one GEMM. Reads them once."""
    from megatron.core.fusions.e4m3 import scales  # imports triton

    def scale() -> Tensor:
        amax = torch.stack([part.read().abs().amax().float() for part in parts]).amax().view(1)
        return scales(amax).to(torch.bfloat16)

    return functools.cache(scale)


def _fp8_matrix(
    name: str, tensor: LazyTensor, scale: Callable[[], Tensor], input_scale: float | None
) -> dict[str, LazyTensor]:
    """Return lazy values and ``scale`` of a matrix, and the static scale of its inputs."""
    from megatron.core.fusions.e4m3 import to_e4m3  # imports triton

    result = {
        name: LazyTensor(tensor.shape, E4M3, lambda: to_e4m3(tensor.read(), scale().float())),
        f"{name}{SUFFIXES['float-quantized'][1]}": LazyTensor((1,), torch.bfloat16, scale),
    }
    if input_scale is not None:
        value = torch.tensor([input_scale], dtype=torch.bfloat16)
        result[f"{name.removesuffix('weight')}{INPUT_SCALE}"] = LazyTensor.of(value)
    return result


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
