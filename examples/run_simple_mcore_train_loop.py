"""The library without the training program: your own loop, on tensor-parallel ranks, with a checkpoint.

    torchrun --nproc_per_node=2 examples/run_simple_mcore_train_loop.py
    python examples/run_simple_mcore_train_loop.py                          # the same on one process

It runs on GPUs over NCCL and, where there are none, on CPUs over gloo. Data are mock data.
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch.optim import Adam
from torch.utils.data import DataLoader

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import compile_helpers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers.simple import NullTokenizer
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE_LENGTH, VOCAB_SIZE, MICRO_BATCH_SIZE = 64, 100, 8


def model_provider():
    """A GPT small enough for any machine."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQUENCE_LENGTH,
    )


def train_data_iterator(device):
    """Mock samples, the same on all ranks that share a model."""
    config = GPTDatasetConfig(
        random_seed=0, sequence_length=SEQUENCE_LENGTH, split="1,1,1", tokenizer=NullTokenizer(VOCAB_SIZE)
    )
    train, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [1000, 0, 0], lambda: True, config).build()
    for batch in DataLoader(train, batch_size=MICRO_BATCH_SIZE):
        yield {name: value.to(device) for name, value in batch.items()}


def forward_step(data_iterator, model):
    """Token losses of one micro-batch, and the function that turns them into one number."""

    def loss_func(loss_mask, output):
        loss, num_tokens = (output * loss_mask).sum(), loss_mask.sum()
        return loss, num_tokens, {"lm loss": torch.stack([loss.detach().double(), num_tokens.double()])}

    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def train(model, optimizer, iterations, device):
    """Iterations of one micro-batch; the losses."""
    data_iterator, losses = train_data_iterator(device), []
    for iteration in range(iterations):
        model.zero_grad_buffer()
        results = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data_iterator, model=[model], num_microbatches=1,
            seq_length=SEQUENCE_LENGTH, micro_batch_size=MICRO_BATCH_SIZE,
        )  # fmt: skip
        finalize_model_grads([model])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        total, count = results[0]["lm loss"].tolist()
        losses.append(total / count)
        if torch.distributed.get_rank() == 0:
            print(f"iteration {iteration + 1}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, help="where the checkpoint goes; default: a temporary folder")
    arguments = parser.parse_args()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun says
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=num_ranks, pipeline_model_parallel_size=1)
    model_parallel_cuda_manual_seed(123)
    compile_helpers()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    gpt = model_provider().to(device)
    model = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    train(model, Adam(gpt.parameters()), arguments.iterations, device)

    with tempfile.TemporaryDirectory() as folder:
        shared = [str(arguments.checkpoint or Path(folder) / "checkpoint")]
        torch.distributed.broadcast_object_list(shared, src=0)
        dist_checkpointing.save(sharded_state_dict=gpt.sharded_state_dict(), checkpoint_dir=shared[0])
        weights = {name: parameter.detach().clone() for name, parameter in gpt.named_parameters()}
        for parameter in gpt.parameters():
            parameter.data.zero_()
        gpt.load_state_dict(dist_checkpointing.load(gpt.sharded_state_dict(), shared[0]))
        torch.distributed.barrier()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in gpt.named_parameters())
    if torch.distributed.get_rank() == 0:
        print("the checkpoint holds the model", flush=True)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
