"""fp8 GEMMs by cuBLASLt through ctypes. torch's functions (2.11 to 2.13) cannot add to a matrix, and take block scales
for e4m3 only.

The library that torch has loaded is used; numbers of attributes and types are taken from its public header,
``cublasLt.h``. Matrices are column-major there: a row-major [rows, columns] tensor is its transpose. Block scales need
cuBLASLt 12.9 or newer on Hopper."""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron.core.extensions.installed import loaded_libraries

WORKSPACE_BYTES = 32 << 20
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_TRANSPOSE_A, _SCALE_A, _SCALE_B, _FAST, _SCALE_MODE_A, _SCALE_MODE_B = 3, 17, 18, 25, 31, 32
_MAX_WORKSPACE = 1

Scales = Literal["tensor", "rows", "squares"]
"""Scales of a matrix [m, k], fp32: one; one per 1 x 128 block, [m, blocks of k] with the first dim contiguous; one per
128 x 128 block, [blocks of k, padded to a multiple of 4; blocks of m] with the first dim contiguous."""
_SCALE_MODES: dict[Scales, int] = {"tensor": 0, "rows": 4, "squares": 5}


class Algorithm(ctypes.Structure):
    """An algorithm as the library stores it."""

    _fields_ = [("data", c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    """Result of a search for algorithms."""

    _fields_ = [
        ("algorithm", Algorithm), ("workspace_bytes", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    ]  # fmt: skip


@functools.cache
def load() -> tuple[ctypes.CDLL, c_void_p]:
    """Return the library and a handle. Raises RuntimeError if the library is not loaded."""
    torch.mm(*torch.zeros(2, 16, 16, device="cuda", dtype=torch.bfloat16))  # loads it
    found = loaded_libraries("libcublasLt.so")
    if not found:
        raise RuntimeError("cuBLASLt is not loaded")
    library, handle = ctypes.CDLL(str(found[0])), c_void_p()
    check(library.cublasLtCreate(byref(handle)))
    return library, handle


def check(status: int) -> None:
    """Raise RuntimeError for a nonzero status of the library."""
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")


@functools.cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """Return the workspace of a stream: two GEMMs that run at the same time must not share it."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class _Form(NamedTuple):
    """Key of an operation: sizes and dtypes of ``total[m, n] (+)= left[m, k] right[n, k]^T``."""

    m: int
    n: int
    k: int
    left: torch.dtype
    right: torch.dtype
    total: torch.dtype
    scales: tuple[Scales, Scales]
    """Kinds of scales of left and right."""
    fast: bool


class _Operation:
    """Descriptors and algorithm of one form. Not for concurrent use: scale pointers are set for each call."""

    def __init__(self, form: _Form) -> None:
        self.library, self.handle = load()
        self.description = c_void_p()
        check(self.library.cublasLtMatmulDescCreate(byref(self.description), _COMPUTE_FLOAT32, _FLOAT32))
        self._set(_TRANSPOSE_A, c_int32(1))  # out^T = right left^T; fp8 needs k contiguous in both
        self._set(_FAST, c_int8(form.fast))
        some = c_void_p(_workspace(torch.device("cuda", torch.cuda.current_device()), 0).data_ptr())
        self._set(_SCALE_A, some)  # the search for an algorithm asks whether there are scales
        self._set(_SCALE_B, some)
        self._set(_SCALE_MODE_A, c_int32(_SCALE_MODES[form.scales[1]]))
        self._set(_SCALE_MODE_B, c_int32(_SCALE_MODES[form.scales[0]]))
        self.layouts = [
            self._layout(form.right, form.k, form.n), self._layout(form.left, form.k, form.m),
            self._layout(form.total, form.n, form.m),
        ]  # fmt: skip
        preference, found, result, most = c_void_p(), c_int(), Heuristic(), c_uint64(WORKSPACE_BYTES)
        check(self.library.cublasLtMatmulPreferenceCreate(byref(preference)))
        check(self.library.cublasLtMatmulPreferenceSetAttribute(
            preference, _MAX_WORKSPACE, byref(most), c_size_t(8)
        ))  # fmt: skip
        check(self.library.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.description, *self.layouts, self.layouts[2], preference, 1, byref(result), byref(found)
        ))  # fmt: skip
        check(self.library.cublasLtMatmulPreferenceDestroy(preference))
        if not found.value:
            raise RuntimeError(f"cuBLASLt has no algorithm for {form}")
        self.algorithm = result.algorithm

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        check(self.library.cublasLtMatmulDescSetAttribute(
            self.description, attribute, byref(value), c_size_t(ctypes.sizeof(value))
        ))  # fmt: skip

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        check(self.library.cublasLtMatrixLayoutCreate(
            byref(layout), _TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(rows)
        ))  # fmt: skip
        return layout

    def run(
        self, total: Tensor, left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, *, adds: bool
    ) -> None:
        self._set(_SCALE_A, c_void_p(scale_right.data_ptr()))
        self._set(_SCALE_B, c_void_p(scale_left.data_ptr()))
        stream = torch.cuda.current_stream(total.device).cuda_stream
        workspace, one, kept = _workspace(total.device, stream), c_float(1), c_float(adds)
        out = c_void_p(total.data_ptr())
        check(self.library.cublasLtMatmul(
            self.handle, self.description, byref(one), c_void_p(right.data_ptr()), self.layouts[0],
            c_void_p(left.data_ptr()), self.layouts[1], byref(kept), out, self.layouts[2], out, self.layouts[2],
            byref(self.algorithm), c_void_p(workspace.data_ptr()), c_size_t(WORKSPACE_BYTES), c_void_p(stream),
        ))  # fmt: skip


@functools.cache
def _operation(form: _Form) -> _Operation | None:
    try:
        return _Operation(form)
    except (RuntimeError, OSError, AttributeError):
        return None


def fp8_product(
    total: Tensor,
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    *,
    scales: tuple[Scales, Scales] = ("tensor", "tensor"),
    adds: bool,
    fast: bool,
) -> bool:
    """Write ``left`` fp8 [m, k] times ``right`` fp8 [n, k] transposed, times both scales, to ``total`` fp32 or bf16
    [m, n], with fp32 sums. Returns False, with nothing changed, if the library cannot.

    Args:
        scales: what ``scale_left`` and ``scale_right`` are.
        adds: whether the product is added to the values of ``total``.
        fast: whether sums stay in the tensor cores' registers, which keep about 14 bits."""
    tensors = (total, left, right)
    if not (total.is_cuda and total.dtype in _TYPES and all(each.is_contiguous() for each in tensors)):
        return False
    (m, n), k = total.shape, left.shape[1]
    operation = _operation(_Form(m, n, k, left.dtype, right.dtype, total.dtype, scales, fast))
    if operation is None:
        return False
    operation.run(total, left, right, scale_left, scale_right, adds=adds)
    return True
