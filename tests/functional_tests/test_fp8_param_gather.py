"""--fp8-param-gather: data-parallel ranks gather one byte per weight, and train to the same bits, with sharded
optimizer state and fully sharded; checkpoints hold the exact weights, also after a resume on other ranks."""

import hashlib
from unittest import mock

import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.test_utils.gpt_runs import losses, train

OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
RECIPES = {
    "tensorwise": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "delayed": ["--fp8-format", "hybrid", "--fp8-amax-history-len", "3", "--fp8-amax-compute-algo", "max"],
    "blockwise": ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--hidden-size", "128",
                  "--ffn-hidden-size", "256", "--seq-length", "64", "--max-position-embeddings", "64"],
}  # fmt: skip
# clipping reads the gradient norm, whose rounding depends on where the buffers are cut
COMMON = ["--bf16", "--clip-grad", "0", "--swiglu", "--disable-bias-linear", "--train-iters", "4", "--eval-iters", "1",
          "--lr-warmup-iters", "1"]  # fmt: skip
ZERO, FULLY = ("--use-distributed-optimizer",), ("--use-torch-fsdp2",)


def run(pool, dataset, save, *flags, ranks=2, sharding=ZERO):
    argv = ["--data-path", str(dataset), "--split", "80,10,10", "--save-interval", "2", "--save", str(save)]
    assert set(pool.run(train, ranks, [*argv, *COMMON, *sharding, *map(str, flags)])) == {0}
    return save


def digests(checkpoint):
    reader = CheckpointReader(checkpoint)
    names = [name for name in reader.names if not name.startswith("rng.")]
    return {name: hashlib.sha256(reader.read(name).view(torch.uint8).numpy().tobytes()).hexdigest() for name in names}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_gathers_fp8_equals_one_that_does_not(gloo_pool, dataset, tmp_path, recipe):
    plain = run(gloo_pool, dataset, tmp_path / "plain", *RECIPES[recipe])
    gathers = run(gloo_pool, dataset, tmp_path / "gathers", *RECIPES[recipe], "--fp8-param-gather", *OVERLAP)
    assert losses(gathers) == losses(plain) and losses(plain)[-1] < losses(plain)[0]
    assert digests(gathers / "iter_0000004") == digests(plain / "iter_0000004")
    flags = [*RECIPES[recipe], "--fp8-param-gather", "--check-replicas", 0]  # the check gathers exact weights, too
    parts = run(gloo_pool, dataset, tmp_path / "parts", *flags, "--exit-interval", 2)
    run(gloo_pool, dataset, parts, *flags, "--load", parts)
    assert digests(parts / "iter_0000004") == digests(gathers / "iter_0000004")


def test_tensor_parallel_shards_share_the_scale(gloo_pool, dataset, tmp_path):
    flags = [*RECIPES["tensorwise"], "--tensor-model-parallel-size", 2, "--sequence-parallel"]
    plain = run(gloo_pool, dataset, tmp_path / "plain", *flags, ranks=4)
    gathers = run(gloo_pool, dataset, tmp_path / "gathers", *flags, "--fp8-param-gather", ranks=4)
    assert digests(gathers / "iter_0000004") == digests(plain / "iter_0000004")


def wired(rank, world_size, gathers):
    """Bytes of the weight all-gathers of one step; the layer's weight as a state dict shows it, and its exact value."""
    from megatron.core import parallel_state
    from megatron.core.config.transformer_config import TransformerConfig
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.fp8.storage import Fp8Gathered
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_block import TransformerBlock

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, bf16=True, add_bias_linear=False, fp8="hybrid",
        fp8_recipe="tensorwise", fp8_param=gathers, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    groups = parallel_state.get_process_groups()
    block = TransformerBlock(config, get_gpt_layer_local_spec(), groups=groups)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(use_distributed_optimizer=True), block)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=True, clip_grad=0.0), [ddp])
    ddp.gather_exact_weights()
    start = {name: value.clone() for name, value in ddp.state_dict().items() if torch.is_tensor(value)}
    ddp(torch.ones(16, 1, 64, dtype=torch.bfloat16)).sum().backward()
    ddp.finish_grad_sync()
    sizes, gather = [], buffers.all_gather

    def counting(output, *arguments, **settings):
        sizes.append(output.numel() * output.element_size())
        return gather(output, *arguments, **settings)

    installed = mock.Mock(wraps=Fp8Gathered.install_copy)
    with mock.patch.object(buffers, "all_gather", counting), mock.patch.object(Fp8Gathered, "install_copy", installed):
        optimizer.step()
    assert not installed.called, "no step writes rounded values"
    name = "layers.0.mlp.linear_fc1.weight"
    weight = block.get_parameter(name)
    retained = [weight.untyped_storage().nbytes(), weight.isnan().all().item()]
    printed = ddp.state_dict()[name].detach().clone()
    ddp.gather_exact_weights()
    exact = ddp.state_dict()[name].detach().clone()
    ddp.zero_grad_buffer()
    retained += [weight.untyped_storage().nbytes(), weight.isnan().all().item()]
    ddp.gather_exact_weights()
    assert torch.equal(ddp.state_dict()[name], exact)
    optimizer.reload_model_params()
    retained += [weight.untyped_storage().nbytes(), weight.isnan().all().item()]
    ddp.broadcast_params()
    assert torch.equal(ddp.state_dict()[name], exact)
    ddp.zero_grad_buffer()
    ddp.load_state_dict(start, strict=False)
    optimizer.reload_model_params()
    ddp.gather_exact_weights()
    assert all(torch.equal(value, start[name]) for name, value in ddp.state_dict().items() if name in start)
    return sum(sizes), printed.float(), exact.float(), retained


