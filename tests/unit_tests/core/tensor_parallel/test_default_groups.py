"""Public functions that work on a group use the running program's, called with Megatron-LM's own arguments."""

import inspect
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import mappings, utils

ROWS, WIDTH, VOCAB = 4, 6, 10
UNEVEN = [3, 5]


def values(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def on(rank, seed=0, shape=(ROWS, WIDTH)):
    """Return the local tensor of rank ``rank``."""
    return values(10 * seed + rank, *shape)


def total(make):
    return sum(make(rank) for rank in range(2))


def both(make, dim=0):
    return torch.cat([make(rank) for rank in range(2)], dim=dim)


def half(x, rank, dim=0):
    return x.chunk(2, dim)[rank]


def weight(rank, shape):
    return values(100 + rank, *shape)


def exchanged(make):
    """Rows in two halves to the two ranks: what each rank then holds."""
    return [torch.cat([half(make(source), rank) for source in range(2)]) for rank in range(2)]


def sp2hp(make):
    return [torch.cat([half(make(source), rank, -1) for source in range(2)]) for rank in range(2)]


def hp2sp(make):
    return [torch.cat([half(make(source), rank) for source in range(2)], -1) for rank in range(2)]


# name -> (call with this rank's tensor, its shape, rank -> output, (rank, gradient of each output) -> gradient)
OPERATORS = {
    "copy_to_tensor_model_parallel_region": (
        lambda f, x: f(x), (ROWS, WIDTH), on, lambda rank, g: total(g)),
    "reduce_from_tensor_model_parallel_region": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: total(on), lambda rank, g: g(rank)),
    "scatter_to_tensor_model_parallel_region": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: half(on(rank), rank, -1), lambda rank, g: both(g, -1)),
    "gather_from_tensor_model_parallel_region": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: both(on, -1), lambda rank, g: half(g(rank), rank, -1)),
    "scatter_to_sequence_parallel_region": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: half(on(rank), rank), lambda rank, g: both(g)),
    "gather_from_sequence_parallel_region": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: both(on), lambda rank, g: half(total(g), rank)),
    "gather_from_sequence_parallel_region:replicated": (
        lambda f, x: f(input_=x, tensor_parallel_output_grad=False), (ROWS, WIDTH), lambda rank: both(on),
        lambda rank, g: half(g(rank), rank)),
    "gather_from_sequence_parallel_region:positional": (
        lambda f, x: f(x, True), (ROWS, WIDTH), lambda rank: both(on), lambda rank, g: half(total(g), rank)),
    "reduce_scatter_to_sequence_parallel_region": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: half(total(on), rank), lambda rank, g: both(g)),
    "reduce_scatter_to_sequence_parallel_region:uneven": (
        lambda f, x: f(x, input_split_sizes=[1, 3]), (ROWS, WIDTH), lambda rank: total(on).split([1, 3])[rank],
        lambda rank, g: both(g)),
    "all_gather_last_dim_from_tensor_parallel_region": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: both(on, -1), lambda rank, g: half(total(g), rank, -1)),
    "reduce_scatter_last_dim_to_tensor_parallel_region": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: half(total(on), rank, -1), lambda rank, g: both(g, -1)),
    "all_to_all_sp2hp": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: sp2hp(on)[rank], lambda rank, g: hp2sp(g)[rank]),
    "all_to_all_hp2sp": (
        lambda f, x: f(x), (ROWS, WIDTH), lambda rank: hp2sp(on)[rank], lambda rank, g: sp2hp(g)[rank]),
    "all_to_all": (
        lambda f, x: f(parallel_state.get_tensor_model_parallel_group(), x), (ROWS, WIDTH),
        lambda rank: exchanged(on)[rank], lambda rank, g: exchanged(g)[rank]),
}  # fmt: skip


def transposed(x):
    """Return a copy of ``x`` in column-major memory, which is not contiguous."""
    return x.detach().t().contiguous().t()


def run_operator(case, memory=torch.clone):
    """(largest error of the output, of the gradient) on this rank; ``memory`` sets the strides of the inputs."""
    name = case.partition(":")[0]
    call, shape, output_of, gradient_of = OPERATORS[case]
    rank = dist.get_rank()
    x = memory(on(rank, shape=shape)).requires_grad_()
    out = call(getattr(tensor_parallel, name), x)
    expected = output_of(rank)
    assert out.shape == expected.shape, (case, out.shape)
    out.backward(memory(weight(rank, out.shape)))
    gradient = gradient_of(rank, lambda item: weight(item, output_of(item).shape))
    assert torch.equal(x.detach(), on(rank, shape=shape)), f"{case} overwrote its input"
    return max((out - expected).abs().max().item(), (x.grad - gradient).abs().max().item())


