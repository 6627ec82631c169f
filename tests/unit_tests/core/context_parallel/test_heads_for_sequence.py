"""Heads for sequence: every rank sees whole sequences of its heads, in any number of parts, one copy per exchange."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.core import parallel_state
from megatron.core.context_parallel import zigzag
from megatron.core.context_parallel.forms import AllToAllAttention
from megatron.core.context_parallel.heads_for_sequence import HeadExchange, copy_wide
from megatron.core.context_parallel.kernels import FusedBlocks
from megatron.core.context_parallel.tiles import Tile

LENGTH, BATCH, HEADS, GROUPS, CHANNELS = 24, 2, 16, 8, 4


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, GROUPS, GROUPS, HEADS)
    return [torch.randn(LENGTH, BATCH, heads, CHANNELS, generator=generator).to(dtype) for heads in sizes]


def mixed(query, key, value, documents=None, dropout=None):
    """Head by head, every token from the one before it: order and heads matter."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeats, 2) for x in (key, value))
    return query * key.roll(1, 0) + value.cumsum(0)


def results(attend, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    # strided inputs and a strided gradient: what is packed is copied anyway
    out = attend(*(leaf.transpose(0, 1).contiguous().transpose(0, 1) for leaf in leaves))
    out.backward(inputs[3].transpose(1, 2).contiguous().transpose(1, 2))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def equal_to_one_rank(rank, size, parts, dtype):
    groups = parallel_state.initialize_model_parallel(context_parallel_size=size)
    whole = tensors(dtype)
    local = [zigzag.local_part(x, rank, size, dim=0) for x in whole]
    found = results(AllToAllAttention(groups.cp, mixed, parts), local)
    expected = [zigzag.local_part(x, rank, size, dim=0) for x in results(mixed, whole)]
    return [torch.equal(x, y) for x, y in zip(found, expected, strict=True)]


@pytest.mark.parametrize("size, parts, dtype", [
    (2, 1, torch.bfloat16), (2, 4, torch.float64), (4, 1, torch.bfloat16),
    (4, 2, torch.bfloat16), (4, 3, torch.float32),
])  # fmt: skip
def test_the_exchange_changes_no_bit_of_an_attention_by_heads(gloo_pool, size, parts, dtype):
    for same in gloo_pool.run(equal_to_one_rank, size, parts, dtype):
        assert all(same), same


def elements_copied(rank, size):
    """Elements written by copies, forward and backward, in units of one local query, key and value."""
    group = parallel_state.initialize_model_parallel(context_parallel_size=size).cp
    query, key, value = (
        zigzag.local_part(x, rank, size, dim=0).contiguous().requires_grad_() for x in tensors(torch.bfloat16)[:3]
    )
    counts = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as forward:
        exchange = HeadExchange(query, key, value, group)
        heads = exchange.heads(0)
        out = exchange.receive([exchange.send(0, heads[0])])
    grad = torch.ones_like(out)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as backward:
        torch.autograd.backward((out, heads[1], heads[2]), (grad, torch.ones_like(heads[1]), torch.ones_like(heads[2])))
    for run in (forward, backward):
        copies = [event.input_shapes[0] for event in run.events() if event.name in ("aten::copy_", "aten::cat")]
        bytes_each = [torch.Size(shape).numel() * 8 for shape in copies]  # copied as int64
        counts.append(sum(bytes_each) / (query.nbytes + key.nbytes + value.nbytes))
    return counts


def test_one_copy_per_exchange(gloo_pool):
    """Of query, key and value on the way there, of the output (as large as the query) on the way back."""
    there_and_back = 1 + HEADS / (HEADS + 2 * GROUPS)
    for forward, backward in gloo_pool.run(elements_copied, 4):
        assert forward == backward == pytest.approx(there_and_back)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [8, 6, 5])
def test_wide_copies_change_no_bit_and_nothing_else(channels, dtype, device):
    base = torch.randn(4, 3, 2, 6, channels, device=device).to(dtype)
    source, target = base[1:].movedim(2, 0), torch.zeros(2, 4, 3, 6, channels, device=device, dtype=dtype)
    copy_wide(target[:, 1:], source)
    assert torch.equal(target[:, 1:], source) and not target[:, 0].any()


@pytest.mark.gpu
def test_gradients_of_fused_blocks_lie_as_their_sums_do():
    """Else sums would go by torch's slow addition."""
    query, grad = torch.randn(2, 512, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    keys_values = torch.randn(2, 512, 1, 2, 128, device="cuda", dtype=torch.bfloat16)
    kernel, first = FusedBlocks(0.1), [x.movedim(0, 2) for x in (query, *keys_values, grad)]
    for queries, keys in ((slice(0, 512), slice(0, 256)), (slice(256, 512), slice(0, 512))):
        tile = Tile(None, queries.start, queries.stop - queries.start, 0, keys.stop, None, None, 0, 0)
        q, k, v, g = first[0][:, :, queries], first[1][:, :, keys], first[2][:, :, keys], first[3][:, :, queries]
        out, lse = kernel.forward(q, k, v, tile)
        for part in kernel.backward(g, q, k, v, out, lse, tile):
            assert part.movedim(2, 0).is_contiguous(), part.stride()
