"""Rules of a model's settings alone: the library applies them in ``TransformerConfig``, the command line with its own.

A rule is a row of ``requirements.tsv`` or a public generator. Messages are in terms of flags;
:func:`library_problems` names fields instead."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection
from dataclasses import replace

from megatron.core.config.cli import FlagSpec, Problem, flags_of
from megatron.core.config.errors import counted
from megatron.core.config.fp8 import ALIGNED, BLOCK, experts_in_fp8
from megatron.core.config.layer_kinds import delta_kinds
from megatron.core.config.memory import RecomputeConfig
from megatron.core.config.model_settings import ModelSettings
from megatron.core.config.moe import MoEConfig, expert_tensor_ranks
from megatron.core.config.problems import Problems, collect_rules, common_divisors, nearest_multiples
from megatron.core.config.requirements import read_table, unmet

BATCH_INVARIANT_PARTS = 8
"""Parts of every sum that tensor parallelism splits, with --batch-invariant-mode: the largest tensor-parallel size."""
NO_LOSS = ("sinkhorn", "quantile_balancing", "none")
"""Kinds of balance that are no loss."""


@functools.cache
def _flags() -> dict[str, FlagSpec]:
    return {spec.field: spec for spec in flags_of(ModelSettings)}


def problem(cfg: ModelSettings, field: str, reason: str, fix: str = "") -> Problem:
    """Return a problem of a field, with its flag and value."""
    return _flags()[field].problem(getattr(cfg, field), reason, fix)


def _heads_divide_hidden_size(cfg: ModelSettings, explicit: Collection[str]) -> Problems:
    hidden, heads = cfg.hidden_size, cfg.num_attention_heads
    if not hidden or not heads or heads < 1 or "kv_channels" in explicit or cfg.multi_latent_attention:
        return
    if hidden % heads and cfg.kv_channels == max(hidden // heads, 1):
        fix = f"nearest width: {max(hidden // heads, 1) * heads}; or give --kv-channels"
        yield problem(cfg, "hidden_size", f"is not a multiple of --num-attention-heads {heads}", fix)


def query_groups_divide_heads(cfg: ModelSettings) -> Problems:
    heads, groups = cfg.num_attention_heads, cfg.num_query_groups
    if heads and groups and groups > 0 and heads % groups:
        yield problem(cfg, "num_query_groups", f"does not divide --num-attention-heads {heads}")


def latent_rotary_channels_even(cfg: ModelSettings) -> Problems:
    rotated = cfg.qk_pos_emb_head_dim
    if cfg.multi_latent_attention and rotated % 2:
        reason = f"rotates {rotated} of {rotated} channels; the number must be even and not 0"
        yield problem(cfg, "qk_pos_emb_head_dim", reason)


def fp8_sizes(cfg: ModelSettings) -> Problems:
    """Require the widths of fp8 matrices on each rank to be multiples of 16, or 128 with --fp8-recipe blockwise."""
    if cfg.fp8 is None or cfg.hidden_size is None or cfg.num_attention_heads is None:
        return
    unit, tp = BLOCK if cfg.fp8_recipe == "blockwise" else ALIGNED, cfg.tensor_model_parallel_size
    widths = {"hidden_size": cfg.hidden_size, "ffn_hidden_size": cfg.ffn_hidden_size}
    if not cfg.multi_latent_attention and cfg.kv_channels is not None:
        widths["kv_channels"] = cfg.kv_channels * cfg.num_attention_heads
    if kinds := delta_kinds(cfg):
        heads, values, channels = cfg.linear_num_key_heads, cfg.linear_num_value_heads, cfg.linear_value_head_dim
        widths["linear_value_head_dim"] = values * channels
        parts = 2 if "gated_delta_net" in kinds else 1
        widths["linear_key_head_dim"] = 2 * heads * cfg.linear_key_head_dim + parts * values * (channels + 1)
    for field, width in widths.items():
        per_rank = width if field == "hidden_size" or width is None else width // tp
        if per_rank and per_rank % unit:
            kind = "heads x head size is" if field == "kv_channels" else "is"
            reason = f"{kind} {per_rank} per rank; --fp8-recipe {cfg.fp8_recipe} requires multiples of {unit}"
            yield problem(cfg, field, reason, nearest_multiples(per_rank, unit))


def fp8_other_sizes(cfg: ModelSettings) -> Problems:
    """Require the widths per rank that derive from several settings to be multiples of 16."""
    if cfg.fp8 is None or cfg.hidden_size is None or cfg.num_attention_heads is None:
        return
    tp, heads = cfg.tensor_model_parallel_size, cfg.num_attention_heads
    widths: list[tuple[str, str, int | None]] = [
        ("moe_shared_expert_intermediate_size", "is", (cfg.moe_shared_expert_intermediate_size or 0) // tp)
    ]
    if experts_in_fp8(cfg):
        widths.append(("moe_ffn_hidden_size", "is", (cfg.moe_ffn_hidden_size or 0) // expert_tensor_ranks(cfg)))
    if cfg.multi_latent_attention:
        plain, rotated, value, latent = cfg.qk_head_dim, cfg.qk_pos_emb_head_dim, cfg.v_head_dim, cfg.kv_lora_rank
        widths += [
            ("q_lora_rank", "is", cfg.q_lora_rank),
            ("kv_lora_rank", "is", latent),
            ("kv_lora_rank", "with --qk-pos-emb-head-dim is", latent + rotated),
            ("v_head_dim", "x heads is", value * heads // tp),
            ("qk_head_dim", "with --qk-pos-emb-head-dim, x heads, is", (plain + rotated) * heads // tp),
            ("qk_head_dim", "with --v-head-dim, x heads, is", (plain + value) * heads // tp),
        ]
    elif cfg.kv_channels is not None:
        both = 2 * cfg.kv_channels * max((cfg.num_query_groups or heads) // tp, 1)
        widths.append(("kv_channels", "x 2 x key and value heads is", both))
    if "kimi_delta_attention" in delta_kinds(cfg):  # products of low rank
        widths.append(("linear_value_head_dim", "is also the low rank of decays and gates,", cfg.linear_value_head_dim))
    for field, kind, width in widths:
        if width and width % ALIGNED:
            reason = f"{kind} {width} per rank; --fp8-format requires multiples of {ALIGNED}"
            yield problem(cfg, field, reason, nearest_multiples(width, ALIGNED))


def fp8_first_last_layers(cfg: ModelSettings) -> Problems:
    """Reject --first-last-layers-bf16 with more layers than exist."""
    if cfg.fp8 is None or not cfg.first_last_layers_bf16:
        return
    in_bf16 = cfg.num_layers_at_start_in_bf16 + cfg.num_layers_at_end_in_bf16
    if cfg.num_layers is not None and in_bf16 > cfg.num_layers:
        reason = f"with --num-layers-at-end-in-bf16 {cfg.num_layers_at_end_in_bf16} exceeds the {cfg.num_layers} layers"
        yield problem(cfg, "num_layers_at_start_in_bf16", reason)


def fp8_recomputed_outputs(cfg: ModelSettings) -> Problems:
    """Reject --recompute-modules whose outputs only fp8 layers read: these save an 8-bit copy of them instead."""
    if cfg.fp8 is None or not cfg.fp8_wgrad or cfg.recompute_granularity != "selective":
        return
    copied = ("layernorm", "mlp_act", "moe_act") if experts_in_fp8(cfg) else ("layernorm", "mlp_act")
    if names := [name for name in cfg.recompute_modules or () if name in copied]:
        reason = f"{', '.join(names)} would save no memory: with --fp8-format layers save an 8-bit copy of their input"
        yield problem(cfg, "recompute_modules", reason, "remove it")


def activation_offload(cfg: ModelSettings) -> Problems:
    """Reject modules to offload that the model does not have, or that are recomputed as well."""
    modules = cfg.offload_modules or ()
    if not cfg.fine_grained_activation_offloading:
        return
    recomputed = recomputed_modules(cfg)
    for name in modules:
        reason = fix = ""
        if name in ("expert_fc1", "moe_act") and cfg.num_moe_experts is None:
            reason, fix = "requires --num-experts", "remove it"
        elif clash := sorted(recomputed.intersection(_NOT_SAVED.get(name, (name,)))):
            reason, fix = f"saves tensors that --recompute-modules {' '.join(clash)} discards", "choose one"
        elif name == "attn_proj" and not {"core_attn"} & {*modules, *recomputed}:
            reason, fix = "saves the output of attention, which core_attn keeps on the device", "add core_attn"
        if reason:
            yield problem(cfg, "offload_modules", f"{name} {reason}", fix)


def recomputed_modules(cfg: RecomputeConfig) -> set[str]:
    """Return the modules of selective recomputation; empty without it."""
    return set(cfg.recompute_modules or ("core_attn",)) if cfg.recompute_granularity == "selective" else set()


def offloadable_modules(cfg: ModelSettings) -> list[str]:
    """Return --offload-modules without those whose saved tensors recomputation discards or leaves on the device."""
    recomputed = recomputed_modules(cfg)
    names = [name for name in cfg.offload_modules or () if not recomputed.intersection(_NOT_SAVED.get(name, (name,)))]
    has_attention = "core_attn" in {*names, *recomputed} or "core_attn" not in (cfg.offload_modules or ())
    return [name for name in names if name != "attn_proj" or has_attention]


_NOT_SAVED = {
    "attn_norm": ("layernorm",),
    "mlp_norm": ("layernorm",),
    "qkv_linear": ("layernorm",),
    "core_attn": ("core_attn", "mla_up_proj"),
    "attn_proj": (),
    "expert_fc1": ("moe", "mlp"),
    "moe_act": ("moe", "moe_act", "mlp"),
}
"""Recomputed modules that save less, or other tensors, where a module to offload saves them."""


def tensor_parallel_heads(cfg: ModelSettings) -> Problems:
    """Require --num-attention-heads and --ffn-hidden-size to be multiples of the tensor-parallel size."""
    tp, heads, width = cfg.tensor_model_parallel_size, cfg.num_attention_heads, cfg.ffn_hidden_size
    sizes = [size for size in (heads, width) if size and size > 0]
    if tp > 1 and any(size % tp for size in sizes):
        fitting = common_divisors(*sizes)
        if heads and heads % tp:
            fix = f"{nearest_multiples(heads, tp)}; or a --tensor-model-parallel-size of {fitting}"
            yield problem(cfg, "num_attention_heads", f"is not a multiple of --tensor-model-parallel-size {tp}", fix)
        if width and width % tp:
            fix = f"{nearest_multiples(width, tp)}; or a --tensor-model-parallel-size of {fitting}"
            yield problem(cfg, "ffn_hidden_size", f"is not a multiple of --tensor-model-parallel-size {tp}", fix)


def tensor_parallel_key_value_heads(cfg: ModelSettings) -> Problems:
    """The number of key-value groups must divide the tensor-parallel size or be a multiple of it."""
    tp, groups = cfg.tensor_model_parallel_size, cfg.num_query_groups
    if tp > 1 and groups and groups > 0 and groups % tp and tp % groups:
        fix = f"{nearest_multiples(groups, tp)}, or a divisor of {tp}"
        reason = f"neither divides nor is divided by --tensor-model-parallel-size {tp}"
        yield problem(cfg, "num_query_groups", reason, fix)


def qk_norm_across_heads(cfg: ModelSettings) -> Problems:
    tp, groups = cfg.tensor_model_parallel_size, cfg.num_query_groups
    if cfg.qk_layernorm_across_heads and not cfg.multi_latent_attention and groups and groups % tp:
        reason = f"requires that --tensor-model-parallel-size {tp} divides the {groups} key/value heads"
        yield problem(cfg, "qk_layernorm_across_heads", reason, "use fewer tensor-parallel ranks")


def batch_invariant_mode(cfg: ModelSettings) -> Problems:
    """With --batch-invariant-mode, reject sizes that do not split into the fixed parts."""
    if not cfg.batch_invariant_mode:
        return
    parts = BATCH_INVARIANT_PARTS
    tp = cfg.tensor_model_parallel_size
    if parts % tp:
        reason = f"is not supported with --batch-invariant-mode, which adds in {parts} parts"
        yield problem(cfg, "tensor_model_parallel_size", reason, f"use a divisor of {parts}")
    heads, channels = cfg.num_attention_heads, cfg.v_head_dim if cfg.multi_latent_attention else cfg.kv_channels
    widths = {
        "ffn_hidden_size": cfg.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": cfg.moe_shared_expert_intermediate_size,
        "num_attention_heads": heads * channels if heads and channels else None,
    }
    for name, width in widths.items():
        if width and width % parts:
            what = f"gives {width} channels, which" if name == "num_attention_heads" else ""
            reason = f"{what} --batch-invariant-mode adds in {parts} parts".strip()
            yield problem(cfg, name, reason, f"use a multiple of {parts}")
    if cfg.num_moe_experts is not None and expert_tensor_ranks(cfg) > 1:
        reason = "splits experts, whose sums --batch-invariant-mode does not order"
        yield problem(cfg, "expert_tensor_parallel_size", reason, "--expert-tensor-parallel-size 1")


def linear_attention(cfg: ModelSettings) -> Problems:
    """Sizes of linear attention: value heads per key head, heads per rank, layers of the pattern."""
    pattern, heads, values = cfg.linear_attention_freq, cfg.linear_num_key_heads, cfg.linear_num_value_heads
    kinds = delta_kinds(cfg)
    if not kinds:
        return
    if "kimi_delta_attention" in kinds and values != heads:
        reason = f"differs from --linear-num-key-heads {heads}; Kimi delta attention has as many"
        yield problem(cfg, "linear_num_value_heads", reason, f"--linear-num-value-heads {heads}")
    if isinstance(pattern, list) and cfg.num_layers and len(pattern) != cfg.num_layers:
        yield problem(cfg, "linear_attention_freq", f"has {len(pattern)} entries for {cfg.num_layers} layers")
    if values % heads:
        reason = f"is not a multiple of --linear-num-key-heads {heads}"
        yield problem(cfg, "linear_num_value_heads", reason, nearest_multiples(values, heads))
    tp, cp = cfg.tensor_model_parallel_size, cfg.context_parallel_size
    if heads % tp:
        fix = nearest_multiples(heads, tp)
        yield problem(cfg, "linear_num_key_heads", f"is not a multiple of --tensor-model-parallel-size {tp}", fix)
    elif "a2a" in cfg.cp_comm_type and heads // tp % cp:
        reason = f"gives {heads // tp} heads per rank, which --cp-comm-type a2a does not split over {cp} ranks"
        yield problem(cfg, "linear_num_key_heads", reason, "--cp-comm-type p2p, or a multiple")


def window_settings(cfg: ModelSettings) -> Problems:
    pattern = cfg.window_attn_skip_freq
    if isinstance(pattern, list) and cfg.num_layers and len(pattern) != cfg.num_layers:
        yield problem(cfg, "window_attn_skip_freq", f"has {len(pattern)} entries for {cfg.num_layers} layers")


def activation_settings(cfg: ModelSettings) -> Problems:
    """Reject several activations, and the exact-GELU flag with an activation other than GELU or --geglu."""
    chosen = [field for field in ("swiglu", "squared_relu", "relu", "quick_geglu", "geglu") if getattr(cfg, field)]
    if len(chosen) > 1:
        yield problem(cfg, chosen[1], f"contradicts --{chosen[0].replace('_', '-')}", "give one activation")
    if cfg.exact_gelu and chosen not in ([], ["geglu"]):
        yield problem(cfg, "exact_gelu", f"contradicts --{chosen[0].replace('_', '-')}", "use it with GELU or --geglu")


def moe_layer_pattern(cfg: ModelSettings) -> Problems:
    pattern = cfg.moe_layer_freq if cfg.num_moe_experts else 1
    if isinstance(pattern, list) and cfg.num_layers and len(pattern) != cfg.num_layers:
        yield problem(cfg, "moe_layer_freq", f"has {len(pattern)} entries for {cfg.num_layers} layers")


def experts_divide_evenly(cfg: ModelSettings) -> Problems:
    """Require the sizes of experts to be multiples of the expert-, expert-tensor- and tensor-parallel size."""
    experts, ep = cfg.num_moe_experts, cfg.expert_model_parallel_size
    if experts is None:
        return
    if experts % ep:
        fix = f"{nearest_multiples(experts, ep)}; or an --expert-model-parallel-size of {common_divisors(experts)}"
        yield problem(cfg, "num_moe_experts", f"is not a multiple of --expert-model-parallel-size {ep}", fix)
    etp, width = expert_tensor_ranks(cfg), cfg.moe_ffn_hidden_size
    if width and width % etp:
        reason = f"is not a multiple of the {etp} expert-tensor-parallel ranks"
        yield problem(cfg, "moe_ffn_hidden_size", reason, nearest_multiples(width, etp))
    shared, tp = cfg.moe_shared_expert_intermediate_size, cfg.tensor_model_parallel_size
    if shared and shared % tp:
        reason = f"is not a multiple of --tensor-model-parallel-size {tp}"
        yield problem(cfg, "moe_shared_expert_intermediate_size", reason, nearest_multiples(shared, tp))


def router_settings(cfg: ModelSettings) -> Problems:
    """Reject router settings that cannot work, such as top-1 softmax after selection, whose weight is always 1."""
    experts, top, scores = cfg.num_moe_experts, cfg.moe_router_topk, cfg.moe_router_score_function
    if experts is None:
        return
    if top > experts:
        yield problem(cfg, "moe_router_topk", f"is more than --num-experts {experts}")
    if (
        top == 1
        and scores == "softmax"
        and not cfg.moe_router_pre_softmax
        and "sinkhorn" not in cfg.moe_router_load_balancing_type
    ):
        reason = "gives the router no gradient: the softmax over one selected expert is always 1"
        yield problem(cfg, "moe_router_topk", reason, "add --moe-router-pre-softmax")


def expert_groups(cfg: ModelSettings) -> Problems:
    """Require groups that divide --num-experts, and selected groups that hold top-k experts (a multiple of them unless
    --moe-router-group-score-topk is set)."""
    experts, groups, chosen = cfg.num_moe_experts, cfg.moe_router_num_groups, cfg.moe_router_group_topk
    if experts is None or groups is None or chosen is None:
        return
    if experts % groups:
        reason = f"does not divide --num-experts {experts}"
        yield problem(cfg, "moe_router_num_groups", reason, f"divisors: {common_divisors(experts)}")
    size, by_default = experts // groups, cfg.moe_router_group_score_topk is None
    if chosen > groups:
        yield problem(cfg, "moe_router_group_topk", f"is more than --moe-router-num-groups {groups}")
    elif (by_default and cfg.moe_router_topk % chosen) or cfg.moe_router_topk > chosen * size:
        reason = f"does not divide --moe-router-topk {cfg.moe_router_topk} evenly among groups of {size} experts"
        yield problem(cfg, "moe_router_group_topk", reason)


def expert_group_scores(cfg: ModelSettings) -> Problems:
    experts, groups, scored = cfg.num_moe_experts, cfg.moe_router_num_groups, cfg.moe_router_group_score_topk
    if experts is not None and groups is not None and scored is not None and scored > experts // groups:
        reason = f"must be at most {experts // groups}, the number of experts per group"
        yield problem(cfg, "moe_router_group_score_topk", reason)


def auxiliary_loss_coefficients(cfg: ModelSettings) -> Problems:
    """Require one coefficient per load-balancing type, zero for sinkhorn and quantile_balancing, which are no losses;
    for none it has no effect, as in Megatron-LM. Several types must be distinct losses."""
    kinds, coefficients = cfg.moe_router_load_balancing_type, cfg.moe_aux_loss_coeff
    if cfg.num_moe_experts is None:
        return
    if len(kinds) != len(coefficients):
        types = counted(len(kinds), "balancing type")
        reason = f"has {len(coefficients)} values for {types} (--moe-router-load-balancing-type)"
        yield problem(cfg, "moe_aux_loss_coeff", reason, "give one value per type")
    elif without_loss := [
        kind for kind, value in zip(kinds, coefficients) if value and kind in NO_LOSS and kind != "none"
    ]:
        yield problem(cfg, "moe_aux_loss_coeff", "applies only to auxiliary losses", f"0 for {', '.join(without_loss)}")
    if len(kinds) > 1 and (set(NO_LOSS) & set(kinds) or len(set(kinds)) < len(kinds)):
        reason = f"may list several auxiliary losses, each once, but not together with {', '.join(NO_LOSS)}"
        yield problem(cfg, "moe_router_load_balancing_type", reason)


_RULES = collect_rules(sys.modules[__name__])


def model_problems(cfg: ModelSettings, explicit: Collection[str]) -> Problems:
    """Yield the problems of a model whose derived sizes are filled in. ``explicit``: fields that the user set."""
    yield from _heads_divide_hidden_size(cfg, explicit)
    for rule in _RULES:
        yield from rule(cfg)
    for item in unmet(read_table(__package__), cfg, explicit, _flags()):
        yield problem(cfg, item.field, item.reason, item.fix)


def library_problems(cfg: ModelSettings, explicit: Collection[str]) -> list[Problem]:
    """Return the same problems in terms of fields, and those that other checks of the command line cover."""
    fields = {name: spec.field for spec in _flags().values() for name in spec.names}

    def named(text: str) -> str:
        return re.sub(r"--[a-z0-9-]+", lambda match: fields.get(match[0], match[0][2:].replace("-", "_")), text)

    problems = [
        replace(item, flag=fields[item.flag], reason=named(item.reason), fix=named(item.fix))
        for item in model_problems(cfg, explicit)
    ]
    if cfg.multi_latent_attention and cfg.num_query_groups != cfg.num_attention_heads:
        problems.append(
            Problem("num_query_groups", "excludes multi_latent_attention", cfg.num_query_groups, "remove it")
        )
    if cfg.sequence_parallel and cfg.tensor_model_parallel_size == 1:
        problems.append(Problem("sequence_parallel", "needs tensor_model_parallel_size > 1", True))
    return problems


def invalid_values(cfg: ModelSettings) -> list[Problem]:
    """Return a problem for each field whose value its flag would reject: outside its range, or not among its choices.
    Dense models may have any choice of experts, which programs pass to all models."""
    ignored = {spec.field for spec in flags_of(MoEConfig) if spec.choices} if cfg.num_moe_experts is None else set()
    reasons = {name: spec.refusal(getattr(cfg, name)) for name, spec in _flags().items() if name not in ignored}
    return [Problem(name, reason, getattr(cfg, name)) for name, reason in reasons.items() if reason]