def uneven_gather():
    """Parts of different lengths, whose gradients are summed."""
    rank = dist.get_rank()
    x = values(rank, UNEVEN[rank], WIDTH).requires_grad_()
    out = tensor_parallel.gather_from_sequence_parallel_region(x, output_split_sizes=UNEVEN)
    (out * weight(rank, out.shape)).sum().backward()
    full = torch.cat([values(index, UNEVEN[index], WIDTH) for index in range(2)])
    gradient = total(lambda item: weight(item, full.shape)).split(UNEVEN)[rank]
    return max((out - full).abs().max().item(), (x.grad - gradient).abs().max().item())


def split_and_gather():
    full, rank = values(3, ROWS, WIDTH), dist.get_rank()
    part = tensor_parallel.split_tensor_into_1d_equal_chunks(full)
    copy = tensor_parallel.split_tensor_into_1d_equal_chunks(full, new_buffer=True)
    assert part.data_ptr() == full.flatten().data_ptr() + rank * part.nbytes and copy.data_ptr() != part.data_ptr()
    assert torch.equal(part, half(full.flatten(), rank)) and torch.equal(part, copy)
    return (tensor_parallel.gather_split_1d_tensor(part) - full.flatten()).abs().max().item()


def broadcast():
    data = {"x": torch.arange(6).view(2, 3), "y": torch.tensor([7])} if dist.get_rank() == 0 else None
    got = tensor_parallel.broadcast_data(["x", "y"], data, torch.int64)
    return float((got["x"] - torch.arange(6).view(2, 3)).abs().max() + (got["y"] - 7).abs().max())


def smoothed(logits, target, smoothing):
    """The loss of Megatron-LM's formula, of all entries."""
    spread = smoothing * VOCAB / (VOCAB - 1)
    log_probs = logits.log_softmax(-1)
    return (spread - 1) * log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1) - spread * log_probs.mean(-1)


def cross_entropy(*arguments, stored=VOCAB, **named):
    """Labels are on both ranks; ``stored`` entries include padding, which may fill the second rank."""
    logits, target = values(5, 3, 2, VOCAB), torch.tensor([[0, 9], [4, 5], [3, 8]])
    padded = F.pad(logits, (0, stored - VOCAB))
    named |= {} if stored == VOCAB else {"vocab_size": VOCAB, "divisible_by": stored}
    local = half(padded, dist.get_rank(), -1).clone().requires_grad_()
    losses = tensor_parallel.vocab_parallel_cross_entropy(local, target, *arguments, **named)
    smoothing = named.get("label_smoothing", arguments[0] if arguments else 0.0)
    full = logits.clone().requires_grad_()
    expected = smoothed(full, target, smoothing)
    if not smoothing:
        expected = F.cross_entropy(full.flatten(0, 1), target.flatten(), reduction="none").view(3, 2)
    factor = values(6, 3, 2)
    (losses * factor).sum().backward()
    (expected * factor).sum().backward()
    gradient = half(F.pad(full.grad, (0, stored - VOCAB)), dist.get_rank(), -1)
    return max((losses - expected).abs().max().item(), (local.grad - gradient).abs().max().item())


def ignored_labels():
    """Negative labels: the loss that Megatron-LM has there, and no gradient once it is masked."""
    logits, target = values(5, 4, VOCAB), torch.tensor([2, -1, -100, 7])
    local = half(logits, dist.get_rank(), -1).clone().requires_grad_()
    losses = tensor_parallel.vocab_parallel_cross_entropy(local, target)
    expected = F.cross_entropy(logits, target.clamp(min=0), reduction="none")
    expected[1:3] = (logits - logits.amax(-1, keepdim=True)).exp().sum(-1).log()[1:3]
    (losses * (target >= 0)).sum().backward()
    assert local.grad[1:3].abs().max() == 0 and local.grad[0].abs().max() > 0
    return (losses - expected).abs().max().item()


