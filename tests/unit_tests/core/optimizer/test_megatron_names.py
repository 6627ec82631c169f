"""Programs written for Megatron-LM offload, inspect, override and checkpoint wrapped models and optimizers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.param_keys import ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}


def build(seed=1, experts=None, dtype=torch.float32, sharded=True, **optimizer):
    moe = {"num_moe_experts": experts, "expert_model_parallel_size": 2} if experts else {}
    config = TransformerConfig(**SIZES, **moe, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    module = GPTModel(config, get_gpt_decoder_block_spec(config), 32, 8, seed=seed, position_embedding_type="rope")
    settings = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config=config, ddp_config=settings, module=module)
    extra = {name: optimizer.pop(name) for name in list(optimizer) if name in ("config_overrides", "skip")}
    chosen = OptimizerConfig(lr=1e-2, weight_decay=0.1, bf16=dtype == torch.bfloat16,
                             use_distributed_optimizer=sharded, **optimizer)  # fmt: skip
    return model, get_megatron_optimizer(chosen, [model], use_gloo_process_groups=False, **extra)


def step(model, optimizer, seed=0):
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(seed))
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(tokens[:, :-1], None, labels=tokens[:, 1:]).mean().backward()
    finalize_model_grads([model])
    assert optimizer.prepare_grads() is False
    norm = optimizer.get_grad_norm()
    worked, measured, _ = optimizer.step()
    assert worked and measured == pytest.approx(norm)
    return torch.cat([parameter.detach().float().flatten() for parameter in model.module.parameters()])


def offload(model, optimizer):
    """Frees weights, gradients and moments as verl and ms-swift do; returns what brings them back."""
    buffers = [buffer for kind in (model.buffers, model.expert_parallel_buffers) for buffer in kind]
    sizes = [(item.param_data.untyped_storage().size(), item.grad_data.untyped_storage().size()) for item in buffers]
    copies = [item.param_data.data.clone() for item in buffers]
    for item in buffers:
        item.param_data.untyped_storage().resize_(0)
        item.grad_data.untyped_storage().resize_(0)
    moments = [[value["exp_avg"].clone(), value["exp_avg_sq"].clone()] for part in optimizer.chained_optimizers
               for value in part.optimizer.state.values()]  # fmt: skip

    def restore():
        for entry, copy, (weights, gradients) in zip(buffers, copies, sizes, strict=True):
            entry.param_data.untyped_storage().resize_(weights)
            entry.grad_data.untyped_storage().resize_(gradients)
            entry.param_data.copy_(copy)
            entry.grad_data.zero_()
        states = [value for part in optimizer.chained_optimizers for value in part.optimizer.state.values()]
        for value, (first, second) in zip(states, moments, strict=True):
            value["exp_avg"], value["exp_avg_sq"] = first, second

    return restore


def _offloaded_run(rank, world_size, dtype, experts):
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2 if experts else 1)
    runs = []
    for offloads in (False, True):
        model, optimizer = build(dtype=dtype, experts=experts)
        for seed in range(3):
            weights = step(model, optimizer, seed + 10 * rank)
            if offloads:
                restore = offload(model, optimizer)
                assert all(item.param_data.untyped_storage().size() == 0 for item in model.buffers)
                restore()
        runs.append(weights)
        assert bool(model.expert_parallel_buffers) == bool(experts) and model.buffers
        stored = sum(buffer.grad_data.numel() for buffer in [*model.buffers, *model.expert_parallel_buffers])
        assert stored >= sum(parameter.numel() for parameter in model.module.parameters())
    return torch.equal(*runs)


@pytest.mark.parametrize("dtype, experts", [(torch.float32, None), (torch.bfloat16, None), (torch.float32, 4)])
def test_a_model_that_was_offloaded_trains_on_with_the_same_bits(gloo_pool, dtype, experts):
    assert gloo_pool.run(_offloaded_run, 2, dtype, experts) == [True, True]


def test_buffers_are_torchs_method_too():
    model, _ = build()
    model.module.register_buffer("mask", torch.ones(2))
    assert [buffer.shape for buffer in model.buffers()] == [(2,)] and len(model.buffers) == 1
    assert model.buffers[0].params[0].main_grad.untyped_storage().data_ptr() == model.buffers[0].grad_data.data_ptr()


def _broadcast(rank, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model, _ = build(seed=rank)
    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    model.broadcast_params()
    first = [torch.equal(parameter, old) for parameter, old in zip(model.module.parameters(), before)]
    gathered = [None] * world_size
    dist.all_gather_object(gathered, [parameter.detach() for parameter in model.module.parameters()])
    peer = gathered[(rank + 2) % 4]
    alike = all(torch.equal(mine, foreign) for mine, foreign in zip(gathered[rank], peer))
    return all(first), alike


def test_broadcast_params_gives_data_parallel_ranks_those_of_the_first(gloo_pool):
    assert gloo_pool.run(_broadcast, 4) == [(True, True), (True, True), (False, True), (False, True)]


def test_state_and_groups_are_reached_through_chained_optimizers():
    """Programs reset the moments between policy updates through these names."""
    model, optimizer = build()
    step(model, optimizer)
    (part,) = optimizer.chained_optimizers
    assert part.optimizer.param_groups is optimizer.param_groups
    assert set(part.optimizer.state) == set(model.module.parameters()) == set(optimizer.get_parameters())
    for value in part.optimizer.state.values():
        assert set(value) == {"exp_avg", "exp_avg_sq", "step"} and value["exp_avg"].abs().max() > 0
        value["step"].zero_()
        value["exp_avg"].zero_()
        value["exp_avg_sq"].zero_()
    fresh, its_optimizer = build()
    fresh.module.load_state_dict(model.module.state_dict())
    assert torch.equal(step(model, optimizer, 5), step(fresh, its_optimizer, 5))
    with pytest.raises(KeyError):
        next(iter(part.optimizer.state.values()))["momentum_buffer"] = torch.zeros(1)


def test_infinite_gradients_are_found_before_a_step_with_a_loss_scale():
    model, optimizer = build(sharded=False, loss_scale=64.0)
    model.zero_grad_buffer()
    next(model.module.parameters()).main_grad.view(-1)[0] = 64 * 3.0
    assert optimizer.prepare_grads() is False and optimizer.get_grad_norm() == pytest.approx(3.0)
    next(model.module.parameters()).main_grad.view(-1)[0] = torch.inf
    assert optimizer.prepare_grads() is True


def group_of(optimizer, name):
    return next(group for group in optimizer.param_groups if name in group["names"])


def test_config_overrides_are_values_of_parameter_groups():
    overrides = {
        ParamKey(name="*.bias", predicate=ParamPredicate("vector", lambda param: param.ndim == 1)): {"wd_mult": 0.0},
        ParamKey(name=("*word_embeddings*", "*output_layer*")): {
            "max_lr": 0.5, "min_lr": 0.1, "start_wd": 0.3, "end_wd": 0.4,
        },
        ParamKey(name="*layers.1.*"): {"optimizer": "sgd"},
    }  # fmt: skip
    _, optimizer = build(config_overrides=overrides)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=0, lr_decay_steps=10, lr_decay_style="linear",
        start_wd=0.1, end_wd=0.2, wd_incr_steps=10, wd_incr_style="linear",
    )  # fmt: skip
    scheduler.step(5)
    embedding = group_of(optimizer, "embedding.word_embeddings.weight")
    assert (embedding["lr"], embedding["weight_decay"]) == (pytest.approx(0.3), pytest.approx(0.35))
    bias = group_of(optimizer, "decoder.layers.0.mlp.linear_fc1.bias")
    assert (bias["lr"], bias["weight_decay"], bias["optimizer"]) == (pytest.approx(5.5e-3), 0.0, "adam")
    weight = group_of(optimizer, "decoder.layers.1.mlp.linear_fc1.weight")
    assert (weight["weight_decay"], weight["optimizer"]) == (pytest.approx(0.15), "sgd")


@pytest.mark.parametrize("settings", [{}, {"decoupled_lr": 0.3}, {"decoupled_lr": 0.3, "decoupled_min_lr": 0.1},
                                      {"decoupled_lr": 0.3, "decoupled_min_lr": 0.0},
                                      {"apply_wd_to_qk_layernorm": True}])  # fmt: skip
def test_the_standard_overrides_are_the_defaults(settings):
    config = OptimizerConfig(lr=1e-2, min_lr=1e-3, **settings)
    fields = "wd_mult", "lr_mult", "max_lr", "min_lr", "optimizer"
    model, _ = build()
    plain = get_megatron_optimizer(config, [model])
    passed = get_megatron_optimizer(config, [model], get_standard_config_overrides(config))
    for name in plain.model_params:
        mine, foreign = ({field: group_of(x, name)[field] for field in fields} for x in (plain, passed))
        if foreign["max_lr"] is not None and foreign["min_lr"] is None:
            foreign["min_lr"] = config.min_lr  # the schedule's own
        assert mine == foreign, name
    everything = get_megatron_optimizer(config, [model], config_overrides={})
    assert {(group["wd_mult"], group["max_lr"]) for group in everything.param_groups} == {(1.0, None)}


def test_attributes_match_if_they_are_true():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].weight.is_slow, net[1].weight.is_slow = True, False
    overrides = {ParamKey(attr="is_slow"): {"lr_mult": 0.5}}
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [net], config_overrides=overrides)
    assert group_of(optimizer, "0.weight")["lr_mult"] == 0.5 and group_of(optimizer, "1.weight")["lr_mult"] == 1.0


def test_mistakes_in_overrides_are_named():
    with pytest.raises(UserError, match="config_overrides: lr: are no settings of a parameter group"):
        build(config_overrides={ParamKey(name="*"): {"lr": 1.0}})
    with pytest.raises(UserError, match="config_overrides: wd_mult of .*: both 0.0 and 1.0"):
        build(config_overrides={ParamKey(name="*"): {"wd_mult": 0.0}, ParamKey(name="*weight"): {"wd_mult": 1.0}})
    with pytest.raises(TypeError, match="no arguments weight_decay"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0), [nn.Linear(1, 1)], weight_decay=1)


def test_older_releases_arguments_are_taken():
    model, _ = build(sharded=False)
    config = OptimizerConfig(lr=1e-2)
    optimizer = get_megatron_optimizer(
        config, [model], None, None, 1.0, use_gloo_process_groups=True, default_skip_embedding_weight_decay=True
    )
    assert group_of(optimizer, "embedding.word_embeddings.weight")["wd_mult"] == 0.0
    assert group_of(optimizer, "output_layer.weight")["wd_mult"] == 1.0
    optimizer = get_megatron_optimizer(
        config, [model], lambda name, parameter: "output" in name, default_skip_embedding_weight_decay=True
    )
    assert group_of(optimizer, "embedding.word_embeddings.weight")["wd_mult"] == 1.0
    assert group_of(optimizer, "output_layer.weight")["wd_mult"] == 0.0


def _checkpointed(rank, world_size, tensor_size, folder, dtype):
    """Save after two steps; a model with another seed that loads the file continues with the same bits."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
    model, optimizer = build(dtype=dtype)
    for seed in range(2):
        step(model, optimizer, seed)
    state = {"model": model.module.sharded_state_dict(), "iteration": 2, "args": {"lr": 0.5, "names": ["a"]}}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=False)
    dist_checkpointing.save(state, folder, None, async_sharded_save=False, validate_access_integrity=True)
    other, its_optimizer = build(seed=7, dtype=dtype)
    requested = {"model": other.module.sharded_state_dict(), "iteration": 0, "args": None}
    requested["optimizer"] = its_optimizer.sharded_state_dict(requested["model"], is_loading=True)
    loaded = dist_checkpointing.load(requested, folder, None, strict=None)
    other.module.load_state_dict(loaded["model"])
    its_optimizer.load_state_dict(loaded["optimizer"])
    assert (loaded["iteration"], loaded["args"]) == (2, {"lr": 0.5, "names": ["a"]})
    assert its_optimizer.step_count == 2
    return torch.equal(step(model, optimizer, 5), step(other, its_optimizer, 5))


@pytest.mark.parametrize("world_size, tensor_size, dtype", [(1, 1, torch.bfloat16), (2, 2, torch.float32),
                                                            (2, 1, torch.bfloat16)])  # fmt: skip
def test_nested_states_are_checkpointed(gloo_pool, tmp_path, world_size, tensor_size, dtype):
    folder = str(tmp_path / "iter_0000002")
    assert gloo_pool.run(_checkpointed, world_size, tensor_size, folder, dtype) == [True] * world_size


def test_values_that_cannot_be_stored_are_named(tmp_path):
    with pytest.raises(UserError, match="sharded_state_dict: args: neither rectangles of tensors nor JSON values"):
        dist_checkpointing.save({"args": object()}, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="async_sharded_save True: not available"):
        dist_checkpointing.save({}, tmp_path / "checkpoint", async_sharded_save=True)
    _, optimizer = build(sharded=False)
    with pytest.raises(UserError, match="call dist_checkpointing.load with this optimizer's sharded_state_dict"):
        optimizer.load_state_dict({"optimizer.step": 1})
