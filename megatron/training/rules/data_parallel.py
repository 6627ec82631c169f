"""Rules about data parallelism: gradient buckets, the distributed optimizer, fully sharded weights."""

from __future__ import annotations

from megatron.core.config.problems import Problems, common_divisors, problem
from megatron.training.config.pretrain_config import PretrainConfig


def optimizer_instances(cfg: PretrainConfig) -> Problems:
    """Require a number of instances that divides DP x CP, and with FSDP2 leaves several ranks each."""
    field, ranks = "num_distributed_optimizer_instances", cfg.data_parallel_size * cfg.model.context_parallel_size
    instances = cfg.distributed.num_distributed_optimizer_instances
    if instances > 1 and ranks % instances:
        reason = f"does not divide the {ranks} ranks of data and context parallelism"
        yield problem(cfg, field, reason, f"one of {common_divisors(ranks)}")
    if cfg.distributed.use_torch_fsdp2 and instances == ranks > 1:
        yield problem(cfg, field, "leaves one rank per instance, which shards nothing", f"less than {ranks}")
