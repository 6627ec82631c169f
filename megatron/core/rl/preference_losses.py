"""Losses of preference pairs against a frozen reference model: DPO, IPO and hinge.

Of a pair with prompt x, chosen completion w and rejected completion l, the margin is

    m = [log π(w|x) - log π_ref(w|x)] - [log π(l|x) - log π_ref(l|x)]

- ``sigmoid`` (DPO, arXiv:2305.18290, eq. 7): -log σ(βm); with label smoothing ε (conservative DPO)
  -(1 - ε) log σ(βm) - ε log σ(-βm)
- ``hinge`` (SLiC, arXiv:2305.10425): max(0, 1 - βm)
- ``ipo`` (arXiv:2310.12036, eq. 17): (m' - 1/(2β))², where m' has means over completion tokens in place of sums

Legend: b rows, s sequence (local), n completions of a row, p pairs."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PreferenceLoss = Literal["sigmoid", "hinge", "ipo"]


class Completions(NamedTuple):
    """Log-probabilities of the completions of rows [b, n], at least fp32, and their numbers of tokens [b, n]. The
    completions 2k and 2k + 1 of a row are the chosen and the rejected one of its pair k."""

    log_probs_bn: Tensor
    lengths_bn: Tensor


class PairLosses(NamedTuple):
    """Losses of pairs and figures for the log [b, n / 2]; 0 for pairs that are absent from a row."""

    losses: Tensor
    chosen_rewards: Tensor
    """β times the difference of log-probabilities to the reference, without gradient, as the next one."""
    rejected_rewards: Tensor
    present: Tensor
    """1 for a pair, 0 for padding: the sum is the weight of the row."""


def sum_completions(log_probs_bs: Tensor, completion_bs: Tensor, count: int) -> Completions:
    """Return the sums of token log-probabilities, and the numbers of tokens, of ``count`` completions per row.

    Context-parallel ranks get the sums over their tokens, and must all-reduce both before :func:`pair_losses`.

    Args:
        log_probs_bs: log-probability of each label [b, s], of any floating dtype; sums are at least fp32.
        completion_bs: completion of each label, int64 [b, s]; -1: prompts and padding."""
    numbers_n = torch.arange(count, device=completion_bs.device)
    # no scatter-add: its atomics would make the sums of a GPU depend on the order of threads
    is_member_bns = completion_bs[:, None] == numbers_n[:, None]
    # where, not a product: an infinite log-probability of a prompt token must not become NaN
    dtype = torch.promote_types(log_probs_bs.dtype, torch.float32)
    terms_bns = torch.where(is_member_bns, log_probs_bs.to(dtype)[:, None], 0.0)
    return Completions(terms_bns.sum(-1), is_member_bns.sum(-1, dtype=dtype))


def pair_losses(
    policy: Completions, reference_bn: Tensor, kind: PreferenceLoss, beta: float, label_smoothing: float = 0.0
) -> PairLosses:
    """Return the loss of each pair. A batch's loss is their sum divided by the number of pairs of the global batch.

    Args:
        policy: completions under the trained model.
        reference_bn: log-probabilities under the reference [b, n].
        beta: strength of the reference, positive.
        label_smoothing: probability that a preference is wrong, 0 to 0.5; ``sigmoid`` only.

    Raises:
        ValueError: an unknown ``kind``, or a ``beta`` or ``label_smoothing`` outside its range."""
    if not beta > 0:
        raise ValueError(f"beta {beta}: must be positive")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and kind != "sigmoid"):
        raise ValueError(f"label_smoothing {label_smoothing}: must be in [0, 0.5), and 0 unless kind is sigmoid")
    ratios_bn = policy.log_probs_bn - reference_bn
    present = (policy.lengths_bn[:, ::2] > 0) & (policy.lengths_bn[:, 1::2] > 0)
    if kind == "ipo":
        ratios_of_loss = ratios_bn / policy.lengths_bn.clamp(min=1)
    else:
        ratios_of_loss = ratios_bn
    margins = ratios_of_loss[:, ::2] - ratios_of_loss[:, 1::2]
    if kind == "sigmoid":
        losses = -F.logsigmoid(beta * margins)
        if label_smoothing:
            losses = (1 - label_smoothing) * losses - label_smoothing * F.logsigmoid(-beta * margins)
    elif kind == "hinge":
        losses = torch.relu(1 - beta * margins)
    elif kind == "ipo":
        losses = (margins - 1 / (2 * beta)) ** 2
    else:
        raise ValueError(f"kind {kind!r}: must be sigmoid, hinge or ipo")
    rewards = beta * ratios_bn.detach()
    return PairLosses(torch.where(present, losses, 0.0), rewards[:, ::2], rewards[:, 1::2], present.float())
