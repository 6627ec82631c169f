"""An entry script with custom data sets, which exist only on the first tensor-parallel rank of the first and last
pipeline stages; the script broadcasts the batches itself."""

from functools import partial

import numpy as np
import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args


def add_flags(parser):
    parser.add_argument("--data-on-every-rank", action="store_true")
    return parser


class CountingDataset(torch.utils.data.Dataset):
    """Sample i counts upwards from i; every third token is not predicted."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        args = get_args()
        tokens = (index + np.arange(args.seq_length + 1)) % args.vocab_size
        mask = (np.arange(args.seq_length) % 3 > 0).astype(np.int64)
        return {"text": tokens, "loss_mask": mask}


def datasets_provider(num_samples):
    stage = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    reads = stage and parallel_state.get_tensor_model_parallel_rank() == 0
    if not (reads or get_args().data_on_every_rank):
        return None, None, None
    train, valid, test = num_samples
    return CountingDataset(train), [CountingDataset(valid), CountingDataset(valid + 1)], CountingDataset(test)


def model_provider(pre_process=True, post_process=True):
    config = core_transformer_config_from_args(get_args())
    return GPTModel(
        config, get_gpt_decoder_block_spec(config), get_args().padded_vocab_size, get_args().seq_length,
        pre_process=pre_process, post_process=post_process,
    )  # fmt: skip


def forward_step(data_iterator, model):
    data = None if data_iterator is None else next(data_iterator)
    data = tensor_parallel.broadcast_data(["text", "loss_mask"], data, torch.int64)
    tokens, loss_mask = data["text"], data["loss_mask"].float()
    position_ids = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    losses = model(tokens[:, :-1].contiguous(), position_ids, labels=tokens[:, 1:].contiguous())
    return losses, partial(loss_func, loss_mask)


def loss_func(loss_mask, losses):
    loss, num_tokens = (losses * loss_mask).sum(), loss_mask.sum()
    return loss, num_tokens.int(), {"lm loss": torch.stack([loss.detach(), num_tokens])}


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    pretrain(
        datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step, extra_args_provider=add_flags
    )  # fmt: skip
