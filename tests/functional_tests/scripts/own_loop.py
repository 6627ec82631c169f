"""A program with its own loop: settings from the command line, a model from ``get_model``, its loss and gradients on
fixed data. Writes ``{"loss", "norm", "wrapped"}`` to ``--result``."""

import json
import math

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training import get_args, get_model, initialize_megatron
from megatron.training.arguments import core_transformer_config_from_args

ROWS, LENGTH, VOCAB = 2, 32, 64


def add_flags(parser):
    parser.add_argument("--result")
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args), get_gpt_layer_local_spec(), VOCAB, LENGTH, pre_process=pre_process,
        post_process=post_process, vp_stage=vp_stage,
    )  # fmt: skip


def forward_step(iterator, model):
    tokens = next(iterator)
    places = torch.arange(LENGTH).expand_as(tokens)
    output = model(tokens, places, None, labels=tokens.roll(-1, 1))

    def loss_func(losses):
        return losses.float().mean(), {"loss": losses.detach().float().mean()}

    return output, loss_func


def main():
    initialize_megatron(extra_args_provider=add_flags)
    model = get_model(model_provider, ModelType.encoder_or_decoder)
    bare = get_model(model_provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)
    batch = torch.randint(VOCAB, (4 * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    data = [iter(batch.split(ROWS)) for _ in model]
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data if len(model) > 1 else data[0], model=model,
        num_microbatches=4, seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False,
    )  # fmt: skip
    if (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    ):
        first = next(name for name, _ in model[-1].named_parameters() if "final_layernorm.weight" in name)
        norm = dict(model[-1].named_parameters())[first].main_grad.norm().item()
        result = {
            "loss": sum(item["loss"].item() for item in reduced) / len(reduced), "norm": norm,
            "wrapped": [all(isinstance(item, DistributedDataParallel) for item in chunks) for chunks in (model, bare)],
            "chunks": len(model), "finite": math.isfinite(norm),
        }  # fmt: skip
        with open(get_args().result, "w") as file:
            json.dump(result, file)
    dist.barrier()


if __name__ == "__main__":
    main()
