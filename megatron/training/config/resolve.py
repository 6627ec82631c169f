"""Fills in derived settings. Pure: returns a new frozen object, checks and prints nothing.

What contradicts itself is left as it is, for the rules to name; so nothing here may fail on half-sensible values."""

from __future__ import annotations

import math
import os

from megatron.core.config.model_rules import offloadable_modules
from megatron.core.config.model_settings import following_sizes
from megatron.core.config.moe import depends_on_micro_batch, expert_tensor_ranks
from megatron.core.schedules import batch_size as batch_sizes
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import PretrainConfig, compose

DEFAULT_SPLIT = "969,30,1"
MOCK_SPLIT = "1,1,1"


def gpu_present() -> bool:
    """Whether this machine has an NVIDIA GPU that the process may use, without loading torch."""
    return os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")


def rank_order(cfg: PretrainConfig) -> str:
    """Axes of the rank grid, the fastest first."""
    return "tp-cp-ep-pp-dp" if cfg.distributed.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"


def resolve(cfg: PretrainConfig, world_size: int, *, gpus: bool | None = None) -> PretrainConfig:
    """Return the configuration of a run on ``world_size`` ranks: a copy of ``cfg`` with all derived settings.
    Switches off settings without effect. Neither checks rules nor logs; unreadable values stay for the rules.

    Args:
        gpus: whether ranks have GPUs; None: look."""
    flat = cfg.flat.with_settings(**dict.fromkeys(overlaps_without_halves(cfg.flat), False))
    values: dict[str, object] = {"world_size": world_size}
    values |= _implementations(flat, gpu_present() if gpus is None else gpus)
    values |= _without_effect(flat) | _precision(flat) | _data(flat) | _network(flat)  # the family's values win
    flat = flat.with_settings(**values)
    flat = flat.with_settings(**_batches(flat))
    return compose(flat.with_settings(**_schedules(flat), resolved=True))


