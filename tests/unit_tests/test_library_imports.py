"""The names that existing programs import, each where they look for it."""

from importlib import import_module

import pytest

NAMES = {
    "megatron.core": "parallel_state mpu tensor_parallel dist_checkpointing",
    "megatron.core.parallel_state":
        "initialize_model_parallel destroy_model_parallel model_parallel_is_initialized "
        "get_tensor_model_parallel_rank get_tensor_model_parallel_world_size get_tensor_model_parallel_group "
        "get_pipeline_model_parallel_rank get_pipeline_model_parallel_world_size get_pipeline_model_parallel_group "
        "get_data_parallel_rank get_data_parallel_world_size get_data_parallel_group get_context_parallel_rank "
        "get_context_parallel_world_size get_context_parallel_group get_expert_model_parallel_rank "
        "get_expert_model_parallel_world_size get_expert_model_parallel_group is_pipeline_first_stage "
        "is_pipeline_last_stage",
    "megatron.core.mpu": "initialize_model_parallel get_data_parallel_rank",
    "megatron.core.models.gpt": "GPTModel",
    "megatron.core.models.gpt.gpt_model": "GPTModel",
    "megatron.core.models.gpt.gpt_layer_specs":
        "get_gpt_layer_local_spec get_gpt_layer_with_transformer_engine_spec get_gpt_decoder_block_spec",
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
    "megatron.core.num_microbatches_calculator": "",
    "megatron.core.dist_checkpointing": "save load",
    "megatron.core.datasets.utils": "compile_helpers",
    "megatron.core.datasets.blended_megatron_dataset_builder": "BlendedMegatronDatasetBuilder",
    "megatron.core.datasets.gpt_dataset": "GPTDatasetConfig GPTDataset MockGPTDataset",
    "megatron.core.datasets.indexed_dataset": "IndexedDataset IndexedDatasetBuilder",
    "megatron.core.tokenizers": "MegatronTokenizer",
    "megatron.training":
        "get_args get_timers get_tokenizer print_rank_0 print_rank_last pretrain get_model initialize_megatron",
    "megatron.training.arguments": "core_transformer_config_from_args",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_of_existing_programs_are_where_they_look_for_them(module):
    found = import_module(module)
    for name in NAMES[module].split():
        if not hasattr(found, name):
            import_module(f"{module}.{name}")  # `from package import module`