def test_half_of_the_bytes_are_sent_and_weights_are_complete_on_demand(gloo_pool):
    (plain, _, exact, retained), _ = gloo_pool.run(wired, 2, False)
    (halved, printed, gathered, of_copies), (_, of_other, also, _) = gloo_pool.run(wired, 2, True)
    assert retained[0] > exact.nbytes and not retained[1] and of_copies == [2, True] * 3
    matrices = 64 * 64 * 4 + 2 * 4 * 64 * 64
    assert plain - halved == matrices  # norms are gathered in bf16 in both
    assert torch.equal(gathered, exact) and torch.equal(also, exact)
    # each rank shows its shard exactly and the rest as GEMMs read it
    assert not torch.equal(printed, exact) and not torch.equal(of_other, exact)
    torch.testing.assert_close(printed, exact, rtol=0.07, atol=1e-3)
    assert torch.equal(torch.where(printed == exact, printed, of_other), exact)


# ---- fully sharded

UNEVEN = ["--global-batch-size", 6]
"""Three ranks, which do not divide the rows."""
FULLY_SHARDED = {
    "tensorwise": (RECIPES["tensorwise"], 2),
    "delayed": ([*RECIPES["delayed"], "--recompute-granularity", "full", "--recompute-method", "uniform",
                 "--recompute-num-layers", 1, *UNEVEN], 3),
    "blockwise, three ranks": ([*RECIPES["blockwise"], *UNEVEN], 3),
    "tp2, sp": ([*RECIPES["tensorwise"], "--tensor-model-parallel-size", 2, "--sequence-parallel"], 4),
    "two instances": ([*RECIPES["tensorwise"], "--num-distributed-optimizer-instances", 2], 4),
}  # fmt: skip


@pytest.mark.parametrize("name", FULLY_SHARDED)
def test_a_fully_sharded_run_that_gathers_fp8_equals_one_that_does_not(gloo_pool, dataset, tmp_path, name):
    flags, ranks = FULLY_SHARDED[name]
    plain = run(gloo_pool, dataset, tmp_path / "plain", *flags, ranks=ranks, sharding=FULLY)
    gathers = run(gloo_pool, dataset, tmp_path / "gathers", *flags, "--fp8-param-gather", ranks=ranks, sharding=FULLY)
    assert losses(gathers) == losses(plain) and losses(plain)[-1] < losses(plain)[0]
    assert digests(gathers / "iter_0000004") == digests(plain / "iter_0000004")
    if name == "tensorwise":
        parts = tmp_path / "parts"
        for more in (["--exit-interval", 2], ["--load", parts]):
            run(gloo_pool, dataset, parts, *flags, "--fp8-param-gather", *more, ranks=ranks, sharding=FULLY)
        assert digests(parts / "iter_0000004") == digests(gathers / "iter_0000004")


def fully_sharded(rank, world_size, gathers):
    """Bytes of the all-gathers of a forward and backward pass, the output, and whether the weight can be read."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.config.transformer_config import TransformerConfig
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
    from megatron.core.fp8 import fully_sharded as fully_sharded_weights
    from megatron.core.fp8.storage import exchange_scales
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    groups = parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, bf16=True, add_bias_linear=False, fp8="hybrid",
        fp8_recipe="tensorwise", fp8_param=gathers, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    block = TransformerBlock(config, get_gpt_layer_local_spec(), groups=groups)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    block.layers[0].mlp.linear_fc2.weight.requires_grad_(False)
    model = TorchFullyShardedDataParallel(DistributedDataParallelConfig(), block, block.layers, groups)
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # of fully_shard
    sizes, errors, gather = [], [], getattr(dist, name)

    def counting(*arguments, **settings):
        output = settings.get("output_tensor", arguments[0] if arguments else None)
        sizes.append(output.numel() * output.element_size())
        return gather(*arguments, **settings)

    def read(module, *unused):
        try:
            module.weight.sum()
        except RuntimeError as error:
            errors.append(str(error))

    block.layers[0].mlp.linear_fc1.register_forward_hook(read)
    with mock.patch.object(dist, name, counting):
        out = model(torch.ones(16, 1, 64, dtype=torch.bfloat16))
        out.sum().backward()
        model.finish_grad_sync()
    first = out.detach().float()
    frozen = [name for name, parameter in model.module.named_parameters() if not parameter.requires_grad]
    assert frozen == ["layers.0.mlp.linear_fc2.weight"]
    for parameter in model.parameters():
        parameter.detach().to_local().mul_(2)
    model.finish_param_sync()
    with mock.patch.object(fully_sharded_weights, "exchange_scales", wraps=exchange_scales) as exchange:
        after = [model(torch.ones(16, 1, 64, dtype=torch.bfloat16)).detach().float() for _ in range(2)]
    assert exchange.call_count == gathers and torch.equal(*after), "scales are exchanged once per step"
    return sum(sizes), first, after[0], errors


def test_fully_sharded_weights_are_sent_in_fp8_and_read_by_fp8_layers_only(gloo_pool):
    (plain, expected, doubled, errors), _ = gloo_pool.run(fully_sharded, 2, False)
    (halved, out, after, refused), _ = gloo_pool.run(fully_sharded, 2, True)
    matrices = 64 * 64 * 4 + 2 * 4 * 64 * 64
    assert plain - halved == 2 * matrices, "in forward and in backward"
    assert torch.equal(out, expected) and torch.equal(after, doubled) and not torch.equal(out, after)
    assert not errors and all("only fp8 layers can read it" in item for item in refused) and refused
