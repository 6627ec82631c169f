"""Rules about data parallelism: gradient buckets, the distributed optimizer, fully sharded weights."""

from __future__ import annotations

from megatron.core.config.problems import Problems, common_divisors, problem
from megatron.training.config.pretrain_config import PretrainConfig


def bucket_size_given_once(cfg: PretrainConfig) -> Problems:
    if cfg.distributed.ddp_num_buckets is not None and cfg.distributed.ddp_bucket_size is not None:
        yield problem(cfg, "ddp_num_buckets", "contradicts --ddp-bucket-size", "give one of the two")


def optimizer_instances(cfg: PretrainConfig) -> Problems:
    """Reject several instances of an optimizer that is not sharded, and a number that does not divide DP x CP."""
    instances, ranks = (
        cfg.distributed.num_distributed_optimizer_instances,
        cfg.data_parallel_size * cfg.model.context_parallel_size,
    )
    if instances <= 1:
        return
    if not (cfg.distributed.use_distributed_optimizer or cfg.distributed.use_torch_fsdp2):
        reason = "requires a sharded optimizer"
        yield problem(cfg, "num_distributed_optimizer_instances", reason, "add --use-distributed-optimizer")
    if ranks % instances:
        fitting = common_divisors(ranks)
        reason = f"does not divide the {ranks} ranks of data and context parallelism"
        yield problem(cfg, "num_distributed_optimizer_instances", reason, f"one of {fitting}")


def fp32_reduce_scatter(cfg: PretrainConfig) -> Problems:
    field = "ddp_reduce_scatter_with_fp32_accumulation"
    if getattr(cfg.flat, field) and not (
        cfg.distributed.use_distributed_optimizer and cfg.optimizer.grad_reduce_in_bf16
    ):
        reason = "gradients are already reduced in float32 unless --grad-reduce-in-bf16 is given, and only "
        reason += "--use-distributed-optimizer scatters them"
        yield problem(cfg, field, reason, "give all three, or none")


def torch_fsdp2_settings(cfg: PretrainConfig) -> Problems:
    """Reject what FSDP2 does not support: pipeline parallelism, bucket sizes, as many instances as DP x CP ranks."""
    if not cfg.distributed.use_torch_fsdp2:
        if not cfg.distributed.torch_fsdp2_reshard_after_forward:
            yield problem(cfg, "torch_fsdp2_reshard_after_forward", "requires --use-torch-fsdp2")
        return
    if cfg.model.pipeline_model_parallel_size > 1:
        reason = "would all-gather every layer once per micro-batch and stage; it does not support"
        yield problem(cfg, "use_torch_fsdp2", f"{reason} --pipeline-model-parallel-size", "use tensor parallelism")
    for field in ("ddp_bucket_size", "ddp_num_buckets"):
        if getattr(cfg.flat, field) is not None:
            yield problem(cfg, field, "has no effect with --use-torch-fsdp2, which communicates per layer", "remove it")
    ranks = cfg.data_parallel_size * cfg.model.context_parallel_size
    if cfg.distributed.num_distributed_optimizer_instances == ranks > 1:
        reason = "leaves one rank per instance, which shards nothing"
        yield problem(cfg, "num_distributed_optimizer_instances", reason, f"less than {ranks}")
