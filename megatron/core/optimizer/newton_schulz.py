"""Newton-Schulz orthogonalization of matrices (Muon, Jordan et al. 2024): X = U S V^T -> nearly U V^T.

    X <- X / |X|_F                       Frobenius norm, in fp32
    A = X X^T;  X <- a X + (b A + c A A) X        repeated; (a, b, c) per step

The iteration runs in the orientation with fewer rows, so that A is the smaller Gram matrix. Its cost for [m, n] with
m <= n is 4 m^2 n + 2 m^3 FLOP per step. Singular values of the result are near 1, not exactly 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.symmetric_product import symmetric_product_reference

Precision = Literal["medium", "high", "highest"]
Triple = tuple[float, float, float]

_EPS = 1e-15  # a zero matrix stays zero
_LARGE = 2**30  # m m n from which one matrix fills a GPU


class Coefficients(NamedTuple):
    """Coefficients (a, b, c) per step, and how they continue after the last one."""

    steps: tuple[Triple, ...]
    repeats_last: bool = False
    """Whether further steps repeat the last triple; otherwise the list starts again."""

    def take(self, count: int) -> list[Triple]:
        """Return the triples of ``count`` steps."""
        last = len(self.steps) - 1
        return [self.steps[min(step, last) if self.repeats_last else step % (last + 1)] for step in range(count)]


_SIMPLE = (3.4445, -4.7750, 2.0315)

_SAFETY = 1.01
"""Divisor of singular values in every step of "cans". Without it those above 1 grow without bound, and bf16 GEMMs
raise values that are near 1: the update of a matrix of rank one would be 1e5 times too large."""
_CANS = tuple(
    (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
    for a, b, c in (  # arXiv 2506.10935
        (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    )
)  # fmt: skip

COEFFICIENTS = {
    "simple": Coefficients((_SIMPLE,)),  # Jordan et al. 2024
    "quintic": Coefficients((
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )),
    # arXiv 2505.16932, with its safety factor of 1.01 divided in
    "polar_express": Coefficients((
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.8750, -1.25, 0.375),
    ), repeats_last=True),
    "cans": Coefficients(_CANS, repeats_last=True),
    "deepseekv4": Coefficients((*[_SIMPLE] * 8, (2.0, -1.5, 0.5)), repeats_last=True),  # 8 + 2 steps
    # arXiv 2606.00371; c = 0 saves a GEMM
    "cubic5": Coefficients((
        (3.3656576, -3.3420992, 0.0), (2.5744352, -1.4957376, 0.0), (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0), (2.2230472, -0.9630650, 0.0),
    )),
}  # fmt: skip
"""Coefficients by ``muon_coefficient_type``. Every first step must map (0, 1] to positive numbers. Those of
Megatron-LM's "aol" do not: they turn the sign of a singular value above 0.884 of the norm, so that a matrix of nearly
rank one would be updated in the wrong direction."""


def factor_dtype(dtype: torch.dtype, precision: Precision) -> torch.dtype:
    """Return the dtype in which orthogonal factors of matrices in ``dtype`` are computed."""
    return torch.bfloat16 if precision == "medium" and dtype == torch.float32 else dtype


def fills_gpu(rows: int, columns: int) -> bool:
    """Return whether one matrix fills a GPU, so that a batch would only need more memory."""
    return rows * columns * min(rows, columns) >= _LARGE


SymmetricProduct = Callable[[Tensor, Tensor, Tensor | None, float, float], Tensor]
"""(a, b, c, alpha, beta) -> alpha a b^T + beta c, which is symmetric (``fusions/symmetric_product.py``)."""


def orthogonalize(
    matrices: Tensor, steps: list[Triple], precision: Precision, product: SymmetricProduct = symmetric_product_reference
) -> Tensor:
    """Return the nearly orthogonal factors of ``matrices`` [k, m, n], fp32 or fp64, in :func:`factor_dtype`.
    ``precision`` is that of GEMMs on fp32 matrices: bf16 operands (medium), TF32 on GPUs (high) or fp32 (highest); fp64
    stays fp64. The result for zeros is zeros. ``product`` computes the symmetric products."""
    if len(matrices) > 1 and fills_gpu(*matrices.shape[-2:]):
        return torch.cat([orthogonalize(matrix, steps, precision, product) for matrix in matrices.split(1)])
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    norms = torch.stack(torch._foreach_norm(list(matrices.unbind())))  # the bits must not depend on the batch
    # one pass: computed in fp32 and rounded where it is written
    normed = torch.empty_like(x, dtype=factor_dtype(x.dtype, precision))
    torch.div(x, norms.clamp(min=_EPS)[:, None, None], out=normed)
    with _matmul_precision(precision):
        x = iterate(normed, steps, product)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


def iterate(x: Tensor, steps: list[Triple], product: SymmetricProduct) -> Tensor:
    """Return the result of all ``steps`` for ``x`` [k, m, n], m <= n, with a norm of 1 each."""
    for a, b, c in steps:
        x = torch.baddbmm(x, _polynomial(product(x, x, None, 1.0, 1.0), b, c, product), x, beta=a)
    return x


def _polynomial(gram: Tensor, b: float, c: float, product: SymmetricProduct) -> Tensor:
    return product(gram, gram, gram, c, b) if c else b * gram


@contextmanager
def _matmul_precision(precision: Precision) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "high" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
