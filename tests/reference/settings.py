"""Settings of a run, under the names of the flags and with Megatron-LM's documented defaults.

``--name-of-it VALUE`` is ``c.name_of_it``; switches are False unless given. This module uses no code of the program,
so that the comparison also covers the parsing of its command line.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace as Settings

SIZES = dict.fromkeys(  # required
    ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "vocab_size", "lr")
)
NETWORK = {
    "group_query_attention": False, "num_query_groups": None, "ffn_hidden_size": None, "kv_channels": None,
    "normalization": "LayerNorm", "norm_epsilon": 1e-5, "apply_layernorm_1p": False,
    "norm_placement": "pre", "use_parallel_residual": False, "apply_embedding_scaling": False,
    "share_parallel_norm": False, "learned_position_offset": 0, "output_layer_bias": False,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
    "final_logit_softcapping": None, "apply_residual_connection_post_layernorm": False, "disable_bias_linear": False,
    "add_qkv_bias": False,
    "no_bias_gelu_fusion": False, "swiglu": False, "squared_relu": False, "quick_geglu": False,
    "geglu": False, "softmax_scale": None, "attn_logit_softcapping": None, "qk_layernorm_across_heads": False,
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "qk_layernorm": False, "qk_l2_norm": False,
    "window_size": None, "window_attn_skip_freq": None, "untie_embeddings_and_output_weights": False,
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "seed": 1234, "init_method_std": 0.02,
    "embedding_init_method_std": None, "init_method_xavier_uniform": False,
}  # fmt: skip
POSITIONS = {
    "position_embedding_type": "learned_absolute", "rotary_base": 10000, "rotary_percent": 1.0,
    "rotary_base_local": None, "no_rope_freq": None, "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": 1, "use_rope_scaling": False,
    "rope_scaling_factor": 8.0, "rotary_scaling_factor": 1.0, "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "no_yarn_correction_range_round_to_int": False, "mscale": 1.0,
    "mscale_all_dim": 0.0,
}  # fmt: skip
LATENT_ATTENTION = {
    "multi_latent_attention": False, "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": None, "softmax_type": "vanilla",
}  # fmt: skip
EXPERTS = {
    "num_experts": None, "moe_layer_freq": 1, "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False, "moe_router_topk": 2, "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False, "moe_router_num_groups": None, "moe_router_group_topk": None,
    "moe_router_group_score_topk": None,
    "moe_router_topk_scaling_factor": None, "moe_router_enable_expert_bias": False,
    "moe_router_quantile_balancing_ema": 0.0, "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None, "moe_expert_capacity_factor": None, "moe_token_drop_policy": "probs",
    "mtp_num_layers": None, "mtp_use_repeated_layer": False, "mtp_loss_scaling_factor": 0.1,
}  # fmt: skip
ENCODERS = {
    "bert_no_binary_head": False, "bert_num_tokentypes": None,
    "mask_prob": 0.15, "short_seq_prob": 0.1, "encoder_num_layers": None,
    "decoder_num_layers": None, "encoder_seq_length": None, "decoder_seq_length": None,
    "embed_layernorm": False, "disable_norm_bias": False, "relu": False, "exact_gelu": False,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "scale_decoder_outputs": False,
}  # fmt: skip
FP8 = {
    "fp8_format": None, "fp8_recipe": "delayed", "fp8_margin": 0, "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent", "no_fp8_wgrad": False, "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1,
}  # fmt: skip
OPTIMIZER = {
    "optimizer": "adam", "weight_decay": 0.01, "start_weight_decay": None, "end_weight_decay": None,
    "weight_decay_incr_style": "constant", "apply_wd_to_qk_layernorm": False, "clip_grad": 1.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_eps": 1e-8, "sgd_momentum": 0.9, "decoupled_lr": None, "decoupled_min_lr": None,
    "fp16": False, "bf16": False, "loss_scale": None, "initial_loss_scale": 2.0**32, "min_loss_scale": 1.0,
    "loss_scale_window": 1000, "hysteresis": 2, "lion_beta1": 0.95, "lion_beta2": 0.98,
    "muon_scalar_optimizer": "adam", "muon_momentum": 0.9, "muon_nesterov": False,
    "muon_no_split_qkv": False, "muon_split_qkv_per_head": False, "muon_split_gate_up": False,
    "muon_scale_mode": "spectral", "muon_extra_scale_factor": 1.0, "muon_coefficient_type": "quintic",
    "muon_num_ns_steps": 5, "adaptive_muon_moment2_method": "adamuon", "adaptive_muon_beta2": 0.95,
    "adaptive_muon_eps": 1e-8,
}  # fmt: skip
SCHEDULE = {
    "micro_batch_size": 1, "global_batch_size": None, "rampup_batch_size": None, "step_batch_size_schedule": None,
    "decrease_batch_size_if_needed": False, "train_iters": None, "train_samples": None, "iterations_to_skip": 0,
    "min_lr": 0.0, "lr_decay_style": "linear", "lr_decay_iters": None, "lr_decay_samples": None, "lr_warmup_iters": 0,
    "lr_warmup_samples": 0, "lr_warmup_fraction": None, "lr_warmup_init": 0.0, "lr_wsd_decay_style": "exponential",
    "lr_wsd_decay_iters": None, "lr_wsd_decay_samples": None,
}  # fmt: skip
DATA = {
    "data_path": None, "train_data_path": None, "valid_data_path": None, "test_data_path": None, "split": (969, 30,
    1), "dataloader_type": "single", "mid_level_dataset_surplus": 0.005, "reset_position_ids": False,
    "reset_attention_mask": False, "eod_mask_loss": False, "null_tokenizer_eod_id": None, "null_tokenizer_pad_id": -1,
    "allow_ambiguous_pad_tokens": False, "eval_iters": 100, "eval_interval": None, "start_eval_at_iter": 0,
    "eval_global_batch_size": None, "eval_micro_batch_size": None, "full_validation": False,
    "multiple_validation_sets": False, "validation_set_names": None,
}  # fmt: skip
DEFAULTS = {
    **SIZES, **NETWORK, **POSITIONS, **LATENT_ATTENTION, **EXPERTS, **ENCODERS, **FP8, **OPTIMIZER, **SCHEDULE, **DATA,
}  # fmt: skip
OTHER_WAYS = ("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "make_vocab_size_divisible_by",
              "cross_entropy_chunk_tokens", "recompute_activations", "moe_router_dtype", "moe_grouped_gemm",
              "use_packed_sequence", "moe_token_dispatcher_type", "moe_permute_fusion", "moe_router_fusion",
              "moe_pad_expert_input_to_capacity", "moe_shared_expert_overlap")  # fmt: skip
"""Flags that ask for another way to the same numbers."""


def read(argv: list[str]) -> Settings:
    """A command line. A value is the Python literal that it reads as, else a string; several are a list."""
    values: dict[str, object] = dict(DEFAULTS)
    starts = [index for index, word in enumerate(argv) if word.startswith("--")] + [len(argv)]
    for start, end in zip(starts, starts[1:]):
        name, words = argv[start][2:].replace("-", "_"), [_literal(word) for word in argv[start + 1 : end]]
        if name not in DEFAULTS and name not in OTHER_WAYS:
            raise KeyError(f"{argv[start]} is unknown to the reference")
        values[name] = True if not words else words[0] if len(words) == 1 else words
    for name in ("num_layers", "seq_length"):
        values[name] = values[name] or values[f"encoder_{name}"]
    return Settings(**values)


def _literal(word: str) -> object:
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word
