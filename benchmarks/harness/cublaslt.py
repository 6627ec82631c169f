"""cuBLASLt's algorithms for one GEMM, one by one, through ctypes.

The library that torch has loaded is used. Numbers of attributes are taken from its header, ``cublasLt.h``. Matrices are
column-major there: a row-major [rows, columns] tensor is its transpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.extensions.cublaslt import Algorithm, Heuristic, check, load

WORKSPACE_BYTES = 256 << 20
_FLOAT32, _BFLOAT16, _COMPUTE_FLOAT32 = 0, 14, 68
_TRANSPOSE_A, _TRANSPOSE_B, _MAX_WORKSPACE = 3, 4, 1
_TILE, _CUSTOM, _CLUSTER = 1, 5, 8
_ATTRIBUTE_BYTES = {_TILE: 4, _CUSTOM: 4, _CLUSTER: 2}


class Choice(NamedTuple):
    """Identification of an algorithm: numbers of its tile, variant and cluster shape."""

    tile: int
    variant: int
    cluster: int


class Gemm:
    """``out[m, n] (+)= left[m, k] @ right[k, n]``; factors bf16, either may be a transposed view; ``out`` contiguous,
    bf16, or fp32 which is added to."""

    def __init__(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        self._library, self._handle = load()
        self.flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
        # out^T = right^T left^T
        self._a, self._b, self.out = right, left, out
        self._operation = c_void_p()
        check(self._library.cublasLtMatmulDescCreate(byref(self._operation), _COMPUTE_FLOAT32, _FLOAT32))
        for attribute, factor in ((_TRANSPOSE_A, right), (_TRANSPOSE_B, left)):
            transposed = c_int(int(not factor.is_contiguous()))
            check(self._library.cublasLtMatmulDescSetAttribute(
                self._operation, attribute, byref(transposed), c_size_t(4)
            ))  # fmt: skip
        self._layouts = [self._layout(x) for x in (right, left, out)]
        self._alpha, self._beta = c_float(1), c_float(out.dtype == torch.float32)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def _layout(self, x: Tensor) -> c_void_p:
        rows, columns = x.shape if x.is_contiguous() else x.t().shape
        layout, kind = c_void_p(), _FLOAT32 if x.dtype == torch.float32 else _BFLOAT16
        check(self._library.cublasLtMatrixLayoutCreate(
            byref(layout), kind, c_uint64(columns), c_uint64(rows), c_int64(columns)
        ))  # fmt: skip
        return layout

    def suggested(self, count: int) -> dict[Choice, Any]:
        """At most ``count`` algorithms that the library would choose, the first one first."""
        preference, found = c_void_p(), c_int()
        check(self._library.cublasLtMatmulPreferenceCreate(byref(preference)))
        most = c_uint64(WORKSPACE_BYTES)
        check(self._library.cublasLtMatmulPreferenceSetAttribute(
            preference, _MAX_WORKSPACE, byref(most), c_size_t(8)
        ))  # fmt: skip
        results = (Heuristic * count)()
        check(self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._operation, *self._layouts, self._layouts[2], preference, count, results, byref(found)
        ))  # fmt: skip
        algorithms: dict[Choice, Any] = {}
        for result in results[: found.value]:
            algorithms.setdefault(self._choice(result.algorithm), result.algorithm)
        return algorithms

    def others(
        self, like: Any, tiles: Sequence[int], variants: Sequence[int], clusters: Sequence[int]
    ) -> Iterator[tuple[Choice, Any]]:
        """Yield the algorithms of a grid that the library can run; other attributes equal ``like``."""
        for tile in tiles:
            for variant in variants:
                for cluster in clusters:
                    algorithm = Algorithm.from_buffer_copy(like)
                    values = ((_TILE, tile), (_CUSTOM, variant), (_CLUSTER, cluster))
                    if all(self._set(algorithm, *pair) for pair in values) and self._can_run(algorithm):
                        yield Choice(tile, variant, cluster), algorithm

    def run(self, algorithm: Any) -> None:
        """On the current stream."""
        a, b, out = (c_void_p(x.data_ptr()) for x in (self._a, self._b, self.out))
        layout_a, layout_b, layout_out = self._layouts
        check(self._library.cublasLtMatmul(
            self._handle, self._operation, byref(self._alpha), a, layout_a, b, layout_b, byref(self._beta), out,
            layout_out, out, layout_out, byref(algorithm), c_void_p(self._workspace.data_ptr()),
            c_size_t(WORKSPACE_BYTES), c_void_p(torch.cuda.current_stream().cuda_stream),
        ))  # fmt: skip

    def _choice(self, algorithm: Any) -> Choice:
        values = []
        for attribute in (_TILE, _CUSTOM, _CLUSTER):
            value, written = c_uint64(), c_size_t()
            check(self._library.cublasLtMatmulAlgoConfigGetAttribute(
                byref(algorithm), attribute, byref(value), c_size_t(_ATTRIBUTE_BYTES[attribute]), byref(written)
            ))  # fmt: skip
            values.append(value.value)
        return Choice(*values)

    def _set(self, algorithm: Any, attribute: int, value: int) -> bool:
        size, number = c_size_t(_ATTRIBUTE_BYTES[attribute]), c_uint64(value)
        status = self._library.cublasLtMatmulAlgoConfigSetAttribute(byref(algorithm), attribute, byref(number), size)
        return not status

    def _can_run(self, algorithm: Any) -> bool:
        result = Heuristic()
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, self._operation, *self._layouts, self._layouts[2], byref(algorithm), byref(result)
        )
        return not status and result.workspace_bytes <= WORKSPACE_BYTES
