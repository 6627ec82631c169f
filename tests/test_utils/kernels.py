"""Comparing kernels with their formulas: on a GPU where there is one, else in Triton's interpreter (conftest.py)."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""A share of the largest value: sums over thousands of rows, one rounding of the result (the interpreter truncates)."""


def filled(*shape, dtype, seed=0, device="cpu"):
    """Normal values that ``dtype`` holds exactly. Other devices draw other values."""
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def results(function, inputs, upstream, dtype):
    """Outputs of ``function`` and the gradients of its tensors under ``upstream`` gradients (None: unused output)."""
    leaves = [None if x is None else x.to(DEVICE, dtype, copy=True).requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], list.pop):  # as recomputation: read once
        outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [(y, grad.to(y.device, y.dtype)) for y, grad in zip(outputs, upstream) if grad is not None]
    torch.autograd.backward(*zip(*used))
    return [*(y.detach() for y in outputs), *(x.grad for x in leaves if x is not None)]


def assert_equal_to_formula(kernel, formula, inputs, upstream):
    """``kernel`` in the inputs' dtype against ``formula`` in fp64; and the same bits when run again."""
    dtype = inputs[0].dtype
    native, repeated = (results(kernel, inputs, upstream, dtype) for _ in range(2))
    for index, (mine, twin, exact) in enumerate(
        zip(native, repeated, results(formula, inputs, upstream, torch.float64), strict=True)
    ):
        assert torch.equal(mine, twin), f"result {index} differs from run to run"
        assert mine.dtype == dtype and mine.shape == exact.shape
        error = (mine.double() - exact).abs().max() / exact.abs().max()
        assert error < TOLERANCE[dtype], f"result {index}: {error:.1e}"
