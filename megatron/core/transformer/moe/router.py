"""MoE router: a linear map to one logit per expert, top-k selection and weights.

Order, as in Megatron-LM: jitter, logits, choice and weights, capacity, losses. Choice and weights are defined in
``routing.py``, losses in ``balance.py``; this module has the parameters, the numerics of the linear map, the random
jitter and the state that persists over steps.

Differences from Megatron-LM make results independent of the layout: jitter is a function of the token (and used only in
training), Sinkhorn sees the micro-batch of all tensor- and context-parallel ranks, forced balance is exact, and
``global_aux_loss`` uses the last complete global batch (``balance.py``).

Legend: s sequence (local), b batch, h hidden, t tokens (s * b), e experts, k choices of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions.batch_invariant_product import batch_invariant_product
from megatron.core.fusions.dispatch import ByDevice, kernels_serve
from megatron.core.fusions.routing import Summary, choose_triton, weigh_triton
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Zeros, parameter
from megatron.core.statistics import StepStatistics
from megatron.core.tensor_parallel.batch_invariant import BatchInvariantGemms
from megatron.core.tensor_parallel.linear import LinearTraits, parallel_linear
from megatron.core.transformer.aux_losses import attach_loss
from megatron.core.transformer.context import NO_CONTEXT, ForwardContext
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.moe import routing
from megatron.core.transformer.moe.balance import SideLossRule, choice_counts, fractions, side_loss, summarize
from megatron.core.transformer.recompute import choose, is_recomputing

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix product ``left @ right`` in the wider ``dtype``; for fp32 on GPUs both must have 16 bits."""
    if left.is_cuda and dtype == torch.float32:  # products of 16-bit values are exact in fp32: no wider copies
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


