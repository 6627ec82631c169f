"""Losses that keep experts equally busy (Fedus et al. 2021, equations 4 to 6) and logits small (Zoph et al. 2022).

With P_be the mean score of an expert over a sequence (scores of a token add up to 1), f_be a fraction of the choices:

    L_b = E * sum_e f_be P_be         1 for equal fractions          z_b = mean over tokens of logsumexp(z)^2

    load_balancing_loss          --moe-router-load-balancing-type aux_loss         f: of the micro-batch
    seq_load_balancing_loss      seq_aux_loss                                      f: of the sequence
    global_load_balancing_loss   global_aux_loss                                   f: of the last complete global batch
    z_loss                       --moe-z-loss-coeff

Choices count here as a plain top-k of the logits makes them: without expert bias, groups and capacity.

Each is a mean over the tokens of the global batch, as the main loss: a sequence counts as often as it has tokens whose
loss counts, in what is logged too. Micro-batch size and layout change none of them but ``aux_loss``, whose definition
names the micro-batch.
``global_aux_loss`` differs from Megatron-LM, whose f is the running mean over the micro-batches so far and thus depends
on their order: here f is that of the last complete global batch (equal fractions before the first).

Legend: s sequence (local), b batch, e experts, k choices of a token; a share is what this rank's tokens contribute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.config.moe import MoEConfig
from megatron.core.fusions.routing import Summary
from megatron.core.groups.process_groups import Group
from megatron.core.transformer.moe.routing import ScoreFunction, balanced_scores, maths_dtype

STATISTICS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Type of balancing loss -> name of its statistic."""


@dataclass(frozen=True)
class SideLossRule:
    """The balancing losses of a router and its z-loss. UserError for types that the coefficients do not match."""

    types: tuple[str, ...] = ()
    coefficients: tuple[float, ...] = ()
    z_coefficient: float = 0.0
    score_function: ScoreFunction = "softmax"
    coefficient_of: dict[str, float] = field(init=False)
    """Type of ``STATISTICS`` -> coefficient, where that is not 0."""

    def __post_init__(self) -> None:
        if len(self.types) != len(self.coefficients) and any(self.coefficients):
            raise UserError(
                f"moe_aux_loss_coeff has {len(self.coefficients)} values for the {len(self.types)} types of "
                "moe_router_load_balancing_type; give one for each"
            )
        given = {name: value for name, value in zip(self.types, self.coefficients) if value and name in STATISTICS}
        object.__setattr__(self, "coefficient_of", given)

    @classmethod
    def of(cls, config: MoEConfig) -> SideLossRule:
        """What the settings ask for."""
        types, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        z_coefficient = config.moe_z_loss_coeff or 0.0
        return cls(tuple(types), tuple(coefficients), z_coefficient, config.moe_router_score_function)

    @property
    def statistics(self) -> dict[str, int]:
        """Name -> size of what is recorded: of every loss the sum over tokens and their number."""
        names = [STATISTICS[name] for name in self.coefficient_of] + ["z_loss"] * bool(self.z_coefficient)
        return dict.fromkeys(names, 2)


@torch.no_grad()
def choice_counts(experts: Tensor, num_experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """How often each sequence chose each expert: exact counts [b, e] of ``experts`` int64 [s, b, k], which differ for a
    token; those numbered ``num_experts`` do not count."""
    chosen_sbe = torch.zeros((*experts.shape[:2], num_experts + 1), dtype=dtype, device=experts.device)
    return chosen_sbe.scatter_(-1, experts, 1.0).sum(0)[:, :num_experts]


def fractions_of(counts: Tensor) -> Tensor:
    """Counts [..., e] divided by their sum; equal fractions where nothing was counted."""
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total.clamp_min(1), 1 / counts.shape[-1])


@torch.no_grad()
def fractions(
    rule: SideLossRule, counts_be: Tensor, num_choices: int, last_batch_e: Tensor | None, sharers: Group
) -> dict[str, Tensor]:
    """f of every type in ``rule``, [b, e] or [1, e], in the dtype of ``counts_be``, this rank's choices per sequence.

    ``num_choices`` are those of a whole sequence, ``sharers`` the ranks that hold the other tokens of the same
    sequences, ``last_batch_e`` the choices of the last complete global batch.
    """
    types = rule.coefficient_of
    if sharers.size > 1 and ("aux_loss" in types or "seq_aux_loss" in types):
        counts_be = counts_be.clone()  # the caller's stay this rank's own
        dist.all_reduce(counts_be, group=sharers.handle)
    result = {}
    if "aux_loss" in types:
        result["aux_loss"] = counts_be.sum(0, keepdim=True) / (num_choices * len(counts_be))
    if "seq_aux_loss" in types:
        result["seq_aux_loss"] = counts_be / num_choices
    if "global_aux_loss" in types:
        assert last_batch_e is not None
        result["global_aux_loss"] = fractions_of(last_batch_e.double()).to(counts_be.dtype)[None]
    return result


def summarize(logits: Tensor, experts: Tensor, function: ScoreFunction) -> Summary:
    """Sums over the tokens of ``logits`` [s, b, e] and their ``experts`` int64 [s, b, k], in fp32, of fp64 logits in
    fp64: the reference of ``weigh_triton``."""
    dtype = maths_dtype(logits)
    return Summary(
        balanced_scores(logits, function).sum(0),
        choice_counts(experts, logits.shape[-1], dtype),
        logits.to(dtype).logsumexp(-1).square().sum(0),
        logits.detach().isfinite().logical_not_().sum((0, 2)).to(dtype),
    )


def side_loss(
    rule: SideLossRule, sums: Summary, fractions: dict[str, Tensor], tokens_b: Tensor, lengths: tuple[int, int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(share of the sum of all losses, each times its coefficient and the tokens it stands for; statistics).

    ``tokens_b`` [b] as in :class:`SideLosses`; ``lengths`` of sequences: on this rank, and whole. A statistic is (share
    of the loss without coefficient, times the tokens it stands for; share of those tokens).
    """
    local, whole = lengths
    tokens_b = tokens_b.to(sums.z_b.dtype)
    count = tokens_b.sum() * (local / whole)
    losses, statistics = [], {}

    def add(name: str, coefficient: float, share: Tensor) -> None:
        losses.append(coefficient * share)
        statistics[name] = torch.stack((share.detach(), count))

    for name, f_be in fractions.items():
        # a loss per micro-batch has no sequence of its own: it counts alike for all of them
        weight_b = tokens_b.mean().expand_as(tokens_b) if name == "aux_loss" else tokens_b
        share = (f_be * sums.scores_be * weight_b[:, None]).sum() * (f_be.shape[-1] / whole)
        add(STATISTICS[name], rule.coefficient_of[name], share)
    if rule.z_coefficient:
        add("z_loss", rule.z_coefficient, (sums.z_b * tokens_b).sum() / whole)
    return sum(losses[1:], losses[0]), statistics
