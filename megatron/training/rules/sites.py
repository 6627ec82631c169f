"""Names in --recompute-modules and --offload-modules are sites of the model, which its description lists."""

from __future__ import annotations

from megatron.core.config.problems import Problems, problem
from megatron.training.config.pretrain_config import PretrainConfig


def sites_exist(cfg: PretrainConfig) -> Problems:
    """Reject names that no layer has. Layers without a description are checked when the model is built."""
    requested = {
        "recompute_modules": cfg.model.recompute_modules or (),
        "offload_modules": cfg.model.offload_modules or (),
    }
    if not any(requested.values()):
        return
    model = cfg.describe(0)
    if model.unknown:
        return
    sites = {
        "recompute_modules": {name for saved in model.saved() for name in saved.modules},
        "offload_modules": {name for saved in model.saved() for name in saved.offload},
    }
    for field, names in requested.items():
        if unknown := [name for name in names if name not in sites[field]]:
            reason = f"{', '.join(unknown)} not available in this model"
            yield problem(cfg, field, reason, f"choose from {', '.join(sorted(sites[field]))}")
