"""Settings that follow from a hybrid pattern, and its rules."""

from __future__ import annotations

from megatron.core.config.hybrid import DEPTH, STAGE, depth_kinds, pattern_kinds
from megatron.core.config.layer_kinds import BRANCHES
from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.pipeline_parallel.stages import BranchNames


def derived(flat: Settings) -> dict[str, object]:
    """Return settings that follow from --hybrid-layer-pattern: number of layers, prediction depths, pipeline stages."""
    pattern, kinds = flat.hybrid_layer_pattern, pattern_kinds(flat)
    if not kinds:
        return {}
    values: dict[str, object] = {}
    if flat.num_layers is None:
        values |= {"num_layers": len(kinds), "encoder_num_layers": len(kinds)}
    layers, *depths = pattern.split(DEPTH)
    if depths and flat.mtp_num_layers is None:
        values["mtp_num_layers"] = len(depths)
    is_pipelined = flat.pipeline_model_parallel_size > 1
    if STAGE in layers and is_pipelined and flat.pipeline_model_parallel_layout is None:
        stages = [f"t*{len(stage)}" if stage else "" for stage in layers.split(STAGE)]
        values["pipeline_model_parallel_layout"] = "E" + STAGE.join(stages) + "m" * len(depths) + "L"
    return values


def branches(cfg: Settings) -> BranchNames | None:
    """Return the branch names of each layer of a hybrid model, else None."""
    return [[BRANCHES[kind].text] for kind in pattern_kinds(cfg.model)] or None


def hybrid_pattern(cfg: Settings) -> Problems:
    """Kinds of a hybrid pattern need their settings; its number of layers is the only one."""
    kinds, model = pattern_kinds(cfg.model), cfg.model
    if not kinds:
        return
    if len(kinds) != model.num_layers:
        reason = f"contradicts --hybrid-layer-pattern, which has {len(kinds)} layers"
        yield problem(cfg, "num_layers", reason, "remove it")
    if (model.mtp_num_layers or 0) != (depths := model.hybrid_layer_pattern.count(DEPTH)):
        reason = f"contradicts --hybrid-layer-pattern, which has {depths} prediction depths (/)"
        yield problem(cfg, "mtp_num_layers", reason, "remove it")
    kinds = kinds + depth_kinds(model)
    if "moe_layer_freq" in cfg.explicit:
        yield problem(cfg, "moe_layer_freq", "contradicts --hybrid-layer-pattern, which has E for experts", "remove it")
    if ("experts" in kinds) != (model.num_moe_experts is not None):
        fix = "give --num-experts" if "experts" in kinds else "remove --num-experts, or add E"
        yield problem(cfg, "hybrid_layer_pattern", "has E exactly if there are --num-experts", fix)
    if {"attention", "latent_attention"} <= {*kinds} or model.multi_latent_attention != ("latent_attention" in kinds):
        reason = "has + exactly if --multi-latent-attention is given, and then no *"
        yield problem(cfg, "hybrid_layer_pattern", reason)


def mamba_sizes(cfg: Settings) -> Problems:
    """Heads of Mamba-2 form equal groups, groups split over ranks."""
    model = cfg.model
    if "mamba" not in pattern_kinds(model) + depth_kinds(model) or not model.hidden_size:
        return
    heads, groups, tp = model.mamba_num_heads, model.mamba_num_groups, model.tensor_model_parallel_size
    default, rest = divmod(2 * model.hidden_size, model.mamba_head_dim)
    is_default = "hidden_size" in cfg.explicit and "mamba_num_heads" not in cfg.explicit  # no file states the heads
    if rest and is_default and heads == max(default, 1):
        reason = f"does not divide twice the hidden size, {2 * model.hidden_size}"
        yield problem(cfg, "mamba_head_dim", reason, "give --mamba-num-heads")
    if heads % groups:
        yield problem(cfg, "mamba_num_groups", f"does not divide {heads} heads", "--mamba-num-groups or -num-heads")
    if groups % tp:
        yield problem(cfg, "mamba_num_groups", f"is not a multiple of --tensor-model-parallel-size {tp}")
    elif "a2a" in model.cp_comm_type and groups // tp % model.context_parallel_size:
        reason = f"gives {groups // tp} groups per rank, which --cp-comm-type a2a does not split"
        yield problem(cfg, "mamba_num_groups", reason, "--cp-comm-type p2p, or a multiple")