OTHERS = {
    "gather_from_sequence_parallel_region:uneven": uneven_gather,
    "split_tensor_into_1d_equal_chunks": split_and_gather,
    "gather_split_1d_tensor": split_and_gather,
    "broadcast_data": broadcast,
    "vocab_parallel_cross_entropy": cross_entropy,
    "vocab_parallel_cross_entropy:smoothing": partial(cross_entropy, label_smoothing=0.1),
    "vocab_parallel_cross_entropy:padded": partial(cross_entropy, stored=16),
    "vocab_parallel_cross_entropy:padded, smoothing": partial(cross_entropy, label_smoothing=0.1, stored=16),
    "vocab_parallel_cross_entropy:padding alone, smoothing": partial(cross_entropy, label_smoothing=0.1, stored=32),
    "vocab_parallel_cross_entropy:positional": partial(cross_entropy, 0.3, None),
    "vocab_parallel_cross_entropy:ignored": ignored_labels,
}


def _all_cases(rank, world_size, tensor_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
    errors = {case: run_operator(case) for case in OPERATORS}
    errors |= {f"{case}, not contiguous": run_operator(case, transposed) for case in OPERATORS}
    return errors | {case: run() for case, run in OTHERS.items()}


def test_every_function_takes_the_running_programs_group(gloo_pool):
    for errors in gloo_pool.run(_all_cases, 2, 2):
        assert max(errors.values()) < 1e-12, errors


def test_every_public_function_of_a_group_has_a_case():
    named = {case.partition(":")[0] for case in (*OPERATORS, *OTHERS)}
    for module in (tensor_parallel, mappings, utils):
        for name, function in vars(module).items():
            is_public = inspect.isfunction(function) and not name.startswith("_") and name != "resolve_group"
            if is_public and {"group", "tp_group"} & inspect.signature(function).parameters.keys():
                assert name in named, f"{module.__name__}.{name}"


def _given_group(rank, world_size):
    """A torch group that is not the tensor-parallel one, and one that the program made itself."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    x = torch.full((2, 2), float(rank))
    of_data = tensor_parallel.reduce_from_tensor_model_parallel_region(x, parallel_state.get_data_parallel_group())
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    local = tensor_parallel.gather_from_tensor_model_parallel_region(x, group=pairs[rank in (1, 2)])
    single = tensor_parallel.reduce_from_tensor_model_parallel_region(
        x, parallel_state.get_pipeline_model_parallel_group()
    )
    with pytest.raises(ValueError, match="is not among its ranks"):
        parallel_state.resolve_group(pairs[rank not in (1, 2)])
    return of_data[0, 0].item(), local[0].tolist(), single[0, 0].item()


def test_a_given_torch_group_is_used(gloo_pool):
    assert gloo_pool.run(_given_group, 4) == [
        (2.0, [0.0, 0.0, 3.0, 3.0], 0.0), (4.0, [1.0, 1.0, 2.0, 2.0], 1.0),
        (2.0, [1.0, 1.0, 2.0, 2.0], 2.0), (4.0, [0.0, 0.0, 3.0, 3.0], 3.0),
    ]  # fmt: skip


def test_without_model_parallelism_they_are_identities():
    x = values(1, ROWS, WIDTH)
    for case, (call, *_) in OPERATORS.items():
        if case not in ("all_to_all", "reduce_scatter_to_sequence_parallel_region:uneven"):
            assert torch.equal(call(getattr(tensor_parallel, case.partition(":")[0]), x), x), case


def test_sizes_that_ranks_cannot_share_are_named(gloo_pool):
    for message in gloo_pool.run(_odd_width, 2):
        assert message == "dim -1 of shape (2, 5) is not divisible by the tp size 2"


def _odd_width(rank, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(ValueError) as error:
        tensor_parallel.scatter_to_tensor_model_parallel_region(torch.zeros(2, 5))
    return str(error.value)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_smoothing_must_be_a_probability(smoothing):
    with pytest.raises(ValueError, match="label_smoothing"):
        tensor_parallel.vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), smoothing)


def test_smoothing_leaves_out_padding():
    """Logits of this library's models are -inf at padding, or zero with the true size given."""
    logits, target = values(2, 3, VOCAB), torch.tensor([0, 4, 9])
    expected = smoothed(logits, target, 0.2)
    loss = tensor_parallel.vocab_parallel_cross_entropy
    padded = F.pad(logits, (0, 6), value=-torch.inf).requires_grad_()
    result = loss(padded, target, 0.2)
    result.sum().backward()
    torch.testing.assert_close(result, expected)
    assert padded.grad.isfinite().all() and padded.grad[:, VOCAB:].abs().max() == 0
    torch.testing.assert_close(loss(F.pad(logits, (0, 6)), target, 0.2, vocab_size=VOCAB, divisible_by=16), expected)
