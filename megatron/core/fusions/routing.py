"""Triton kernels of the MoE router after its linear layer: top-k selection; weights with statistics for aux losses.
Definitions and references: ``core/transformer/moe/routing.py`` and ``balance.py``.

Backward takes the gradients of weights, summed scores and summed squared logsumexp, and writes the gradient of the
logits once. Sums over tokens have two stages in a fixed order: same bits every run.

Legend: s sequence, b batch, t tokens (s * b), e experts, k choices of a token, w padded experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton

_ELEMENTS, _NUM_WARPS = 2048, 4
"""Logits per program: 16 registers of each thread per tile."""
_SOFTMAX, _SOFTMAX_BEFORE, _SIGMOID, _SQRT_SOFTPLUS = range(4)
_KINDS = {"softmax": _SOFTMAX, "softmax before": _SOFTMAX_BEFORE, "sigmoid": _SIGMOID, "sqrtsoftplus": _SQRT_SOFTPLUS}
_SCORES, _CHOICES, _REST = range(3)
"""Row indices of the sums."""


class Summary(NamedTuple):
    """Sums over the local tokens of each sequence, fp32."""

    scores_be: Tensor
    """Scores normalized to sum 1 per token; differentiable."""
    choices_be: Tensor
    """Number of tokens that selected each expert."""
    z_b: Tensor
    """Squared logsumexp of the logits (z-loss); differentiable."""
    nonfinite_b: Tensor
    """Number of infinite or NaN logits."""


if triton is not None:

    @triton.jit
    def _scores(z, KIND: tl.constexpr):
        """KIND 2: sigmoid, else the square root of softplus, accurate for small values and bounded from below."""
        if KIND == 2:
            return 1.0 / (1.0 + tl.exp(-z))
        x = tl.exp(-tl.abs(z))
        u = 1.0 + x  # log1p(x), accurate for tiny x (Kahan)
        log1p = tl.where(u == 1.0, x, tl.log(u) * x / tl.where(u == 1.0, 1.0, u - 1.0))
        return tl.sqrt(tl.maximum(tl.maximum(z, 0.0) + log1p, 1.1754944e-38))

    @triton.jit
    def _slope(z, score, KIND: tl.constexpr):
        if KIND == 2:
            return score * (1.0 - score)
        # the slope is 0 if softplus has underflowed to its lower bound
        return tl.where(score > 1.0842023e-19, 0.5 / (1.0 + tl.exp(-z)) / score, 0.0)

    @triton.jit
    def _choose_kernel(
        logits, bias, experts, tokens, num_experts,
        KIND: tl.constexpr, BIASED: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Write ``experts`` [tokens, K], int64, highest score first; ties: lower index first. NaN scores rank last."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        within = row < tokens
        inside = within[:, None] & (column < num_experts)[None, :]
        score = tl.load(logits + row[:, None] * num_experts + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if KIND == 1:
            score = tl.where(inside, score, -float("inf"))
            score = tl.exp(score - tl.max(score, axis=1)[:, None])
        if KIND > 1:
            score = _scores(score, KIND)
        if BIASED:
            score += tl.load(bias + column, mask=column < num_experts, other=0.0)[None, :]
        # padding and selected experts are -inf; all real scores, including NaN, are clamped to stay above
        score = tl.where(score == score, tl.maximum(score, -3.0e38), -3.0e38)
        score = tl.where((column < num_experts)[None, :], score, -float("inf"))
        for choice in tl.static_range(K):
            best = tl.argmax(score, axis=1, tie_break_left=True)
            tl.store(experts + row * K + choice, best.to(tl.int64), mask=within)
            score = tl.where(column[None, :] == best[:, None], -float("inf"), score)

    @triton.jit
    def _row_softmax(logits, length, batch, num_experts, ROWS: tl.constexpr, WIDTH: tl.constexpr):
        """Return (token index, validity [rows], validity by expert, logits, softmax, logsumexp), ordered [s, b]."""
        place, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
        row, within = place.to(tl.int64) * batch + tl.program_id(1), place < length
        inside = within[:, None] & (column < num_experts)[None, :]
        z = tl.load(logits + row[:, None] * num_experts + column[None, :], mask=inside, other=0.0).to(tl.float32)
        masked = tl.where((column < num_experts)[None, :], z, -float("inf"))
        top = tl.max(masked, axis=1)
        power = tl.exp(masked - top[:, None])
        total = tl.sum(power, axis=1)
        return row, within, inside, z, power / total[:, None], top + tl.log(total)

    @triton.jit
    def _chosen_logits(logits, experts, row, within, num_experts, K: tl.constexpr, PADDED_K: tl.constexpr):
        """Return (validity, logit) of every choice of the tokens ``row``."""
        choice = tl.arange(0, PADDED_K)
        valid = within[:, None] & (choice < K)[None, :]
        index = tl.load(experts + row[:, None] * K + choice[None, :], mask=valid, other=0)
        return valid, tl.load(logits + row[:, None] * num_experts + index, mask=valid, other=0.0).to(tl.float32)

    @triton.jit
    def _chosen_weights(chosen, valid, lse, scale, KIND: tl.constexpr, K: tl.constexpr):
        """Return (weights times ``scale``, weights, divisor per token). KIND 0: softmax over the choices, 1: full
        softmax by ``lse``, else scores divided by their sum if K > 1."""
        if KIND == 0:
            chosen = tl.where(valid, chosen, -float("inf"))
            score = tl.exp(chosen - tl.max(chosen, axis=1)[:, None])
            divisor = tl.sum(score, axis=1)
        elif KIND == 1:
            score = tl.where(valid, tl.exp(chosen - lse[:, None]), 0.0)
            divisor = tl.full(lse.shape, 1.0, tl.float32)
        else:
            score = tl.where(valid, _scores(chosen, KIND), 0.0)
            divisor = tl.sum(score, axis=1) + 1e-20 if K > 1 else tl.full(lse.shape, 1.0, tl.float32)
        plain = score / divisor[:, None]
        return plain * scale, plain, divisor

    @triton.jit
    def _weigh_kernel(
        logits, experts, weights, sums, length, batch, num_experts, scale,
        KIND: tl.constexpr, SUMS: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr, ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Write the weights of ROWS tokens of a sequence; with SUMS also this block's sums of normalized scores,
        choices per expert, squared logsumexp and non-finite logits, in fp32, to row (block, b) of ``sums`` [blocks, b,
        3, w]. The last two are columns 0 and 1 of the third row (_REST)."""
        row, within, inside, z, share, lse = _row_softmax(logits, length, batch, num_experts, ROWS, WIDTH)
        sequence, column, choice = tl.program_id(1), tl.arange(0, WIDTH), tl.arange(0, PADDED_K)
        valid, chosen = _chosen_logits(logits, experts, row, within, num_experts, K, PADDED_K)
        result, _, _ = _chosen_weights(chosen, (choice < K)[None, :], lse, scale, KIND, K)
        at = weights + row[:, None] * K + choice[None, :]
        tl.store(at, result.to(weights.dtype.element_ty), mask=valid)
        if SUMS:
            if KIND > 1:
                score = tl.where(inside, _scores(z, KIND), 0.0)
                score = score / (tl.sum(score, axis=1) + 1e-20)[:, None]
            else:
                score = share
            score_sum = tl.sum(tl.where(inside, score, 0.0), axis=0)
            counts = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
            for j in tl.static_range(K):
                expert = tl.load(experts + row * K + j, mask=within, other=WIDTH)
                counts += tl.where(column[None, :] == expert[:, None], 1.0, 0.0)
            square = tl.sum(tl.where(within, lse * lse, 0.0))
            finite = (tl.abs(z) < float("inf")) & inside
            bad = tl.sum(tl.where(inside & (finite == 0), 1.0, 0.0))
            into = sums + (tl.program_id(0).to(tl.int64) * batch + sequence) * 3 * WIDTH + column
            tl.store(into, score_sum)
            tl.store(into + WIDTH, tl.sum(counts, axis=0))
            tl.store(into + 2 * WIDTH, tl.where(column == 0, square, tl.where(column == 1, bad, 0.0)))

    @triton.jit
    def _backward_kernel(
        logits, experts, grad_weights, grad_scores, grad_z, grad_logits, length, batch, num_experts, scale,
        KIND: tl.constexpr, SUMS: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr, ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Recomputes weights and softmax; fp32, rounded once. With SUMS also from the gradients of the sums."""
        row, within, inside, z, share, lse = _row_softmax(logits, length, batch, num_experts, ROWS, WIDTH)
        sequence, column, choice = tl.program_id(1), tl.arange(0, WIDTH), tl.arange(0, PADDED_K)
        valid, chosen = _chosen_logits(logits, experts, row, within, num_experts, K, PADDED_K)
        grad = tl.load(grad_weights + row[:, None] * K + choice[None, :], mask=valid, other=0.0).to(tl.float32) * scale
        _, plain, divisor = _chosen_weights(chosen, (choice < K)[None, :], lse, 1.0, KIND, K)
        mean = tl.sum(grad * plain, axis=1)  # sum of top-k weights times their gradients
        if KIND == 0:
            grad_chosen = plain * (grad - mean[:, None])
            result = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        elif KIND == 1:
            grad_chosen = plain * grad
            # softmax over all experts: logits of experts that are not selected have a gradient, too
            result = -share * mean[:, None]
        else:
            grad_score = (grad - mean[:, None]) / divisor[:, None] if K > 1 else grad
            grad_chosen = grad_score * _slope(chosen, _scores(chosen, KIND), KIND)
            result = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        if SUMS:
            slope = tl.load(grad_scores + sequence * num_experts + column, mask=column < num_experts, other=0.0)
            slope = slope[None, :]
            if KIND > 1:
                raw = tl.where(inside, _scores(z, KIND), 0.0)
                sum_raw = tl.sum(raw, axis=1) + 1e-20
                balance = tl.sum(raw * slope, axis=1) / sum_raw
                result += (slope - balance[:, None]) / sum_raw[:, None] * _slope(z, raw, KIND)
            else:
                result += share * (slope - tl.sum(share * slope, axis=1)[:, None])
            result += share * (2.0 * lse * tl.load(grad_z + sequence))[:, None]
        # compare with every column: registers cannot be indexed by an expert number
        for j in tl.static_range(K):
            expert = tl.load(experts + row * K + j, mask=within, other=WIDTH)
            grad_choice = tl.sum(tl.where(choice[None, :] == j, grad_chosen, 0.0), axis=1)
            result += tl.where(column[None, :] == expert[:, None], grad_choice[:, None], 0.0)
        at = grad_logits + row[:, None] * num_experts + column[None, :]
        tl.store(at, result.to(grad_logits.dtype.element_ty), mask=inside)


def _tile(num_experts: int) -> dict[str, int]:
    width = max(16, triton.next_power_of_2(num_experts))
    return {"ROWS": max(1, _ELEMENTS // width), "WIDTH": width, "num_warps": _NUM_WARPS}


def choose_triton(logits: Tensor, bias: Tensor | None, kind: str, k: int) -> Tensor:
    """Return the k experts with the highest scores of ``logits`` [s, b, e], int64 [s, b, k], highest first; ties: lower
    index first. ``kind`` selects the scores (see :func:`weigh_triton`; logits for ``softmax``), plus ``bias`` [e]."""
    logits = logits.detach().contiguous()
    *tokens, num_experts = logits.shape
    experts = torch.empty(*tokens, k, dtype=torch.int64, device=logits.device)
    tile = _tile(num_experts)
    rows = logits.numel() // num_experts
    _choose_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        logits, logits if bias is None else bias, experts, rows, num_experts,
        KIND=_KINDS[kind], BIASED=bias is not None, K=k, **tile,
    )  # fmt: skip
    return experts


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, experts: Tensor, kind: str, scale: float, summing: bool) -> Any:
        """Return (weights [s, b, k] in the dtype of ``logits``, sums of scores [b, e], choices [b, e], squared
        logsumexp [b], number of non-finite logits [b]), the sums in fp32 and None unless ``summing``. Saves logits and
        experts. Choices and non-finite counts are not differentiable."""
        length, batch, num_experts = logits.shape
        k, tile = experts.shape[-1], _tile(num_experts)
        ctx.save_for_backward(logits, experts)
        ctx.constants = {"KIND": _KINDS[kind], "SUMS": summing, "K": k, "PADDED_K": triton.next_power_of_2(k), **tile}
        ctx.scale = scale
        blocks = triton.cdiv(length, tile["ROWS"])
        weights = torch.empty(experts.shape, dtype=logits.dtype, device=logits.device)
        shape = (blocks, batch, 3, tile["WIDTH"]) if summing else (1, 1, 3, tile["WIDTH"])
        sums = torch.empty(shape, dtype=torch.float32, device=logits.device)
        _weigh_kernel[(blocks, batch)](
            logits, experts, weights, sums, length, batch, num_experts, scale, **ctx.constants
        )
        if not summing:
            return weights, None, None, None, None
        sums = sums.sum(0)
        scores, choices = sums[:, _SCORES, :num_experts], sums[:, _CHOICES, :num_experts]
        z, nonfinite = sums[:, _REST, 0], sums[:, _REST, 1]
        ctx.mark_non_differentiable(choices, nonfinite)
        return weights, scores, choices, z, nonfinite

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient of the logits in their dtype from the gradients of weights, score sums and squared
        logsumexp, in one kernel; None for the other inputs."""
        logits, experts = ctx.saved_tensors
        length, batch, num_experts = logits.shape
        summing = ctx.constants["SUMS"]
        # without sums the kernel does not read these pointers
        grad_scores, _, grad_z, _ = grads if summing else (grad, None, grad, None)
        grad_logits = torch.empty_like(logits)
        _backward_kernel[(triton.cdiv(length, ctx.constants["ROWS"]), batch)](
            logits, experts, grad.contiguous(), grad_scores.contiguous(), grad_z.contiguous(), grad_logits,
            length, batch, num_experts, ctx.scale, **ctx.constants,
        )  # fmt: skip
        return grad_logits, None, None, None, None


def weigh_triton(
    logits: Tensor, experts: Tensor, kind: str, scale: float, summing: bool
) -> tuple[Tensor, Summary | None]:
    """Return the weights [s, b, k] of the selected ``experts`` int64 [s, b, k] and the sums if ``summing``. ``kind``:
    ``softmax`` (over the top-k), ``softmax before``, ``sigmoid``, ``sqrtsoftplus``."""
    weights, *sums = _Weigh.apply(logits.contiguous(), experts.contiguous(), kind, scale, summing)
    return weights, Summary(*sums) if summing else None
