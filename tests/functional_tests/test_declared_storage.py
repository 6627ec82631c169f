"""A storage that the library does not know (``tests/test_utils/block_storage.py``: weights in 8-bit blocks) trains,
gathers its blocks under ZeRO-1, and is saved and resumed without a line in the library."""

import dataclasses
import hashlib
from unittest import mock

import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.test_utils.block_storage import Blocks, with_blocks
from tests.test_utils.gpt_runs import MODEL_FLAGS, losses
from tests.test_utils.layout_table import GATHER, PP2, ZERO
from tests.test_utils.layouts import MORE_STEPS, Layout, read_reference

WRAP = "tests.test_utils.block_storage:with_blocks"
MODEL = "--num-layers 2 --swiglu --normalization RMSNorm --hidden-dropout 0 --attention-dropout 0"
MBS2 = "--micro-batch-size 2"
LAYOUTS = {
    "dp2": Layout(MODEL, MBS2, 2),
    "zero2": Layout(MODEL, f"{MBS2} {ZERO}", 2),
    "zero2-gather": Layout(MODEL, f"{MBS2} {GATHER}", 2),
    "zero4-instances": Layout(MODEL, f"{MBS2} {GATHER} --num-distributed-optimizer-instances 2", 4),
    "pp2-zero2": Layout(MODEL, f"{PP2} {GATHER}", 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(matrix, name):
    """Step 0 included: initial weights are rounded to blocks before the first forward pass."""
    verdict = matrix.verdict(dataclasses.replace(LAYOUTS[name], steps=MORE_STEPS, wrap=WRAP))
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


def test_gemms_read_values_of_the_blocks(matrix):
    row = dataclasses.replace(LAYOUTS["zero2"], steps=MORE_STEPS, wrap=WRAP)
    for step in read_reference(matrix.reference_of(row)):
        weight = step.tensors["weight"]["decoder.layers.1.mlp.linear_fc2.weight"].reshape(-1, Blocks.block)
        assert all(len(block.unique()) <= 255 for block in weight)
        codes = weight / (weight.abs().amax(dim=1, keepdim=True) / 127)
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)


# ---- bytes on the wire


def gathered_bytes(rank, world_size, declared):
    """Bytes of all weight all-gathers of one step, and the elements of the model's matrices."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.sharding.placement import declare

    parallel_state.initialize_model_parallel()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 32, bias=False))
    if declared:
        for parameter in model.parameters():
            declare(parameter, storage=Blocks)
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [ddp])
    ddp(torch.ones(2, 64)).sum().backward()
    ddp.finish_grad_sync()
    sizes = []
    gather = buffers.all_gather

    def counting(output, *arguments, **settings):
        sizes.append(output.numel() * output.element_size())
        return gather(output, *arguments, **settings)

    with mock.patch.object(buffers, "all_gather", counting):
        optimizer.step()
    return sum(sizes)


def test_zero_gathers_bytes_of_blocks(gloo_pool):
    elements = 64 * 64 + 64 * 32
    assert gloo_pool.run(gathered_bytes, 2, False) == [4 * elements] * 2
    assert gloo_pool.run(gathered_bytes, 2, True) == [elements // 128 * 132] * 2


def weights_of_blocks(rank, world_size):
    """Weights after the optimizer is built and after others are loaded, both with their values in blocks. The first
    rank updates the only block."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.sharding.placement import declare

    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    weight = model[0].weight
    declare(weight, storage=Blocks)
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    values = [weight.detach().clone(), torch.randn(16, 8)]
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [ddp])
    assert ("0.weight" in optimizer.storage) == (rank == 0)
    result = [weight.detach().clone()]
    weight.data.copy_(values[1])
    optimizer.reload_model_params()
    return [*result, weight.detach().clone()], values


def test_every_rank_reads_blocks_before_the_first_step(gloo_pool):
    for actual, values in gloo_pool.run(weights_of_blocks, 2):
        for weight, value in zip(actual, values, strict=True):
            blocks = Blocks(torch.empty_like(value))
            blocks.kept = torch.empty_like(value)
            blocks.write(value)
            assert torch.equal(weight, blocks.weight) and not torch.equal(weight, value)


# ---- whole runs


def trained(rank, world_size, argv, fp64):
    from megatron.training.arguments import parse_args
    from megatron.training.run import run
    from megatron.training.tasks.language_model import task_class

    cfg = parse_args(MODEL_FLAGS + argv, model_family="gpt").with_settings(fp64=fp64)
    return run(cfg, with_blocks(task_class("gpt")))


def train(pool, world_size, dataset, save, *flags, fp64=False):
    argv = ["--data-path", str(dataset), "--split", "80,10,10", "--save-interval", "4", "--save", str(save)]
    assert set(pool.run(trained, world_size, [*argv, *map(str, flags)], fp64)) == {0}
    return save


def digests(checkpoint):
    reader = CheckpointReader(checkpoint)
    names = [name for name in reader.names if not name.startswith("rng.")]
    return {name: hashlib.sha256(reader.read(name).view(torch.uint8).numpy().tobytes()).hexdigest() for name in names}


@pytest.mark.parametrize("flags", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_bit_for_bit(gloo_pool, dataset, tmp_path, ranks, flags):
    flags = [*flags, *GATHER.split()]
    full = train(gloo_pool, ranks, dataset, tmp_path / "full", *flags)
    parts = train(gloo_pool, ranks, dataset, tmp_path / "parts", *flags, "--exit-interval", 4)
    train(gloo_pool, ranks, dataset, parts, *flags, "--load", parts)
    assert (parts / "metrics.jsonl").read_bytes() == (full / "metrics.jsonl").read_bytes()
    assert digests(parts / "iter_0000008") == digests(full / "iter_0000008")
    names = digests(full / "iter_0000008")
    assert "optimizer.main_param.decoder.layers.0.mlp.linear_fc1.weight" in names
    values = losses(full)
    assert values[-1] < values[0]


def test_a_checkpoint_continues_on_other_ranks(gloo_pool, dataset, tmp_path):
    one = train(gloo_pool, 1, dataset, tmp_path / "one", fp64=True)
    two = tmp_path / "two"
    train(gloo_pool, 2, dataset, two, "--load", one, "--ckpt-step", 4, *GATHER.split(), fp64=True)
    assert losses(two) == pytest.approx(losses(one)[-len(losses(two)) :], rel=1e-10)
