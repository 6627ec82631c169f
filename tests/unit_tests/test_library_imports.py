"""The names that existing programs import, each where they look for it."""

import inspect
from importlib import import_module

import pytest

from megatron.core.config.errors import MissingModule

NAMES = {
    "megatron.core": "parallel_state mpu tensor_parallel dist_checkpointing",
    "megatron.core.package_info": "__version__",
    "megatron.core.utils":
        "StragglerDetector divide flatten_batch_for_packed_sequences get_attr_wrapped_model get_batch_on_this_cp_rank "
        "get_batch_on_this_hybrid_cp_rank get_batch_on_this_tp_rank get_model_config get_te_version "
        "get_thd_batch_on_this_cp_rank get_torch_version is_te_min_version is_torch_min_version",
    "megatron.core.parallel_state":
        "get_hybrid_data_context_parallel_groups "
        "initialize_model_parallel destroy_model_parallel model_parallel_is_initialized "
        "get_tensor_model_parallel_rank get_tensor_model_parallel_world_size get_tensor_model_parallel_group "
        "get_pipeline_model_parallel_rank get_pipeline_model_parallel_world_size get_pipeline_model_parallel_group "
        "get_data_parallel_rank get_data_parallel_world_size get_data_parallel_group get_context_parallel_rank "
        "get_context_parallel_world_size get_context_parallel_group get_expert_model_parallel_rank "
        "get_expert_model_parallel_world_size get_expert_model_parallel_group is_pipeline_first_stage "
        "is_pipeline_last_stage is_initialized get_model_parallel_group get_tensor_model_parallel_src_rank "
        "get_data_parallel_src_rank get_virtual_pipeline_model_parallel_rank "
        "get_virtual_pipeline_model_parallel_world_size set_virtual_pipeline_model_parallel_rank "
        "get_expert_tensor_parallel_rank get_expert_data_parallel_rank",
    "megatron.core.mpu": "initialize_model_parallel get_data_parallel_rank",
    "megatron.core.models.gpt": "GPTModel",
    "megatron.core.models.gpt.gpt_model": "GPTModel",
    "megatron.core.models.gpt.gpt_layer_specs":
        "get_gpt_layer_local_spec get_gpt_layer_with_transformer_engine_spec get_gpt_decoder_block_spec "
        "get_gpt_mtp_block_spec get_gpt_decoder_layer_specs get_gpt_layer_with_inference_spec",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs":
        "get_transformer_block_with_experimental_attention_variant_spec "
        "get_transformer_layer_with_experimental_attention_variant_spec",
    "megatron.core.models.hybrid.hybrid_model": "HybridModel",
    "megatron.core.transformer.multi_token_prediction": "get_mtp_ranks mtp_on_this_rank",
    "megatron.core.transformer": "TransformerConfig MLATransformerConfig",
    "megatron.core.transformer.transformer_config": "TransformerConfig MLATransformerConfig",
    "megatron.core.transformer.module": "MegatronModule",
    "megatron.core.model_parallel_config": "ModelParallelConfig",
    "megatron.core.tensor_parallel":
        "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding vocab_parallel_cross_entropy broadcast_data",
    "megatron.core.tensor_parallel.random": "model_parallel_cuda_manual_seed",
    "megatron.core.pipeline_parallel": "get_forward_backward_func",
    "megatron.core.pipeline_parallel.schedules": "get_forward_backward_func",
    "megatron.core.distributed": "DistributedDataParallel DistributedDataParallelConfig finalize_model_grads",
    "megatron.core.distributed.finalize_model_grads": "finalize_model_grads",
    "megatron.core.optimizer": "get_megatron_optimizer OptimizerConfig",
    "megatron.core.optimizer_param_scheduler": "OptimizerParamScheduler",
    "megatron.core.num_microbatches_calculator":
        "get_num_microbatches get_current_global_batch_size get_current_running_global_batch_size "
        "get_micro_batch_size update_num_microbatches init_num_microbatches_calculator "
        "reconfigure_num_microbatches_calculator unset_num_microbatches_calculator "
        "destroy_num_microbatches_calculator",
    "megatron.core.timers": "Timers Timer",
    "megatron.core.dist_checkpointing": "save load",
    "megatron.core.datasets.utils": "compile_helpers",
    "megatron.core.datasets.blended_megatron_dataset_builder": "BlendedMegatronDatasetBuilder",
    "megatron.core.datasets.gpt_dataset": "GPTDatasetConfig GPTDataset MockGPTDataset",
    "megatron.core.datasets.masked_dataset": "MaskedWordPieceDataset MaskedWordPieceDatasetConfig",
    "megatron.core.datasets.bert_dataset": "BERTMaskedWordPieceDataset BERTMaskedWordPieceDatasetConfig",
    "megatron.core.datasets.t5_dataset": "T5MaskedWordPieceDataset T5MaskedWordPieceDatasetConfig",
    "megatron.core.datasets.helpers": "build_sample_idx build_mapping build_blending_indices",
    "megatron.core.datasets.helpers_cpp": "build_mapping build_blocks_mapping build_sample_idx_int64",
    "megatron.core.datasets.indexed_dataset": "IndexedDataset IndexedDatasetBuilder",
    "megatron.core.tokenizers": "MegatronTokenizer",
    "megatron.core.tokenizers.text.utils.build_tokenizer": "build_tokenizer",
    "megatron.core.tokenizers.utils.build_tokenizer": "build_tokenizer",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": "get_gpt_heterogeneous_layer_spec",
    "megatron.core.models.mamba": "MambaModel",
    "megatron.training.datasets.sft_dataset": "SFTDataset",
    "megatron.training.datasets.fim_dataset": "GPTFIMDataset GPTFIMDatasetConfig",
    "megatron.training":
        "get_args get_timers get_tokenizer print_rank_0 print_rank_last pretrain get_model initialize_megatron "
        "inprocess_restart set_startup_timestamps",
    "megatron.training.training": "pretrain get_model set_startup_timestamps update_seqlen_stats_from_cu_seqlens",
    "megatron.training.argument_utils":
        "gpt_config_from_args hybrid_config_from_args pretrain_cfg_container_from_args PretrainConfigContainer",
    "megatron.training.distillation": "LossFuncCallable",
    "megatron.legacy.model": "BertModel GPTModel T5Model",
    "megatron.training.program": "run",
    "megatron.core.placement": "parameter Shard",
    "megatron.training.arguments": "core_transformer_config_from_args parse_and_validate_args",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_of_existing_programs_are_where_they_look_for_them(module):
    result = import_module(module)
    for name in NAMES[module].split():
        if not hasattr(result, name):
            import_module(f"{module}.{name}")  # `from package import module`


MISSING_FAMILIES = {
    "megatron.core.datasets.multimodal_dataset": "vision-language models",
    "megatron.core.models.multimodal.llava_spec": "vision-language models",
    "megatron.core.datasets.retro.query.retro_dataset": "Retro models",
    "megatron.core.models.retro.utils": "Retro models",
    "megatron.legacy.data.biencoder_dataset_utils": "ICT",
}


@pytest.mark.parametrize("module, text", [
    ("core.ssm", "mixers have other classes here: megatron.core.transformer.ssm.mamba and gated_delta_net"),
    ("core.ssm.mamba_mixer", "--hybrid-layer-pattern builds them"),
    ("core.export.trtllm.trtllm_helper", "--saver hf writes a folder that TensorRT-LLM loads"),
    ("inference.text_generation", "use megatron generate or megatron serve"),
    ("post_training.arguments", "run ModelOpt on the folder that tools/checkpoint/convert.py --saver hf writes"),
    ("post_training.algos.distillation", "use megatron prune, distill or quantize"),
    ("post_training.model_provider", "use megatron prune, distill or quantize"),
    ("post_training.optimizer", "use megatron prune, distill or quantize"),
    ("rl.rl_utils", "megatron.core.rl serves trainers of your own"),
    ("core.inference.sampling_params", "megatron generate and megatron serve make text"),
    ("core.inference.contexts.dynamic_context", "megatron generate and megatron serve make text"),
    ("core.distributed.fsdp.src.megatron_fsdp", "--use-torch-fsdp2 shards weights"),
    ("core.post_training.modelopt.layers", "run ModelOpt on the folder"),
    ("training.config.instantiate_utils", "hold the settings"),
])  # fmt: skip
def test_missing_modules_name_their_replacement(module, text):
    with pytest.raises(MissingModule) as raised:
        import_module(f"megatron.{module}")
    assert str(raised.value).startswith("megatron.") and text in str(raised.value)
    assert "\n" not in str(raised.value) and isinstance(raised.value, ImportError)


def test_existing_packages_answer_for_names_and_modules_that_they_lack():
    """The package keeps its names; ``hasattr`` answers False, and an import statement gives the sentence of the row."""
    import megatron.core.inference as package

    assert not hasattr(package, "sampling_params") and import_module("megatron.core.inference.step")
    with pytest.raises(MissingModule, match=r"^megatron.core.inference.sampling_params: another engine"):
        from megatron.core.inference import sampling_params  # noqa: F401


@pytest.mark.parametrize("module", MISSING_FAMILIES)
def test_modules_of_missing_families_name_the_family(module):
    for _ in range(2):  # a failed import is tried again
        with pytest.raises(MissingModule, match=f"{MISSING_FAMILIES[module]}.* not available") as raised:
            import_module(module)
    assert isinstance(raised.value, ImportError) and not isinstance(raised.value, ModuleNotFoundError)


DEFAULTS = {
    "models.gpt.gpt_model.GPTModel": {
        "pre_process": True, "post_process": True, "parallel_output": True, "fp16_lm_cross_entropy": False,
        "share_embeddings_and_output_weights": False, "position_embedding_type": "learned_absolute",
        "rotary_percent": 1.0, "rotary_base": 10000, "rope_scaling": False, "rope_scaling_factor": 8.0,
        "make_vocab_size_divisible_by": 128,
    },
    "models.gpt.gpt_layer_specs.get_gpt_layer_local_spec": {"qk_layernorm": False, "qk_l2_norm": False},
    "models.common.language_model_embedding.LanguageModelEmbedding": {"divisible_by": 128},
    "attention.rotary.RotaryEmbedding": {"rotary_percent": 1.0, "rotary_base": 10000},
    "transformer.transformer_block.TransformerBlock": {"post_layer_norm": True},
    "transformer.transformer_layer.TransformerLayer": {"layer_number": 1},
    "tensor_parallel.layers.ColumnParallelLinear": {"bias": True, "gather_output": False, "skip_bias_add": False},
    "tensor_parallel.layers.RowParallelLinear": {"bias": True, "input_is_parallel": True, "skip_bias_add": False},
    "tensor_parallel.layers.VocabParallelEmbedding": {"divisible_by": 128},
    "tensor_parallel.layers.VocabParallelOutput": {"divisible_by": 128, "weight_is_shared": False},
    "tensor_parallel.cross_entropy.vocab_parallel_cross_entropy": {"divisible_by": 128, "reuse_logits": False},
    "optimizer.get_megatron_optimizer": {"lr_mult": 1.0},
    "optimizer.grad_scaler.DynamicGradScaler": {
        "initial_scale": 2.0**32, "min_scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5,
        "growth_interval": 1000, "hysteresis": 2,
    },
    "fusions.rope.apply_rotary": {"interleaved": False},
    "fusions.rope.rotary_reference": {"interleaved": False},
    "pipeline_parallel.simulate.unit_costs": {"forward": 1.0, "backward": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_omitted_arguments_have_their_documented_defaults(name):
    module, _, attribute = f"megatron.core.{name}".rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), attribute)).parameters
    assert {key: parameters[key].default for key in DEFAULTS[name]} == DEFAULTS[name]
