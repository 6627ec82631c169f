"""A script as people wrote them in 2026: it parses before it trains, reads batches on the first tensor-parallel rank
and broadcasts them. ``--own-model`` passes a model provider, as the first of these releases did."""

import json
import time
from functools import partial

import torch

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_inference_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.package_info import __version__
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_context_parallel_group, get_hybrid_data_context_parallel_groups
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_te_version,
    get_torch_version,
)
from megatron.training import (
    get_args,
    get_timers,
    inprocess_restart,
    pretrain,
    print_rank_0,
    set_startup_timestamps,
)
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

START = time.time()
stimer = StragglerDetector()
KEYS = ["attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size", "loss_mask",
        "max_seqlen", "position_ids", "tokens"]  # fmt: skip


def add_flags(parser):
    group = parser.add_argument_group(title="this script")
    group.add_argument("--own-model", action="store_true", help="pass a model provider")
    group.add_argument("--changed-seed", type=int, help="assigned to args.seed after parsing")
    return parser


def layer_spec_of(config, args):
    if args.spec is not None or args.heterogeneous_layers_config_path is not None:
        return get_gpt_heterogeneous_layer_spec(config)
    if args.experimental_attention_variant is not None:
        return get_transformer_block_with_experimental_attention_variant_spec(config=config, vp_stage=None)
    if config.transformer_impl == "inference_optimized":
        return get_gpt_layer_with_inference_spec(config.qk_layernorm, qk_l2_norm=config.qk_l2_norm)
    return get_gpt_layer_local_spec(
        config.num_moe_experts,
        config.moe_grouped_gemm,
        config.qk_layernorm,
        config.multi_latent_attention,
        config.experimental_attention_variant,
        normalization=config.normalization,
        use_kitchen=config.use_kitchen,
        use_kitchen_attention=config.use_kitchen_attention,
        kitchen_attention_backend=config.kitchen_attention_backend,
    )


def build_gpt(args, pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    config = config or core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(config, vp_stage=vp_stage) if args.num_experts else layer_spec_of(config, args)
    mtp_spec = None
    if args.mtp_num_layers is not None:
        layers = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, vp_stage=vp_stage)
        mtp_spec = get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        logit_dtype=getattr(args, "logit_dtype", None),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def model_provider(
    build, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
) -> GPTModel | HybridModel:
    return build(get_args(), pre_process, post_process, vp_stage, config=config, pg_collection=pg_collection)


def predicts_further(vp_stage):
    config = core_transformer_config_from_args(get_args())
    layout, number = config.pipeline_model_parallel_layout, config.mtp_num_layers
    return mtp_on_this_rank(layout=layout, mtp_num_layers=number, ignore_virtual=False, vp_stage=vp_stage)


def get_batch(data_iterator, vp_stage=None):
    args = get_args()
    additional, has_cu_seqlens = predicts_further(vp_stage), args.sft or args.dataloader_inter_document_masking
    if not is_first_or_last_pipeline_stage(vp_stage) and not additional and not has_cu_seqlens:
        return [None] * len(KEYS)
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = next(data_iterator)
        for key in KEYS:
            batch[key] = batch[key].cuda(non_blocking=True) if batch.get(key) is not None else None
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=has_cu_seqlens,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=additional,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(
        flatten_batch_for_packed_sequences(batch),
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=get_context_parallel_group(),
        hybrid_cp_group_func=get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )
    return [batch[key] for key in KEYS]


def loss_func(loss_mask, output_tensor, model=None):
    losses, loss_mask = output_tensor.view(-1).float(), loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    report = {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}
    if get_args().logits_load_dir is not None:
        raise ValueError("this script has no teacher")
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(result=loss, rejection_func=torch.isnan, message="NaN", fatal=True)
    return loss, num_tokens, report


def forward_step(data_iterator, model, return_schedule_plan=False):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        mask, cu_seqlens, _, _, labels, _, loss_mask, max_seqlen, position_ids, tokens = get_batch(
            data_iterator, vp_stage
        )
    packed_seq_params = None
    if cu_seqlens is not None:
        update_seqlen_stats_from_cu_seqlens(cu_seqlens)
        packed_seq_params = PackedSeqParams("thd", cu_seqlens[0], cu_seqlens[0], int(max_seqlen), int(max_seqlen))
    timers("batch-generator").stop()
    with stimer:
        output_tensor = model(
            tokens, position_ids, mask, labels=labels, loss_mask=loss_mask, packed_seq_params=packed_seq_params
        )
    return output_tensor, partial(loss_func, loss_mask, model=model)


def is_dataset_built_on_rank(vp_stage=None, is_packed_sequence=False):
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return is_packed_sequence or is_first_or_last_pipeline_stage(vp_stage) or predicts_further(vp_stage)


def dataset_config_from_args(args):
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences_per_dataset,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )


def datasets_provider(train_val_test_num_samples, vp_stage=None):
    args = get_args()
    dataset_type = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    built = partial(is_dataset_built_on_rank, vp_stage=vp_stage, is_packed_sequence=bool(args.sft))
    return BlendedMegatronDatasetBuilder(
        dataset_type, train_val_test_num_samples, built, dataset_config_from_args(args)
    ).build()


def get_embedding_ranks(pp_ranks):
    return sorted({pp_ranks[0], *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(get_args()))})


if __name__ == "__main__":
    print_rank_0(f"torch {get_torch_version()}, library {__version__}, Transformer Engine {get_te_version()}")
    set_startup_timestamps(program_start=START, main_entry=time.time())
    datasets_provider.is_distributed = True
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(extra_args_provider=add_flags, args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    if args.changed_seed is not None:
        args.seed = args.changed_seed
    options = {"store": store, "get_embedding_ranks": get_embedding_ranks}
    kind = ModelType.encoder_or_decoder
    if args.own_model:
        settings = pretrain_cfg_container_from_args(args)
        pretrain(settings, datasets_provider, partial(model_provider, build_gpt), kind, forward_step, **options)
    else:
        settings = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        pretrain(settings, datasets_provider, kind, forward_step, **options)
