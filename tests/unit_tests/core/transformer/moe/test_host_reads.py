"""A step with experts on several ranks waits nowhere for the device: the host reads no tensor's value."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.random import philox
from megatron.core.tensor_parallel import cross_entropy, layers
from megatron.core.tensor_parallel.grouped_linear import GroupedProducts, group_of_rows
from megatron.core.transformer.moe.experts import SequentialExperts
from tests.test_utils.training_steps import BATCH, LENGTH, VOCAB, build

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"}
"""Methods of tensors that wait for the device; of tensors in host memory torch dispatches no operation for them."""
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}
"""Operations whose result is a number, or whose size depends on values."""


class Reads(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in READS:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if name in WAITING or name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.found.append(name)
        return function(*args, **kwargs)


def _members(ends, rows):
    """Return bool [r, g]: whether a row belongs to a group."""
    return group_of_rows(ends, rows)[:, None] == torch.arange(len(ends))


def multiply(x, weight, ends):
    """Every row through every expert, as a grouped GEMM does: it reads ``ends`` where they are."""
    members = _members(ends, len(x))
    products = torch.einsum("ri,goi->rgo", x.where(members.any(1, keepdim=True), 0), weight)
    return torch.einsum("rgo,rg->ro", products, members.to(x.dtype))


def weight_gradient(grad, x, ends, total=None):
    members = _members(ends, len(x))
    of_none = ~members.any(1, keepdim=True)
    spread = grad.masked_fill(of_none, 0)[:, None] * members[:, :, None].to(x.dtype)
    result = torch.einsum("rgo,ri->goi", spread, x.masked_fill(of_none, 0))
    return result if total is None else total.add_(result)


def step(rank, world, ep, settings):
    """Return the host's reads in a step after the first, and the weights after it."""
    groups = parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    model = build(
        groups, expert_model_parallel_size=ep, num_moe_experts=4, moe_z_loss_coeff=0.01,
        moe_router_load_balancing_type=["seq_aux_loss"], moe_aux_loss_coeff=[0.1],
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, **settings,
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, SequentialExperts):
            module.linear_fc1.products = module.linear_fc2.products = GroupedProducts(multiply, weight_gradient)
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), model, groups=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=1.0, adam_eps=1e-4), [ddp], groups=groups)
    position, reads, waits = torch.arange(LENGTH).expand(BATCH // groups.dp.size, -1), Reads(), Waits()
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    local, everything = tokens.chunk(groups.dp.size)[groups.dp.rank], torch.ones(len(position), LENGTH)
    index = torch.arange(BATCH).chunk(groups.dp.size)[groups.dp.rank]
    with reads, waits, pytest.MonkeyPatch.context() as patch:
        for module in (layers, cross_entropy):
            patch.setattr(module, "check_ids", lambda *_: None)  # it reads ids only in host memory
        patch.setattr(philox, "_array", lambda values: values)  # in torch, as on a device
        ddp.zero_grad_buffer()
        losses = ddp(local[:, :-1], position, labels=local[:, 1:], sample_index=index, loss_mask=everything)
        losses.sum().backward()
        finalize_model_grads([ddp], everything.sum(), groups=groups)
        optimizer.update()
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    return reads.found, waits.found, weight.detach()


def test_a_step_of_dropless_expert_parallelism_with_static_rows_reads_nothing(gloo_pool):
    (one,) = gloo_pool.run(step, 1, 1, {})
    for reads, waits, weight in gloo_pool.run(step, 2, 2, {"moe_static_rows": True}):
        assert not reads and not waits
        torch.testing.assert_close(weight, one[2], rtol=1e-9, atol=1e-11)


def test_other_ways_read_the_number_of_rows_once_a_layer(gloo_pool):
    for kind in ("allgather", "alltoall"):
        for reads, waits, _ in gloo_pool.run(step, 2, 2, {"moe_token_dispatcher_type": kind}):
            assert (reads, waits) == (["tolist"] * 2, [])
