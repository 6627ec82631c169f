"""MoE balancing losses (Fedus et al. 2021, equations 4 to 6) and router z-loss (Zoph et al. 2022).

P_be is the mean score of an expert over a sequence (a token's scores sum to 1), f_be a fraction of the choices:

  L_b = E * sum_e f_be P_be         1 for equal fractions          z_b = mean over tokens of logsumexp(z)^2

  load_balancing_loss          --moe-router-load-balancing-type aux_loss         f: of the micro-batch
  seq_load_balancing_loss      seq_aux_loss                                      f: of the sequence
  global_load_balancing_loss   global_aux_loss                                   f: of the last complete global batch
  z_loss                       --moe-z-loss-coeff

Choices are counted as a plain top-k of the logits, without expert bias, groups and capacity.

Each loss is a mean over the tokens of the global batch, as the main loss is: a sequence is weighted by its valid
tokens, also in the logged value. Micro-batch size and layout do not change the losses, except ``aux_loss``, which is
defined per micro-batch. ``global_aux_loss`` differs from Megatron-LM, whose f is the running mean over the
micro-batches so far and depends on their order: here f is taken from the last complete global batch (equal fractions
before the first).

Legend: s sequence (local), b batch, e experts, k choices of a token; a share is the contribution of this rank's tokens.
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
from megatron.core.transformer.moe.routing import ScoreFunction, balanced_scores

STATISTICS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Name of the logged statistic of each balancing loss type."""


@dataclass(frozen=True)
class SideLossRule:
    """Balancing losses and z-loss of a router. Raises UserError unless each type has a coefficient or all are 0."""

    types: tuple[str, ...] = ()
    coefficients: tuple[float, ...] = ()
    z_coefficient: float = 0.0
    score_function: ScoreFunction = "softmax"
    coefficient_of: dict[str, float] = field(init=False)
    """Nonzero coefficient of each type in ``STATISTICS``."""

    def __post_init__(self) -> None:
        """Build ``coefficient_of``: {balancing type: coefficient} of the types in ``STATISTICS`` with a nonzero
        coefficient. Raises UserError if the numbers of types and coefficients differ, unless all coefficients are 0."""
        if len(self.types) != len(self.coefficients) and any(self.coefficients):
            raise UserError(
                f"moe_aux_loss_coeff has {len(self.coefficients)} values for the {len(self.types)} types of "
                "moe_router_load_balancing_type; give one for each"
            )
        nonzero = {name: value for name, value in zip(self.types, self.coefficients) if value and name in STATISTICS}
        object.__setattr__(self, "coefficient_of", nonzero)

    @classmethod
    def of(cls, config: MoEConfig) -> SideLossRule:
        """Build the rule from ``config``."""
        types, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        z_coefficient = config.moe_z_loss_coeff or 0.0
        return cls(tuple(types), tuple(coefficients), z_coefficient, config.moe_router_score_function)

    @property
    def statistics(self) -> dict[str, int]:
        """Size of each recorded statistic by name: the token-weighted sum of a loss and the number of tokens."""
        names = [STATISTICS[name] for name in self.coefficient_of] + ["z_loss"] * bool(self.z_coefficient)
        return dict.fromkeys(names, 2)


Samples = tuple[Tensor, Tensor] | None
"""Samples that are packed into one row, as :attr:`AuxLossWeights.samples`; None: each row is a sample."""


def sample_sums(x: Tensor, samples: Samples) -> Tensor:
    """Return the sums over the tokens of each sample, [b, ...], of ``x`` [s, b, ...], or [s, 1, ...] with ``samples``.
    Samples are summed by a GEMM, whose order of additions is fixed, unlike that of atomics. Differentiable."""
    if samples is None:
        return x.sum(0)
    numbers, lengths = samples
    # the last column is padding
    members_sb = torch.nn.functional.one_hot(numbers, len(lengths) + 1)[:, :-1].to(x.dtype)
    return (members_sb.t() @ x.flatten(1)).view(len(lengths), *x.shape[2:])


