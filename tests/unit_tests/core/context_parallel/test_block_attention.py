"""A ring of four ranks played on one device: blocks of fused kernels, merged, against attention over everything."""

import pytest
import torch

from megatron.core.context_parallel import zigzag
from megatron.core.context_parallel.block_attention import BlockGradients, OnlineSoftmax
from megatron.core.context_parallel.kernels import BlockwiseTorch, FusedBlocks, make_block_kernel
from megatron.core.context_parallel.tiles import Visibility, plan_tiles

SIZE, BATCH, HEADS, GROUPS = 4, 2, 8, 2
DOCUMENT_LENGTHS = [100, 3, 409, 256, 256, 1, 700, 300, 23]  # two rows of 1024


DOCUMENTS = tuple(sum(DOCUMENT_LENGTHS[:count]) for count in range(len(DOCUMENT_LENGTHS) + 1))


def tensors(length, channels, dtype, device):
    generator = torch.Generator().manual_seed(1)
    shapes = [(HEADS, channels), (GROUPS, channels), (GROUPS, channels), (HEADS, channels)]
    return [torch.randn(length, BATCH, *shape, generator=generator).to(device, dtype) for shape in shapes]


def play_ring(kernel, inputs, visibility, documents, size, whole_keys=False):
    """Output and gradients of whole sequences, as ``size`` ranks of a ring (or of an all-gather) compute them."""
    query, key, value, grad = inputs
    length = query.shape[0]
    blocks = [((0, length),)] if whole_keys else [zigzag.spans(length, rank, size) for rank in range(size)]
    key_values = torch.stack((key, value))
    held = [key_values] if whole_keys else [zigzag.local_part(key_values, rank, size) for rank in range(size)]
    grad_held = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in held]
    outs, grad_queries = [], []
    for rank in range(size):
        spans = zigzag.spans(length, rank, size)
        q, g = (zigzag.local_part(x, rank, size, dim=0).contiguous() for x in (query, grad))
        tiles = [plan_tiles(spans, keys, visibility, length, documents) for keys in blocks]
        softmax = OnlineSoftmax(q, kernel)
        for block, visible in zip(held, tiles):
            softmax.add_block(block[0], block[1], visible)
        out, lse = softmax.finish()
        gradients = BlockGradients(g, q, out, lse, kernel)
        for block, visible, total in zip(held, tiles, grad_held):
            gradients.add_block(block, visible, total)
        outs.append(out)
        grad_queries.append(gradients.grad_query)
    grad_key_values = grad_held[0] if whole_keys else zigzag.whole(grad_held)
    return [zigzag.whole(outs, dim=0), zigzag.whole(grad_queries, dim=0), *grad_key_values]


def errors(found, expected):
    return [((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in zip(found, expected, strict=True)]


VISIBILITIES = {
    "causal": Visibility(True), "all pairs": Visibility(False), "window": Visibility(True, (150, 0)),
    "two-sided window": Visibility(False, (70, 300)),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("whole_keys", [False, True], ids=["ring", "all-gather"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("visibility", VISIBILITIES.values(), ids=VISIBILITIES.keys())
@pytest.mark.parametrize("preferred, channels", [("cudnn", 128), ("cudnn", 64), ("flash", 128)])
def test_merged_blocks_of_fused_kernels_equal_attention_over_everything(
    preferred, channels, visibility, packed, whole_keys
):
    if visibility.window is not None and not whole_keys:
        kernel = make_block_kernel(0.1, "auto", torch.bfloat16, channels=channels, dropout_rate=0.0, ring_window=True)
        assert isinstance(kernel, BlockwiseTorch)  # rings with windows have no fused kernel that is right
        return
    inputs = tensors(1024, channels, torch.bfloat16, "cuda")
    documents = DOCUMENTS if packed else None
    exact = play_ring(BlockwiseTorch(0.1), [x.float() for x in inputs], visibility, documents, 1)
    found = play_ring(FusedBlocks(0.1, preferred), inputs, visibility, documents, SIZE, whole_keys)
    output, *gradients = errors(found, exact)
    assert output < 5e-3 and max(gradients) < 2e-2, (output, gradients)


@pytest.mark.gpu
def test_fused_kernels_are_chosen_for_16_bit_types_on_a_gpu():
    choices = {"channels": 128, "dropout_rate": 0.0}
    assert isinstance(make_block_kernel(1.0, "auto", torch.bfloat16, **choices), FusedBlocks)
    assert make_block_kernel(1.0, "flash", torch.bfloat16, **choices).preferred == "flash"
    assert isinstance(make_block_kernel(1.0, "unfused", torch.bfloat16, **choices), BlockwiseTorch)


@pytest.mark.parametrize("whole_keys", [False, True], ids=["ring", "all-gather"])
@pytest.mark.parametrize("visibility", VISIBILITIES.values(), ids=VISIBILITIES.keys())
def test_the_played_ring_equals_one_rank_in_float32(visibility, whole_keys):
    inputs = tensors(1024, 8, torch.float32, "cpu")
    exact = play_ring(BlockwiseTorch(0.1), inputs, visibility, DOCUMENTS, 1)
    found = play_ring(BlockwiseTorch(0.1), inputs, visibility, DOCUMENTS, SIZE, whole_keys)
    assert max(errors(found, exact)) < 1e-5


def test_plain_torch_serves_what_fused_kernels_do_not():
    assert isinstance(make_block_kernel(1.0, "auto", torch.float64, channels=64, dropout_rate=0.0), BlockwiseTorch)
    assert isinstance(make_block_kernel(1.0, "auto", torch.bfloat16, channels=64, dropout_rate=0.1), BlockwiseTorch)


@pytest.mark.parametrize("form_of_rows", ["causal", "window"])
def test_16_bit_inputs_are_merged_in_float32(form_of_rows):
    inputs = tensors(256, 16, torch.bfloat16, "cpu")
    exact = play_ring(BlockwiseTorch(0.1), [x.float() for x in inputs], VISIBILITIES[form_of_rows], None, 1)
    found = play_ring(BlockwiseTorch(0.1), inputs, VISIBILITIES[form_of_rows], None, SIZE)
    assert max(errors(found, exact)) < 5e-3
