"""A script for BERT and T5 as people wrote them for earlier releases; with --decoder-num-layers it trains T5.

The first tensor-parallel rank builds the data and broadcasts them. T5's masks are made in the script, or with
``--masks-of-2024`` by the data set, which then has to offer one for cross-attention.
"""

from copy import deepcopy
from functools import partial

import torch
import torch.nn.functional as F

import megatron.legacy.model
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec, bert_layer_with_transformer_engine_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_decoder_with_transformer_engine_block_spec,
    get_t5_encoder_with_local_block_spec,
    get_t5_encoder_with_transformer_engine_block_spec,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import average_losses_across_data_parallel_group


def add_flags(parser):
    parser.add_argument("--masks-of-2024", action="store_true")
    parser.add_argument("--local-layers", action="store_true")
    return parser


def t5_provider(args, config, sizes) -> megatron.legacy.model.T5Model | T5Model:
    encoder_config = deepcopy(config)
    encoder_config.num_layers = args.encoder_num_layers
    encoder, decoder = get_t5_encoder_with_local_block_spec, get_t5_decoder_with_local_block_spec
    if not args.local_layers:
        encoder = get_t5_encoder_with_transformer_engine_block_spec
        decoder = get_t5_decoder_with_transformer_engine_block_spec
    if not args.masks_of_2024:
        sizes |= {"encoder_config": encoder_config, "add_encoder": True, "add_decoder": True}
    return T5Model(
        config=config,
        transformer_encoder_layer_spec=encoder(args.encoder_num_layers),
        transformer_decoder_layer_spec=decoder(args.decoder_num_layers),
        **sizes,
    )


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    config = core_transformer_config_from_args(args)
    sizes = {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "parallel_output": True,
        "pre_process": pre_process,
        "post_process": post_process,
    }
    if args.decoder_num_layers is not None:
        return t5_provider(args, config, sizes)
    return BertModel(
        config=config,
        num_tokentypes=2 if args.bert_binary_head else 0,
        add_binary_head=args.bert_binary_head,
        transformer_layer_spec=bert_layer_local_spec if args.local_layers else bert_layer_with_transformer_engine_spec,
        vp_stage=vp_stage,
        **sizes,
    )


def bert_loss(loss_mask, sentence_order, output_tensor):
    losses, order = output_tensor
    lm_loss = torch.sum(losses.float().view(-1) * loss_mask.reshape(-1)) / loss_mask.sum()
    order_loss = F.cross_entropy(order.view(-1, 2).float(), sentence_order.view(-1), ignore_index=-1)
    averaged = average_losses_across_data_parallel_group([lm_loss, order_loss])
    return lm_loss + order_loss, {"lm loss": averaged[0], "sop loss": averaged[1]}


def t5_loss(loss_mask, output_tensor):
    loss = torch.sum(output_tensor.float().view(-1) * loss_mask.reshape(-1))
    report = torch.cat([loss.detach().view(1), loss_mask.sum().view(1)])
    return loss, loss_mask.sum().to(torch.int), {"lm loss": report}


def bert_step(data_iterator, model):
    keys = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask"]
    data = next(data_iterator) if data_iterator is not None else None
    data = tensor_parallel.broadcast_data(keys, data, torch.int64)
    labels, loss_mask = data["labels"].long(), data["loss_mask"].float()
    output = model(data["text"], data["padding_mask"].long(), tokentype_ids=data["types"].long(), lm_labels=labels)
    return output, partial(bert_loss, loss_mask, data["is_random"].long())


def t5_step(data_iterator, model):
    args = get_args()
    keys = ["text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask"]
    keys += ["enc_dec_mask"] * args.masks_of_2024
    data = next(data_iterator) if data_iterator is not None else None
    data = tensor_parallel.broadcast_data(keys, data, torch.int64)
    encoder_tokens, decoder_tokens = data["text_enc"].long(), data["text_dec"].long()
    masks = data["enc_mask"] < 0.5, data["dec_mask"] < 0.5
    if args.masks_of_2024:
        masks += (data["enc_dec_mask"] < 0.5,)
    else:
        masks = T5MaskedWordPieceDataset.config_attention_mask(
            encoder_tokens, decoder_tokens, *masks, args.local_layers
        )
    output = model(encoder_tokens, decoder_tokens, *masks, lm_labels=data["labels"].long())
    return output, partial(t5_loss, data["loss_mask"].float())


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch generator", log_level=2).start()
    timers("batch generator").stop()
    return (bert_step if get_args().decoder_num_layers is None else t5_step)(data_iterator, model)


def datasets_provider(train_val_test_num_samples):
    args = get_args()
    options = {
        "random_seed": args.seed,
        "blend": get_blend_from_list(args.data_path),
        "blend_per_split": [get_blend_from_list(item) for item in (args.train_data_path, None, None)],
        "split": args.split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": get_tokenizer(),
        "masking_probability": args.mask_prob,
        "short_sequence_probability": args.short_seq_prob,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
    }
    if args.decoder_num_layers is None:
        kind = BERTMaskedWordPieceDataset
        config = BERTMaskedWordPieceDatasetConfig(
            sequence_length=args.seq_length, classification_head=args.bert_binary_head, masking_max_ngram=3,
            masking_use_geometric_distribution=False, **options,
        )  # fmt: skip
    else:
        kind = T5MaskedWordPieceDataset
        config = T5MaskedWordPieceDatasetConfig(
            sequence_length=args.encoder_seq_length, sequence_length_decoder=args.decoder_seq_length,
            masking_max_ngram=10, masking_use_geometric_distribution=True, **options,
        )  # fmt: skip
    is_built = lambda: mpu.get_tensor_model_parallel_rank() == 0  # noqa: E731
    return BlendedMegatronDatasetBuilder(kind, train_val_test_num_samples, is_built, config).build()


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    pretrain(
        datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step, extra_args_provider=add_flags,
        args_defaults={"tokenizer_type": "BertWordPieceLowerCase"},
    )  # fmt: skip
