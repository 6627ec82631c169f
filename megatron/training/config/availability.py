"""What is not available yet, field by field, and what is accepted but has nothing to do here.

A capability that does not exist is refused, never ignored. When one is built, its rows go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config.cli import FlagSpec, Problem


@dataclass(frozen=True)
class NotYet:
    """A capability that does not exist: which values of the field would need it (default: all but the default)."""

    what: str
    needs: Callable[[Any], bool] | None = None
    values: str = ""


def _beyond_one(what: str) -> NotYet:
    return NotYet(what, lambda size: size is not None and size > 1, "larger than 1")


def _only(*choices: Any, what: str) -> NotYet:
    return NotYet(what, lambda value: value not in choices, "other than " + ", ".join(map(str, choices)))


def _each(what: str, names: str) -> dict[str, NotYet]:
    return dict.fromkeys(names.split(), NotYet(what))


_BERT_T5 = "the BERT and T5 models are"

NOT_YET: dict[str, NotYet] = {
    "expert_model_parallel_size": _beyond_one("expert parallelism is"),
    "expert_tensor_parallel_size": _beyond_one("expert parallelism is"),
    **_each("expert parallelism is", "overlap_moe_expert_parallel_comm"),
    **_each("gathering weights during the optimizer step is", "overlap_param_gather_with_optimizer_step"),
    **_each(
        "optimizer state in host memory is",
        "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
        "overlap_cpu_optimizer_d2h_h2d",
    ),
    **_each("a second time limit is", "distributed_timeout_seconds_after_init"),
    **_each(
        "fully sharded data parallelism other than torch's is",
        "use_megatron_fsdp data_parallel_sharding_strategy init_model_with_meta_device",
    ),
    **_each("activation offloading is", "cpu_offloading_num_layers"),
    **_each(
        "fp8 is",
        "fp8 fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_param_gather "
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    ),
    **_each(
        "mixture of experts is",
        "num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate "
        "moe_shared_expert_overlap moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff "
        "moe_input_jitter_eps moe_router_score_function moe_router_pre_softmax moe_router_num_groups "
        "moe_router_group_topk moe_router_topk_scaling_factor moe_router_dtype moe_router_enable_expert_bias "
        "moe_router_bias_update_rate moe_router_force_load_balancing moe_router_padding_for_quantization "
        "moe_grouped_gemm moe_token_dispatcher_type moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
        "moe_token_drop_policy moe_per_layer_logging moe_permute_fusion moe_router_fusion",
    ),
    **_each(
        "multi-latent attention is",
        "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type",
    ),
    "transformer_impl": _only("local", "transformer_engine", what="layers for inference alone are"),
    "cuda_graph_impl": _only("none", "local", what="this kind of CUDA graph is"),
    "spec": NotYet("a layer specification of your own is", lambda value: value not in (None, ["local"])),
    "optimizer": _only("adam", "sgd", what="this optimizer is"),
    "position_embedding_type": _only("learned_absolute", "rope", "yarn", "none", what="this position embedding is"),
    "cross_entropy_fusion_impl": _only("native", what="the cross entropy of Transformer Engine is"),
    **_each(_BERT_T5, "decoder_num_layers decoder_seq_length bert_binary_head mask_prob short_seq_prob"),
    "tokenizer_type": NotYet(
        "this tokenizer is",
        lambda value: value in ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer"),
        "MultimodalTokenizer, NullMultimodalTokenizer, SFTTokenizer",
    ),
    **_each("the slow tokenizer implementation is", "tokenizer_hf_no_use_fast"),
    "ckpt_format": _only("torch_dist", what="writing this checkpoint format is"),
    **_each("checkpoint conversion is", "ckpt_convert_format ckpt_convert_save"),
    **_each("saving in the background is", "async_save async_strategy use_persistent_ckpt_worker"),
    "dist_ckpt_strictness": _only(
        "assume_ok_unexpected", "raise_unexpected", "raise_all", what="loading in spite of missing or unused keys is"
    ),
    "rerun_mode": NotYet("gathering statistics by rerunning steps is", lambda value: value == "report_stats"),
    **_each(
        "text generation with these limits is",
        "inference_batch_times_seqlen_threshold max_tokens_to_oom inference_max_requests inference_max_seq_length",
    ),
}
"""By field name. A field that is not here is available."""

NO_EFFECT: dict[str, str] = {
    "tp_comm_overlap_cfg": "halves of a micro-batch take turns, and there is nothing to tune",
    "calculate_per_token_loss": "the loss is always normalised by the tokens of the global batch",
    "use_cpu_initialization": "initial weights are the same on every device layout",
    "create_attention_mask_in_dataloader": "the loader never builds dense masks",
    "ckpt_fully_parallel_save": "which rank writes what is chosen by the writer",
    "ckpt_fully_parallel_load": "which rank reads what is chosen by the reader",
    "ckpt_assume_constant_structure": "there is no plan to keep",
    "dist_ckpt_optim_fully_reshardable": "optimizer state always is",
    "auto_detect_ckpt_format": "the format of what is loaded is always detected",
    "local_rank": "the device of a rank follows LOCAL_RANK, which every launcher sets",
    "ddp_average_in_collective": "gradients are sums, scaled once",
    "align_grad_reduce": "every stage reduces a bucket as soon as it is complete",
    "align_param_gather": "every stage gathers its weights as soon as they are updated",
    "enable_gloo_process_groups": "gloo groups are made only where they are used",
    "padded_vocab_size": "the model pads by itself, and padding is inert",
    "trust_remote_code": "code that comes with a tokenizer is never run",
    "enable_one_logger": "there is no such service",
    "masked_softmax_fusion": "a fusion never changes results",
    "cross_entropy_loss_fusion": "GPUs always use the fused kernels, which never change results",
    "fp16_lm_cross_entropy": "16-bit logits are never widened in memory",
    "pin_cpu_grads": "nothing is offloaded",
    "pin_cpu_params": "nothing is offloaded",
    "rerun_mode": "a NaN loss stops the run; steps are not run again",
}
"""Accepted by field name: there is nothing left to choose, for this reason."""


def unavailable(specs: Iterable[FlagSpec], values: Callable[[str], Any], explicit: frozenset[str]) -> Iterator[Problem]:
    """A problem for every setting that needs a capability that does not exist.

    Args:
        values: from field name to value.
        explicit: fields set by the user; others are refused only where ``needs`` says so.
    """
    for spec in specs:
        entry = NOT_YET.get(spec.field)
        if entry is None:
            continue
        value = values(spec.field)
        needed = entry.needs(value) if entry.needs else value != spec.default and spec.field in explicit
        if needed:
            shown = {} if spec.is_bool else {"value": value}
            yield Problem(spec.names[0], f"{entry.what} not available yet", fix="leave it out", **shown)


def status(spec: FlagSpec) -> str:
    """One phrase for the flag reference: yes, not yet, or without effect."""
    entry = NOT_YET.get(spec.field)
    if entry is not None:
        return "not yet" + (f": {entry.values}" if entry.values else "")
    return "no effect: " + NO_EFFECT[spec.field] if spec.field in NO_EFFECT else "yes"