class _WideLinear(torch.autograd.Function):
    """x W^T in a wider dtype than x and W. Gradients are also computed in it, except that of bf16 x (bf16 GEMM), and
    returned in the dtypes of x and W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, batch_invariant: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        if batch_invariant:
            product = batch_invariant_product(x.flatten(0, -2).to(dtype), weight.to(dtype))
            return product.view(*x.shape[:-1], -1)
        return wide_product(x.flatten(0, -2), weight.t(), dtype).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        x_th, grad_te = x.flatten(0, -2), grad.flatten(0, -2)
        if grad.dtype == torch.float32 and x.dtype == weight.dtype == torch.bfloat16:
            # split grad = high + low (17 bits): bf16 GEMMs, one per gradient, without an fp32 copy of x
            high = grad_te.bfloat16()
            both = torch.cat((high, (grad_te - high).bfloat16()), 1)
            grad_x = both @ torch.cat((weight, weight))
            grad_weight = wide_product(both.t(), x_th, grad.dtype).unflatten(0, (2, -1)).sum(0)
        else:
            grad_x, grad_weight = grad_te @ weight.to(grad.dtype), grad_te.t() @ x_th.to(grad.dtype)
        return grad_x.to(x.dtype).view_as(x), grad_weight.to(weight.dtype), None, None


class TopKRouter(nn.Module):
    """MoE router: [s, b, h] -> :class:`Routing` of t = s * b tokens.

    ``weight`` [e, h], and ``bias`` [e] with ``add_bias_linear``, are in ``params_dtype`` and replicated on every rank.
    Under sequence parallelism each rank routes its own positions, so their gradients are partial sums over TP."""

    expert_bias: Tensor | None
    """fp32 [e] for every model dtype: added to scores (quantile balancing: to logits) for the choice only."""
    last_choices: Tensor
    """int64 [e]: choices per expert in the last complete global batch, for ``global_aux_loss``. Zeros without that
    loss; always present so that a run may change its balancing."""

    def __init__(self, config: TransformerConfig, *, layer_number: int, groups: ProcessGroups) -> None:
        """Build parameters, buffers, rules (UserError for contradictions) and statistics. Triton kernels are used where
        supported, with ``moe_fusion`` and without Sinkhorn, for the choice also only without expert groups."""
        super().__init__()
        assert config.num_moe_experts is not None
        self.config, self.groups, self.layer_number = config, groups, layer_number
        self.num_experts, self.k = config.num_moe_experts, config.moe_router_topk
        self.rule = routing.RoutingRule(
            self.num_experts, self.k, config.moe_router_score_function, config.moe_router_pre_softmax,
            config.moe_router_num_groups, config.moe_router_group_topk, config.moe_router_topk_scaling_factor,
            sinkhorn="sinkhorn" in config.moe_router_load_balancing_type,
            quantiles="quantile_balancing" in config.moe_router_load_balancing_type,
            group_score_topk=config.moe_router_group_score_topk,
        )  # fmt: skip
        self.losses = SideLossRule.of(config)
        fused = kernels_serve(config.params_dtype, config.moe_fusion) and not self.rule.sinkhorn
        self._choose_by_score: Callable[..., Tensor] = self.rule.choose
        self._weigh: Callable[..., tuple[Tensor, Summary | None]] = self._weigh_plain
        if fused:
            self._weigh = ByDevice(self._weigh_in_kernel, self._weigh_plain)
        if fused and self.rule.num_groups is None:
            self._choose_by_score = ByDevice(self._choose_in_kernel, self.rule.choose)
        self.select: Callable[[Tensor, TokenLayout], Tensor] = self._choose
        """Function that selects the experts; ``replay.py`` replaces it."""
        layout = TokenLayout.of(groups, config.sequence_parallel)
        self._needs_layout = layout.sharers.size > 1
        shared: dict[str, Any] = {"groups": groups, "partial": ("tp",) if layout.stream.size > 1 else ()}
        shared["dtype"] = config.params_dtype
        self.weight = parameter((self.num_experts, config.hidden_size), init=weight_init(config), **shared)
        self.bias = parameter((self.num_experts,), init=Zeros(), **shared) if config.add_bias_linear else None
        self._traits = LinearTraits(groups.tp, fuse_weight_gradient=config.gradient_accumulation_fusion)
        if config.batch_invariant_mode:
            self._traits = self._traits._replace(gemms=BatchInvariantGemms(self._traits.gemms, groups.tp))
        self._register_buffers()
        sizes = {"tokens_per_expert": self.num_experts, "dropped": 1, "nonfinite_router_logit": 1}
        sizes |= self.losses.statistics
        if self.counts_choices:
            sizes["_choices_per_expert"] = self.num_experts
        if self.rule.quantiles:
            sizes["_levels"] = self.num_experts + 1  # sum of thresholds over micro-batches, and their number
        self.statistics = StepStatistics(f"layer {layer_number}", **sizes)

    def _register_buffers(self) -> None:
        """Register ``expert_bias`` and ``last_choices``, zeros. Raises UserError for an expert bias together with
        quantile balancing or softmax scores."""
        biased = self.config.moe_router_enable_expert_bias
        if biased and self.rule.quantiles:
            raise UserError("quantile_balancing has a separate bias; disable moe_router_enable_expert_bias")
        if biased and self.config.moe_router_score_function == "softmax":
            raise UserError("moe_router_enable_expert_bias needs moe_router_score_function sigmoid or sqrtsoftplus")
        self.counts_choices = "global_aux_loss" in self.losses.coefficient_of
        bias, choices = torch.zeros(self.num_experts), torch.zeros(self.num_experts, dtype=torch.int64)
        self.register_buffer("expert_bias", bias if biased or self.rule.quantiles else None)
        self.register_buffer("last_choices", choices)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Leave ``last_choices`` out where it is all zeros: converters know Megatron-LM's names. Checkpoints, which ask
        for ``keep_vars``, always have it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (keep_vars or self.counts_choices):
            del destination[f"{prefix}last_choices"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also read states without ``last_choices``. torch passes a dict for this module only."""
        state_dict.setdefault(f"{prefix}last_choices", self.last_choices)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the expert bias between devices, but keep it fp32: steps of 1e-3 would be lost in bf16."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def forward(self, hidden_states: Tensor, ctx: ForwardContext = NO_CONTEXT) -> routing.Routing:
        """Route ``hidden_states`` [s, b, h]. In training it also adds statistics and attaches the losses of
        ``ctx.aux_losses``; recomputation adds no statistics and replays the choices. In training with Sinkhorn,
        quantile balancing, ``aux_loss`` or ``seq_aux_loss`` it is collective over ``ctx.layout.sharers``, the ranks
        that hold the other tokens of the same sequences. Raises ValueError if there are such ranks and no layout."""
        if self._needs_layout and ctx.layout.is_default:
            raise ValueError("a router whose tokens are spread over ranks needs ctx.layout")
        logits = self._logits(self._jittered(hidden_states, ctx))
        experts = choose(lambda: self.select(logits, ctx.layout))
        weights, sums = self._weigh(logits, experts, self.training)
        kept_experts, weights = self._within_capacity(experts.flatten(0, 1), weights.flatten(0, 1))
        if sums is not None:
            weights = self._with_side_losses(weights, logits, experts, sums, ctx)
            if not is_recomputing():
                self._count(logits, sums, kept_experts, ctx.layout)
        return routing.Routing(kept_experts, weights, drops=bool(self.config.moe_expert_capacity_factor))

    def _jittered(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return ``x`` [s, b, h] times uniform factors in (1 - eps, 1 + eps) with ``moe_input_jitter_eps``, in training
        only; else ``x`` itself. The factors depend on seed, layer, sample, position and feature, not on the layout.
        Raises ValueError if the context has no dropout coordinates."""
        eps = self.config.moe_input_jitter_eps
        if not (eps and self.training):
            return x
        at, features = ctx.dropout, range(x.shape[-1])
        if at is None:
            raise ValueError("moe_input_jitter_eps needs the tokens' coordinates: pass dropout=DropoutCoordinates(...)")
        site = ("router_jitter", self.layer_number)
        lanes = at.stream.lanes(site, at.sample_b[None, :, None], at.position_s[:, None, None], 0, features)
        factor = (lanes.float() + 0.5).mul_(eps / 32768).add_(1.0)
        return x * factor.to(x.dtype)

    def _logits(self, x: Tensor) -> Tensor:
        """Return logits [s, b, e] in ``moe_router_dtype`` or the dtype of ``x``, the wider of the two."""
        dtype = _DTYPES.get(self.config.moe_router_dtype or "", x.dtype)
        if dtype.itemsize <= x.dtype.itemsize:
            return parallel_linear(x, self.weight, self.bias, self._traits)
        logits = _WideLinear.apply(x, self.weight, dtype, self.config.batch_invariant_mode)
        return logits if self.bias is None else logits + self.bias

    @property
    def _choice_is_plain(self) -> bool:
        """Whether the choice is the top-k of the logits, or forced, so that balancing losses can count it directly."""
        forced = self.config.moe_router_force_load_balancing
        return forced or (self.expert_bias is None and self.rule.num_groups is None and not self.rule.sinkhorn)

    def _choose(self, logits: Tensor, layout: TokenLayout) -> Tensor:
        """Return top-k experts int64 [s, b, k] by :meth:`RoutingRule.choose`. Forced balancing: round-robin by position
        in the full sequence. Sinkhorn in training, without bias, all-reduces over ``sharers``."""
        length, batch = logits.shape[:2]
        if self.config.moe_router_force_load_balancing:
            return routing.round_robin(layout.stream_positions(length, logits.device), batch, self.num_experts, self.k)
        if self.rule.sinkhorn and self.training:
            return routing.top_k(routing.sinkhorn_scores(logits, layout.sharers), self.k)
        return self._choose_by_score(logits, self.expert_bias)

    def _choose_in_kernel(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        return choose_triton(logits, bias, self.rule.choice_kind, self.k)

    def _weigh_in_kernel(self, logits: Tensor, experts: Tensor, summing: bool) -> tuple[Tensor, Summary | None]:
        return weigh_triton(logits, experts, self.rule.kind, self.rule.scaling_factor or 1.0, summing)

    def _weigh_plain(self, logits: Tensor, experts: Tensor, summing: bool) -> tuple[Tensor, Summary | None]:
        sums = summarize(logits, experts, self.rule.score_function) if summing else None
        return self.rule.weigh(logits, experts), sums

    def _within_capacity(self, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return experts and weights [t, k] in which the choices beyond an expert's capacity have expert number E and
        weight 0. Drops by weight with ``moe_token_drop_policy probs``, else the last by position. Unchanged without
        ``moe_expert_capacity_factor``. Recomputation replays the choice."""
        factor = self.config.moe_expert_capacity_factor
        if not factor:
            return experts, weights
        capacity = routing.expert_capacity(len(experts), self.num_experts, self.k, factor)
        by_weight = weights if self.config.moe_token_drop_policy == "probs" else None
        is_within = choose(lambda: routing.within_capacity(experts, by_weight, self.num_experts, capacity))
        return experts.where(is_within, self.num_experts), weights.where(is_within, 0.0)

    def _with_side_losses(
        self, weights: Tensor, logits: Tensor, experts: Tensor, sums: Summary, ctx: ForwardContext
    ) -> Tensor:
        """Return ``weights`` with the auxiliary losses attached to their backward, and add the losses to the
        statistics. Without ``ctx.aux_losses`` attaches nothing and adds zero tokens. All-reduces choice counts over the
        layout's ``sharers`` for ``aux_loss`` and ``seq_aux_loss``."""
        rule, counting, shares = self.losses, not is_recomputing(), {}
        side, (length, batch), sharers = ctx.aux_losses, logits.shape[:2], ctx.layout.sharers
        if not rule.statistics:
            return weights
        samples = None if side is None else side.samples
        if samples is not None:
            sums = summarize(logits, experts, self.rule.score_function, samples)
        if rule.coefficient_of:
            choices_be = sums.choices_be
            if not self._choice_is_plain:
                chosen = choose(lambda: routing.top_k(logits.detach(), self.k))
                choices_be = choice_counts(chosen, self.num_experts, samples=samples)
            if counting and self.counts_choices:
                self.statistics.add("_choices_per_expert", choices_be.sum(0))
            lengths = length * sharers.size if samples is None else samples[1][:, None]
            num_choices = lengths * self.k
            shares = fractions(rule, choices_be.to(sums.z_b.dtype), num_choices, self.last_choices, sharers)
        tokens_b = sums.z_b.new_zeros(batch) if side is None else side.tokens_b
        loss, statistics = side_loss(rule, sums, shares, tokens_b, (length, length * sharers.size), samples)
        for name, values in statistics.items() if counting else ():
            self.statistics.add(name, values)
        return weights if side is None else attach_loss(weights, loss, side.scale)

    @torch.no_grad()
    def _count(self, logits: Tensor, sums: Summary, experts: Tensor, layout: TokenLayout) -> None:
        """Add the statistics of one forward pass. With quantile balancing also computes each expert's threshold,
        collective over the layout's ``sharers``. ``experts`` [t, k] are the choices after dropping."""
        counts_e = sums.choices_be.sum(0)
        if self.config.moe_expert_capacity_factor:
            counts_e = choice_counts(experts[:, None], self.num_experts)[0]
            self.statistics.add("dropped", experts.numel() - counts_e.sum())
        if layout.padding:  # its length depends on the layout: without this, so would the expert bias
            positions = layout.stream_positions(len(logits), logits.device)
            is_token = positions < layout.full_length(len(positions) * layout.stream.size) - layout.padding
            experts_of_tokens = experts.view(*logits.shape[:2], -1).where(is_token[:, None, None], self.num_experts)
            counts_e = choice_counts(experts_of_tokens, self.num_experts).sum(0)
        self.statistics.add("tokens_per_expert", counts_e)
        self.statistics.add("nonfinite_router_logit", sums.nonfinite_b.sum())
        if self.rule.quantiles:
            assert self.expert_bias is not None
            level_e = routing.quantile_levels(logits, self.expert_bias, self.k, layout.sharers).double()
            # all sharers have the same thresholds: each adds a fraction, so that sums do not depend on their number
            self.statistics.add("_levels", torch.cat((level_e, level_e.new_ones(1))) / layout.sharers.size)

    @torch.no_grad()
    def end_step(self, totals: dict[str, Tensor]) -> None:
        """Update buffers in place from ``totals``, the statistics of the global batch over all ranks: once per global
        batch, after its backward passes and before the optimizer step, even if that is skipped. No collective. The
        expert bias falls for overloaded and rises for underloaded experts, by ``moe_router_bias_update_rate``; with
        quantile balancing it becomes the moving average of minus the mean thresholds, centered over experts.
        ``last_choices`` becomes the choices for ``global_aux_loss``."""
        if self.rule.quantiles:
            assert self.expert_bias is not None
            keep = self.config.moe_router_quantile_balancing_ema
            level_e = totals["_levels"][:-1] / totals["_levels"][-1]
            step = (level_e.mean() - level_e) * (1 - keep)  # only differences between experts matter
            self.expert_bias.copy_(self.expert_bias.double() * keep + step)
        elif self.expert_bias is not None:
            counts_e = totals["tokens_per_expert"]
            # multiply by e: sums of counts are exact, their mean may not be
            step = (counts_e.sum() - counts_e * self.num_experts).sign()
            self.expert_bias.add_(step.to(self.expert_bias.dtype), alpha=self.config.moe_router_bias_update_rate)
        if self.counts_choices:
            self.last_choices.copy_(totals["_choices_per_expert"])

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.k} of {self.num_experts}"
