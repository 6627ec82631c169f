"""Rules of the flags of low-rank adapters. Torch-free."""

from __future__ import annotations

from megatron.core.config.lora import LoraConfig
from megatron.core.config.optional import used_fields
from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.models.adapters.transform import is_target, linear_weights


def adapter_flags_need_a_rank(cfg: Settings) -> Problems:
    """Reject settings of adapters without --lora-rank."""
    lora = cfg.group(LoraConfig)
    if lora.lora_rank is None:
        for field in used_fields(LoraConfig, lora):
            yield problem(cfg, field, "has no effect without --lora-rank", "add --lora-rank")


def adapters_keep_the_base(cfg: Settings) -> Problems:
    """Reject settings that change frozen weights or compute without the adapters."""
    model = cfg.model
    balances = model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate
    unsupported = {
        f"--transformer-impl {model.transformer_impl}": model.transformer_impl != "local",
        "--batch-invariant-mode": model.batch_invariant_mode,
        "--fp8-recipe delayed": model.fp8 is not None and model.fp8_recipe == "delayed",
        "--fp8-param-gather": model.fp8_param_gather,
        "--qk-clip": model.qk_clip,
        "--moe-use-upcycling": cfg.upcycling.moe_use_upcycling,
        "--moe-router-enable-expert-bias unless --moe-router-bias-update-rate is 0": balances,
    }
    for flag in [flag for flag, is_on in unsupported.items() if is_on and cfg.group(LoraConfig).lora_rank is not None]:
        yield problem(cfg, "lora_rank", f"is not supported with {flag}", "remove one of them")


def adapter_targets_exist(cfg: Settings) -> Problems:
    """Reject targets without a linear layer that adapters support, and DoRA and dropout of experts."""
    lora = cfg.group(LoraConfig)
    if lora.lora_rank is None or lora.lora_target_modules is None:
        return
    model = cfg.family.describe(cfg, 0)
    names = [param.name.removesuffix(".weight") for param in linear_weights(model)]
    experts = [name for name in names if ".experts." in name and is_target(name, lora.lora_target_modules)]
    for field in used_fields(LoraConfig, lora) if experts else ():
        if field in ("lora_use_dora", "lora_dropout"):
            reason = f"is not supported for experts, such as {experts[0]}"
            yield problem(cfg, field, reason, "remove it or the experts from --lora-target-modules")
    for target in () if model.unknown else lora.lora_target_modules:
        if not any(is_target(name, [target]) for name in names):
            layers = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            reason = f"{target} matches no linear layer that can have an adapter"
            yield problem(cfg, "lora_target_modules", reason, f"choose from {layers}, or patterns of full names")
