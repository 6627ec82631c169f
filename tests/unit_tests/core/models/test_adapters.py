"""Adapters of one linear layer against their definition: products, gradients, scale, memory, dropout."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core import parallel_state
from megatron.core.config.lora import LoraConfig
from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.adapters.dropout import CurrentTokens
from megatron.core.models.adapters.lora import LoraSettings, add_adapters
from megatron.core.models.adapters.transform import LoraTransform
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from megatron.core.sharding.placement import Normal, initialize_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

INPUTS, OUTPUTS, RANK, SCALE, ROWS, BATCH = 24, 40, 2, 1.5, 7, 3
CONFIG = ModelParallelConfig(params_dtype=torch.float64)


class Holder(torch.nn.Module):
    def __init__(self, kind=ColumnParallelLinear, groups=SINGLE_PROCESS):
        super().__init__()
        self.linear_fc1 = kind(INPUTS, OUTPUTS, config=CONFIG, init_method=Normal(0.2), bias=True, groups=groups)


def adapted(dropout=0.0, dora=False, kind=ColumnParallelLinear, groups=SINGLE_PROCESS):
    model = Holder(kind, groups)
    initialize_parameters(model, 3, groups)
    add_adapters(model, lambda name: True, LoraSettings(RANK, SCALE, dora, 5, dropout), groups)
    adapter = model.linear_fc1.adapter
    torch.manual_seed(1)
    with torch.no_grad():
        model.linear_fc1.bias.normal_()
        adapter.lora_b.normal_()
        if dora:
            adapter.lora_magnitude.normal_()
    return model.linear_fc1, adapter


def inputs():
    return torch.randn(ROWS, BATCH, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def defined(linear, adapter, x, factor=1.0):
    """Output by the formula of the paper. ``factor``: mask of the adapter's input over the probability to be kept."""
    added = SCALE * (factor * x) @ adapter.lora_a.mT @ adapter.lora_b.mT
    output = F.linear(x, linear.weight) + added
    if adapter.lora_magnitude is not None:
        rows = linear.weight + SCALE * adapter.lora_b @ adapter.lora_a
        output = output * adapter.lora_magnitude / rows.norm(dim=1).detach()
    return output + linear.bias


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("frozen_input", [False, True])
def test_output_and_gradients_equal_the_definition(dora, frozen_input):
    linear, adapter = adapted(dora=dora)
    results = []
    for compute in (lambda x: linear(x)[0], lambda x: defined(linear, adapter, x)):
        x = inputs().requires_grad_(not frozen_input)
        output = compute(x * 1.0)  # not a leaf, as inside of a model
        tensors = [*adapter.parameters(), *([] if frozen_input else [x])]
        results.append((output.detach(), *torch.autograd.grad(output.square().sum(), tensors)))
    for native, expected in zip(*results):
        torch.testing.assert_close(native, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("alpha, rslora, scale", [(None, False, 1), (6.0, False, 1.5), (None, True, 2), (6.0, True, 3)])
def test_scale_is_alpha_by_default_the_rank_over_the_rank_or_its_root(alpha, rslora, scale):
    lora = LoraConfig(lora_rank=4, lora_alpha=alpha, lora_use_rslora=rslora)
    groups = {LoraConfig: lora, PreferenceConfig: PreferenceConfig()}
    assert LoraTransform(SimpleNamespace(model=CONFIG, group=groups.__getitem__)).scale == scale


def merged_part(rank, world_size):
    parallel_state.initialize_model_parallel(world_size)
    linear, adapter = adapted(dora=True, kind=RowParallelLinear, groups=parallel_state.get_process_groups())
    return adapter.merged(linear.weight)


def test_ranks_that_split_rows_merge_the_weight_of_the_definition(gloo_pool):
    linear, adapter = adapted(dora=True, kind=RowParallelLinear)
    rows = (linear.weight + SCALE * adapter.lora_b @ adapter.lora_a).detach()
    expected = rows * (adapter.lora_magnitude.detach() / rows.norm(dim=1)).unsqueeze(1)
    actual = torch.cat(gloo_pool.run(merged_part, 2), dim=1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class LargeTensors(TorchDispatchMode):
    """Counts new tensors of at least ``elements`` elements that operations allocate."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.addresses = elements, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        registered = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.numel() >= self.elements:
            self.addresses += [result] if result.untyped_storage().data_ptr() not in registered else []
        return result


def test_adapters_allocate_no_tensor_of_the_size_of_input_or_output():
    """Forward: the output. Backward: the gradient of the input. Without adapters the same two."""
    linear, adapter = adapted()
    x, grad = inputs().requires_grad_() * 1.0, torch.ones(ROWS, BATCH, OUTPUTS, dtype=torch.float64)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with hooks, LargeTensors(ROWS * BATCH * INPUTS) as forward:
        output = linear(x)[0]
    with LargeTensors(ROWS * BATCH * INPUTS) as backward:
        torch.autograd.grad(output, [x, *adapter.parameters()], grad)
    assert (len(forward.addresses), len(backward.addresses)) == (1, 1)
    large = {tensor.data_ptr() for tensor in saved if tensor.numel() >= ROWS * BATCH * INPUTS}
    assert large == {x.data_ptr(), linear.weight.data_ptr()} and len(saved) == 5  # weight; x, A; low, B


# ---- dropout


def with_tokens(adapter, samples, length=ROWS, first=0):
    adapter.dropout.tokens.coordinates = DropoutCoordinates(
        DropoutStream(9), torch.tensor(samples), torch.arange(first, first + length)
    )


def test_dropout_changes_the_input_of_the_adapter_only():
    linear, adapter = adapted(dropout=0.25)
    with_tokens(adapter, [4, 5, 6])
    factor = adapter.dropout.dropped(torch.ones(ROWS, BATCH, INPUTS, dtype=torch.float64))
    assert {round(value, 6) for value in factor.unique().tolist()} == {0.0, round(4 / 3, 6)}
    results = []
    for compute in (lambda x: linear(x)[0], lambda x: defined(linear, adapter, x, factor)):
        x = inputs().requires_grad_()
        output = compute(x)
        results.append((output.detach(), *torch.autograd.grad(output.square().sum(), [*adapter.parameters(), x])))
    for native, expected in zip(*results):
        torch.testing.assert_close(native, expected, rtol=1e-12, atol=1e-12)
    linear.eval()
    torch.testing.assert_close(linear(inputs())[0], defined(linear, adapter, inputs()))


def test_mean_over_samples_is_the_output_without_dropout():
    """All means lie within five standard errors; one is 0.6 % of the input."""
    _, adapter = adapted(dropout=0.25)
    ones = torch.ones(1, 8000, INPUTS, dtype=torch.float64)
    with_tokens(adapter, list(range(8000)), length=1)
    means = adapter.dropout.dropped(ones).mean(1)
    assert float((means - 1).abs().max()) < 5 * (0.25 / 0.75 / 8000) ** 0.5 and float(means.std()) > 1e-3


def test_masks_are_functions_of_sample_position_layer_and_feature():
    ones = torch.ones(ROWS, BATCH, INPUTS, dtype=torch.float64)

    def mask(samples, name="linear_fc1", **where):
        _, adapter = adapted(dropout=0.5)
        adapter.dropout.site = ("adapter", name)
        with_tokens(adapter, samples, **where)
        return adapter.dropout.dropped(ones[: where.get("length", ROWS)])

    full = mask([4, 5, 6])
    assert torch.equal(mask([6, 4, 5])[:, 1], full[:, 0])
    assert torch.equal(mask([4, 5, 6], first=3, length=4), full[3:])
    assert not torch.equal(mask([4, 5, 6], name="linear_fc2"), full)
    _, adapter = adapted(dropout=0.5)
    adapter.dropout.first_feature = 12  # the second of two ranks that split the input
    with_tokens(adapter, [4, 5, 6])
    assert torch.equal(adapter.dropout.dropped(ones[..., 12:]), full[..., 12:])


def test_layers_note_the_tokens_of_their_micro_batch():
    assert CurrentTokens(Holder()).coordinates is None
    _, adapter = adapted(dropout=0.5)
    with pytest.raises(ValueError, match="dropout at .*linear_fc1.* needs the coordinates of its tokens"):
        adapter.dropout.dropped(inputs())