def overlaps_without_halves(cfg: FlatConfig) -> dict[str, str]:
    """Return the requested overlap fields that cannot split a micro-batch into halves, each with the first applicable
    reason. `resolve` turns them off; results do not depend on them."""
    whole = {"mlp", "layernorm", "mla_up_proj", "moe", "shared_experts"} & set(cfg.recompute_modules or ())
    reasons = {
        "--use-torch-fsdp2 gathers a layer's weights as a whole": cfg.use_torch_fsdp2,
        f"--recompute-modules {' '.join(sorted(whole))} recomputes a layer in one piece": bool(whole),
        "capacity, sinkhorn, quantiles and aux_loss look at the whole micro-batch": cfg.num_moe_experts is not None
        and depends_on_micro_batch(cfg),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    asked = [name for name in ("tp_comm_overlap", "overlap_moe_expert_parallel_comm") if getattr(cfg, name)]
    return dict.fromkeys(asked, reason) if reason else {}


def needs_built_in_layers(cfg: FlatConfig) -> list[str]:
    """Return the set flags that built-in layers support and Transformer Engine's layers do not, as text for messages;
    with any of them `resolve` switches --transformer-impl to local. Empty if there are none."""
    tp, groups = cfg.tensor_model_parallel_size, cfg.num_query_groups
    if groups is None:
        groups = 1 if cfg.group_query_attention else cfg.num_attention_heads
    needs = {
        "--delay-wgrad-compute": cfg.delay_wgrad_compute,
        "--tp-comm-overlap": cfg.tp_comm_overlap and tp > 1,
        "--overlap-moe-expert-parallel-comm": cfg.overlap_moe_expert_parallel_comm,
        "--use-torch-fsdp2": cfg.use_torch_fsdp2,
        "--multi-latent-attention": cfg.multi_latent_attention,
        "--fp32-residual-connection": cfg.fp32_residual_connection,
        f"--pipeline-schedule {cfg.pipeline_schedule}": cfg.pipeline_schedule in ("zero-bubble", "zero-bubble-h2"),
        "--recompute-modules layernorm": "layernorm" in (cfg.recompute_modules or ()),
        "--fine-grained-activation-offloading": cfg.fine_grained_activation_offloading,
        "--fp8-param-gather": cfg.fp8 is not None and cfg.fp8_param_gather,
        f"--num-query-groups {groups} below --tensor-model-parallel-size {tp}": groups is not None and tp > groups,
    }
    return [flag for flag, needed in needs.items() if needed]


def _without_effect(cfg: FlatConfig) -> dict[str, object]:
    """Return new values that switch off settings of features that are not enabled."""
    values: dict[str, object] = {}
    if not cfg.save:
        values.update(save_interval=None, save_retain_interval=None, save_hf_interval=None, async_save=False)
        values.update(keep_last_checkpoints=None, non_persistent_save_interval=None)
    if cfg.recompute_granularity != "full":
        values.update(recompute_method=None, recompute_num_layers=None)
    if cfg.use_torch_fsdp2:
        values.update(use_distributed_optimizer=False, overlap_param_gather=False)
    if cfg.pipeline_model_parallel_size == 1:
        values["delay_wgrad_compute"] = False
    if cfg.fine_grained_activation_offloading and cfg.offload_modules and cfg.recompute_granularity == "selective":
        modules = offloadable_modules(cfg)
        values.update(offload_modules=modules or None, fine_grained_activation_offloading=bool(modules))
    if cfg.fp8 is not None and not (cfg.bf16 or cfg.fp16):
        values["fp8_param_gather"] = False
    return values


def _implementations(cfg: FlatConfig, gpus: bool) -> dict[str, object]:
    """Return defaults and corrections: built-in layers where Transformer Engine lacks a flag, nccl or gloo by ``gpus``,
    no sequence parallelism or TP overlap with one tensor-parallel rank."""
    values: dict[str, object] = {}
    if cfg.transformer_impl == "transformer_engine" and needs_built_in_layers(cfg):
        values["transformer_impl"] = "local"
    if cfg.distributed_backend is None:
        values["distributed_backend"] = "nccl" if gpus else "gloo"
    if cfg.recompute_activations and cfg.recompute_granularity is None:
        values["recompute_granularity"] = "selective"
    if cfg.tensor_model_parallel_size == 1:  # scripts set their flags once and vary the size: nothing to split
        values.update(sequence_parallel=False, tp_comm_overlap=False, distribute_saved_activations=False)
    if not cfg.profile_ranks:
        values["profile_ranks"] = [0]
    return values


def _network(cfg: FlatConfig) -> dict[str, object]:
    num_layers = cfg.encoder_num_layers if cfg.num_layers is None else cfg.num_layers
    values: dict[str, object] = {"num_layers": num_layers, **following_sizes(cfg, gated=cfg.swiglu)}
    values["encoder_num_layers"] = cfg.encoder_num_layers or num_layers
    if cfg.num_query_groups is None and cfg.group_query_attention:
        values["num_query_groups"] = 1
    if not cfg.pad_vocab_size:
        values["make_vocab_size_divisible_by"] = 1
    return values | cfg.family.derive(cfg.with_settings(**values))


def _precision(cfg: FlatConfig) -> dict[str, object]:
    """Return precision settings that follow from others: fp32 gradient reduction unless --grad-reduce-in-bf16, fp32
    softmax with query-key layer scaling, and no NaN check under fp16 with a dynamic loss scale."""
    values: dict[str, object] = {}
    if not cfg.grad_reduce_in_bf16:
        values["accumulate_allreduce_grads_in_fp32"] = True
    if cfg.apply_query_key_layer_scaling:
        values["attention_softmax_in_fp32"] = True
    if cfg.fp16 and cfg.loss_scale is None:
        values["check_for_nan_in_loss_and_grad"] = False  # overflows are the dynamic loss scale's business
    return values


def _data(cfg: FlatConfig) -> dict[str, object]:
    """Return the data settings that follow from others: equal --seq-length and --encoder-seq-length if one is unset,
    the ``single`` loader, and the default split (1,1,1 for mock data; 969,30,1 for single-source data)."""
    values: dict[str, object] = {}
    length = cfg.seq_length if cfg.seq_length is not None else cfg.encoder_seq_length
    values["seq_length"] = length
    values["encoder_seq_length"] = length if cfg.encoder_seq_length is None else cfg.encoder_seq_length
    if cfg.dataloader_type is None:
        values["dataloader_type"] = "single"
    if cfg.mock_data:
        values["split"] = MOCK_SPLIT
    elif cfg.split is None and (cfg.data_path or cfg.data_args_path):
        values["split"] = DEFAULT_SPLIT
    return values


def _batches(cfg: FlatConfig) -> dict[str, object]:
    """Return the data-parallel size (at least 1) and unset batch sizes. Evaluation uses the training sizes, rounded
    down to a valid size with --decrease-batch-size-if-needed. Needs the sequence length."""
    replica = cfg.tensor_model_parallel_size * cfg.pipeline_model_parallel_size * cfg.context_parallel_size
    data_parallel_size = max(cfg.world_size // replica, 1) if replica > 0 else 1
    values: dict[str, object] = {"data_parallel_size": data_parallel_size}
    size = cfg.global_batch_size
    if size is None and cfg.step_batch_size_schedule and cfg.seq_length:
        try:
            size = batch_sizes.parse_step_schedule(cfg.step_batch_size_schedule, cfg.seq_length)[-1].size
        except batch_sizes.ScheduleError:
            size = None  # a rule says what is wrong with it
    elif size is None and cfg.micro_batch_size:
        size = cfg.micro_batch_size * data_parallel_size
    values["global_batch_size"] = size
    if cfg.eval_global_batch_size is None:
        values["eval_global_batch_size"] = size
        if size and cfg.decrease_batch_size_if_needed and (cfg.eval_micro_batch_size or cfg.micro_batch_size):
            unit = (cfg.eval_micro_batch_size or cfg.micro_batch_size) * data_parallel_size
            values["eval_global_batch_size"] = max(size // unit, 1) * unit
    if cfg.eval_micro_batch_size is None:
        values["eval_micro_batch_size"] = cfg.micro_batch_size
    return values


def _schedules(cfg: FlatConfig) -> dict[str, object]:
    """Return --train-iters (0 with --skip-train; computed from --train-samples), the decay length, which defaults to
    the training length in the same unit, and the ends of a constant weight decay. Needs the batch sizes."""
    values: dict[str, object] = {}
    if cfg.skip_train and cfg.train_iters is None:
        values["train_iters"] = 0
    if cfg.train_samples is None:
        if cfg.lr_decay_iters is None:
            values["lr_decay_iters"] = cfg.train_iters
    else:
        if cfg.lr_decay_samples is None:
            values["lr_decay_samples"] = cfg.train_samples
        if cfg.train_iters is None and cfg.micro_batch_size and cfg.seq_length:
            values["train_iters"] = _iterations(cfg, cfg.train_samples)
    if cfg.weight_decay_incr_style == "constant":
        for name in ("start_weight_decay", "end_weight_decay"):
            if getattr(cfg, name) is None:
                values[name] = cfg.weight_decay
    return values


def _iterations(cfg: FlatConfig, samples: int) -> int | None:
    """Return the iterations that consume ``samples``, including batch-size ramps. Returns None if a batch-size schedule
    is unreadable or a size is too small for the ranks, which rules report."""
    try:
        plateaus = batch_sizes.batch_size_plateaus(cfg)
    except batch_sizes.ScheduleError:
        return None
    if min(plateau.size for plateau in plateaus) < cfg.micro_batch_size * cfg.data_parallel_size:
        return None
    return batch_sizes.train_iters_from_samples(cfg, samples, cfg.data_parallel_size)


def smallest_world_size(cfg: PretrainConfig) -> int:
    """Ranks of one model replica."""
    model = cfg.model
    dense = max(model.tensor_model_parallel_size, 1) * max(model.context_parallel_size, 1)
    if model.num_moe_experts:
        dense = math.lcm(dense, model.expert_model_parallel_size * expert_tensor_ranks(model))
    return max(model.pipeline_model_parallel_size, 1) * dense
