"""An entry script in the classic form: five functions and one call. Start here to train something of your own.

    torchrun --nproc_per_node=2 examples/pretrain_custom_gpt.py --label-smoothing 0.1 --num-layers 2 … --mock-data

It adds a flag, builds its own model and loss, and leaves everything else to the shared loop.
"""

from functools import partial

import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank


def add_flags(parser):
    """The script's own flag."""
    group = parser.add_argument_group(title="custom loss")
    group.add_argument("--label-smoothing", type=float, default=0.0, help="weight of a uniform target")
    return parser


def model_provider(pre_process=True, post_process=True):
    """Logits instead of losses: the model is called without labels."""
    args = get_args()
    print_rank_0("building a GPT model of this script's own ...")
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=get_tokenizer().vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


def loss_func(batch, logits):
    """Smoothed cross-entropy: the sum over tokens, how many there are, and what to log."""
    mask = batch["loss_mask"].view(-1)
    smoothing, labels = get_args().label_smoothing, batch["labels"].view(-1)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels, reduction="none", label_smoothing=smoothing
    )
    loss, num_tokens = (losses * mask).sum(), mask.sum()
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(data_iterator, model):
    """One micro-batch."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator))
    timers("batch-generator").stop()
    logits = model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    return logits, partial(loss_func, batch)


def train_valid_test_datasets_provider(train_val_test_num_samples):
    """GPT data sets, or mock data."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, train_val_test_num_samples, lambda: True, config).build()


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_flags,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