@torch.no_grad()
def choice_counts(
    experts: Tensor, num_experts: int, dtype: torch.dtype = torch.float32, samples: Samples = None
) -> Tensor:
    """Return counts [b, e] of how often each sample chose each expert, in ``dtype`` (exact below 2^24 in fp32), from
    ``experts`` int64 [s, b, k]. Choices of the index ``num_experts`` are dropped and not counted."""
    chosen_sbe = torch.zeros((*experts.shape[:2], num_experts + 1), dtype=dtype, device=experts.device)
    return sample_sums(chosen_sbe.scatter_(-1, experts, 1.0), samples)[:, :num_experts]


def normalize_counts(counts: Tensor) -> Tensor:
    """Return counts [..., e] divided by their sum; equal fractions if the sum is 0."""
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total.clamp_min(1), 1 / counts.shape[-1])


@torch.no_grad()
def fractions(
    rule: SideLossRule, counts_be: Tensor, num_choices: int | Tensor, last_batch_e: Tensor | None, sharers: Group
) -> dict[str, Tensor]:
    """Return f of every type in ``rule``, [b, e] or [1, e], in the dtype of ``counts_be``, this rank's choices per
    sequence. All-reduces the counts over ``sharers`` for ``aux_loss`` and ``seq_aux_loss``.

    ``num_choices`` counts the choices of a full sequence (int, or [b, 1]), ``sharers`` hold the other tokens of the
    same sequences, ``last_batch_e`` are the choices of the last complete global batch."""
    types = rule.coefficient_of
    if sharers.size > 1 and ("aux_loss" in types or "seq_aux_loss" in types):
        counts_be = counts_be.clone()  # keep the caller's counts local to this rank
        dist.all_reduce(counts_be, group=sharers.handle)
    result = {}
    if "aux_loss" in types:
        result["aux_loss"] = counts_be.sum(0, keepdim=True) / (num_choices * len(counts_be))
    if "seq_aux_loss" in types:
        result["seq_aux_loss"] = counts_be / num_choices
    if "global_aux_loss" in types:
        assert last_batch_e is not None
        result["global_aux_loss"] = normalize_counts(last_batch_e.double()).to(counts_be.dtype)[None]
    return result


def summarize(logits: Tensor, experts: Tensor, function: ScoreFunction, samples: Samples = None) -> Summary:
    """Return sums over the tokens of ``logits`` [s, b, e] and their ``experts`` int64 [s, b, k], per sample, in fp32
    (fp64 for fp64 logits): normalized scores [b, e], choices [b, e], squared log-sum-exp [b], non-finite logits [b].
    Reference of ``weigh_triton``; differentiable in scores and log-sum-exp."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return Summary(
        sample_sums(balanced_scores(logits, function), samples),
        choice_counts(experts, logits.shape[-1], dtype, samples),
        sample_sums(logits.to(dtype).logsumexp(-1).square(), samples),
        sample_sums(logits.detach().isfinite().logical_not_().sum(2).to(dtype), samples),
    )


def side_loss(
    rule: SideLossRule,
    sums: Summary,
    fractions: dict[str, Tensor],
    tokens_b: Tensor,
    lengths: tuple[int, int],
    samples: Samples = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (this rank's share of the sum of all losses, with coefficients and token weights; statistics). Needs at
    least one configured loss.

    ``tokens_b`` [b] is as in :class:`AuxLossWeights`; ``lengths`` are the local and the full length of a row. A
    statistic is (share of the loss without coefficient, times its tokens; share of its tokens), 2 values by name."""
    local, full = lengths
    tokens_b = tokens_b.to(sums.z_b.dtype)
    length_b = full if samples is None else samples[1]
    count = tokens_b.sum() * (local / full)
    losses, statistics = [], {}

    def add(name: str, coefficient: float, share: Tensor) -> None:
        losses.append(coefficient * share)
        statistics[name] = torch.stack((share.detach(), count))

    for name, f_be in fractions.items():
        # the micro-batch loss belongs to no sequence: weight all sequences equally
        weight_b = tokens_b.mean().expand_as(tokens_b) if name == "aux_loss" else tokens_b
        share = (f_be * sums.scores_be * (weight_b / length_b)[:, None]).sum() * f_be.shape[-1]
        add(STATISTICS[name], rule.coefficient_of[name], share)
    if rule.z_coefficient:
        add("z_loss", rule.z_coefficient, (sums.z_b * (tokens_b / length_b)).sum())
    return sum(losses[1:], losses[0]), statistics
