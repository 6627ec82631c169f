"""A ring of four ranks played on one device: blocks of fused kernels, merged, against attention over everything."""

import pytest
import torch

from megatron.core.attention import choose
from megatron.core.attention.choose import build_kernel, build_request, choose_kernel
from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.context_parallel.block_attention import BlockGradients, GradientSum, OnlineSoftmax
from megatron.core.attention.kernels.base import Request
from megatron.core.attention.kernels.torch_sdpa import TorchAttention
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.tiles import Tile, Visibility, plan_tiles
from megatron.core.config.transformer_config import TransformerConfig

SIZE, BATCH, HEADS, GROUPS = 4, 2, 8, 2
DOCUMENT_LENGTHS = [100, 3, 409, 256, 256, 1, 700, 300, 23]  # two rows of 1024


DOCUMENTS = tuple(sum(DOCUMENT_LENGTHS[:count]) for count in range(len(DOCUMENT_LENGTHS) + 1))


def tensors(length, channels, dtype, device):
    generator = torch.Generator().manual_seed(1)
    shapes = [(HEADS, channels), (GROUPS, channels), (GROUPS, channels), (HEADS, channels)]
    return [torch.randn(length, BATCH, *shape, generator=generator).to(device, dtype) for shape in shapes]


def play_ring(kernel, inputs, visibility, documents, size, whole_keys=False):
    """Return output and gradients of full sequences, computed like ``size`` ranks of a ring (or all-gather)."""
    query, key, value, grad = inputs
    length = query.shape[0]
    blocks = [((0, length),)] if whole_keys else [zigzag.spans(length, rank, size) for rank in range(size)]
    key_values = torch.stack((key, value))
    stored = [key_values] if whole_keys else [zigzag.local_part(key_values, rank, size) for rank in range(size)]
    grad_held = [GradientSum(2, x[0]) for x in stored]
    outs, grad_queries = [], []
    for rank in range(size):
        spans = zigzag.spans(length, rank, size)
        q, g = (zigzag.local_part(x, rank, size, dim=0).contiguous() for x in (query, grad))
        tiles = [plan_tiles(spans, keys, visibility, length, documents) for keys in blocks]
        softmax = OnlineSoftmax(q, kernel)
        for block, visible in zip(stored, tiles):
            softmax.add_block(block[0], block[1], visible)
        out, lse = softmax.finish()
        gradients = BlockGradients(g, q, out, lse, kernel)
        for block, visible, sums in zip(stored, tiles, grad_held):
            gradients.add_block(block, visible, sums)
        outs.append(out)
        grad_queries.append(gradients.grad_query())
    totals = [sums.total() for sums in grad_held]
    grad_key_values = totals[0] if whole_keys else zigzag.merge_parts(totals)
    return [zigzag.merge_parts(outs, dim=0), zigzag.merge_parts(grad_queries, dim=0), *grad_key_values]


def errors(actual, expected):
    return [
        ((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in zip(actual, expected, strict=True)
    ]


VISIBILITIES = {
    "wide window": Visibility(True, (300, 0)), "narrow window": Visibility(True, (40, 0)),
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
    inputs = tensors(1024, channels, torch.bfloat16, "cuda")
    documents = DOCUMENTS if packed else None
    exact = play_ring(UnfusedAttention(0.1), [x.float() for x in inputs], visibility, documents, 1)
    result = play_ring(TorchAttention(preferred, 0.1), inputs, visibility, documents, SIZE, whole_keys)
    output, *gradients = errors(result, exact)
    assert output < 5e-3 and max(gradients) < 2e-2, (output, gradients)


def error_text(number):
    return f"{number:9.1e}"


@pytest.mark.gpu
def test_flash_kernels_follow_their_rules_on_bands():
    """Raw calls with limits from the lower right corner. A band with a limit on the left and none on the right is wrong
    exactly where it has more queries than keys; an explicit limit of fewer than all keys is right."""
    rows, unexpected = ["   left  right queries   keys   forward  backward"], []
    for num_queries, num_keys in [(256, 256), (192, 256), (256, 192), (384, 256), (100, 333), (333, 100), (2, 77)]:
        shift = num_keys - num_queries
        for left, right in [(0, -1), (37, -1), (130, -1), (37, num_keys - 1), (37, 5), (-1, 20), (50, 0), (-1, 0)]:
            tile = Tile(
                None, 0, num_queries, 0, num_keys, None if left < 0 else left - shift,
                None if right < 0 else right + shift, 0, 0,
            )  # fmt: skip
            error = raw_flash_errors(tile, (left, right))
            rows.append(f"{left:7d}{right:7d}{num_queries:8d}{num_keys:7d}{''.join(map(error_text, error))}")
            expected_wrong = 0 <= left < num_keys and right < 0 and num_queries > num_keys + 1
            if (max(error) > 2e-2) != expected_wrong:
                unexpected.append(rows[-1])
    assert not unexpected, "\n".join([*rows, "unexpected:", *unexpected])


def raw_flash_errors(tile, window):
    """Return relative errors of the output and the gradients for queries that attend to a key."""
    generator = torch.Generator().manual_seed(4)
    sizes = [(HEADS, tile.num_queries), (GROUPS, tile.num_keys), (GROUPS, tile.num_keys), (HEADS, tile.num_queries)]
    q, k, v, g = (torch.randn(1, *size, 64, generator=generator).to("cuda", torch.bfloat16) for size in sizes)
    plain, fused = UnfusedAttention(0.1), TorchAttention("flash", 0.1)
    out, lse = plain.forward(q, k, v, tile)
    sees = lse.isfinite()
    out, lse = (x.where(sees.view(*sees.shape, *[1] * (x.dim() - 3)), 0.0) for x in (out, lse))
    g = g * sees.unsqueeze(-1)
    shape = (None, None, tile.num_queries, tile.num_keys)
    narrow = [x.transpose(1, 2) for x in (g, q, k, v, out.to(torch.bfloat16))]
    result = fused._flash(*narrow[1:4], shape, window)[0].transpose(1, 2) * sees.unsqueeze(-1)
    grads = [x.transpose(1, 2) for x in fused._flash_backward(narrow, lse.contiguous(), shape, window)]
    grads[0] = grads[0] * sees.unsqueeze(-1)
    exact = plain.backward(g, q, k, v, narrow[4].transpose(1, 2), lse, tile)
    exact = [exact[0].nan_to_num(0.0), *exact[1:]]
    return [errors([result], [out])[0], max(errors(grads, exact))]


@pytest.mark.gpu
def test_bands_of_rings_are_right_on_this_gpu():
    for channels, dtype in [(64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)]:
        kernel = "flash" if channels > 128 else "cudnn"
        assert choose._flash_bands_are_correct(kernel, channels, dtype), (channels, dtype)


@pytest.mark.parametrize("right", [True, False])
def test_a_ring_with_a_window_has_fused_blocks_only_where_they_are_right(monkeypatch, right):
    requested = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(choose, "_flash_bands_are_correct", lambda *arguments: requested.append(arguments) or right)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, params_dtype=torch.bfloat16, attention_dropout=0.0,
        window_size=(8, 0),
    )  # fmt: skip
    choice, kernel = build_kernel(build_request(config, config.window_size, "ring"), config, 1, 0.1)
    assert type(kernel) is (TorchAttention if right else UnfusedAttention)
    assert right or "wrong on the bands" in str(choice)
    assert requested == [("cudnn", 64, torch.bfloat16)]
    build_kernel(build_request(config, config.window_size, "gather"), config, 1, 0.1)
    assert len(requested) == 1  # only rings make bands that not every flash kernel gets right


@pytest.mark.parametrize(
    "backend, dtype, channels, rate, chosen",
    [
        ("auto", torch.bfloat16, 128, 0.0, "cudnn"), ("auto", torch.float16, 64, 0.0, "cudnn"),
        ("flash", torch.bfloat16, 128, 0.0, "flash"), ("auto", torch.bfloat16, 136, 0.0, "flash"),
        ("auto", torch.bfloat16, 256, 0.0, "flash"), ("auto", torch.bfloat16, 264, 0.0, "unfused"),
        ("auto", torch.bfloat16, 100, 0.0, "unfused"), ("auto", torch.bfloat16, 128, 0.1, "unfused"),
        ("auto", torch.float32, 128, 0.0, "unfused"), ("unfused", torch.bfloat16, 128, 0.0, "unfused"),
        ("local", torch.bfloat16, 128, 0.0, "unfused"), ("auto", torch.float64, 64, 0.0, "unfused"),
    ],
)  # fmt: skip
def test_fused_kernels_are_chosen_for_16_bit_types_on_a_gpu(backend, dtype, channels, rate, chosen):
    for form in ("ring", "gather"):
        assert choose_kernel(Request(backend, dtype, channels, (9, 0), dropout=rate, form=form)).kernel == chosen
    assert choose_kernel(Request(backend, dtype, channels, None, dropout=rate, form="ring")).kernel == "unfused"


@pytest.mark.parametrize("length, taken", [(1024, True), (1024 + 64, False)])
def test_cudnn_gets_tiles_of_lengths_that_it_computes_right(length, taken):
    spans = [zigzag.spans(length, rank, 2) for rank in range(2)]
    tiles = [tile for keys in spans for tile in plan_tiles(spans[0], keys, Visibility(True), length)]
    assert all(TorchAttention("cudnn", 0.1).takes_cudnn(tile) == taken for tile in tiles)
    assert not any(TorchAttention("flash", 0.1).takes_cudnn(tile) for tile in tiles)


@pytest.mark.parametrize("whole_keys", [False, True], ids=["ring", "all-gather"])
@pytest.mark.parametrize("visibility", VISIBILITIES.values(), ids=VISIBILITIES.keys())
def test_the_played_ring_equals_one_rank_in_float32(visibility, whole_keys):
    inputs = tensors(1024, 8, torch.float32, "cpu")
    exact = play_ring(UnfusedAttention(0.1), inputs, visibility, DOCUMENTS, 1)
    result = play_ring(UnfusedAttention(0.1), inputs, visibility, DOCUMENTS, SIZE, whole_keys)
    assert max(errors(result, exact)) < 1e-5


@pytest.mark.parametrize("form_of_rows", ["causal", "window"])
def test_16_bit_inputs_are_merged_in_float32(form_of_rows):
    inputs = tensors(256, 16, torch.bfloat16, "cpu")
    exact = play_ring(UnfusedAttention(0.1), [x.float() for x in inputs], VISIBILITIES[form_of_rows], None, 1)
    result = play_ring(UnfusedAttention(0.1), inputs, VISIBILITIES[form_of_rows], None, SIZE)
    assert max(errors(result, exact)) < 5e-3


class Arriving:
    """A sum in flight from another rank."""

    def __init__(self, total):
        self.total = total

    def wait(self):
        return self.total


PARTS = {"nothing": [], "whole": [(0, 6)], "late": [(3, 3)], "late, whole": [(3, 3), (0, 6)], "two": [(0, 6), (0, 6)],
         "early, middle": [(0, 3), (2, 2)], "whole, early": [(0, 6), (0, 3)]}  # fmt: skip


@pytest.mark.parametrize("arriving", [False, True], ids=["alone", "arriving"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_gradient_sums_add_in_float32_and_round_once(parts, arriving):
    generator = torch.Generator().manual_seed(0)
    like = torch.empty(6, 2, 3, 4, dtype=torch.bfloat16)
    start = torch.randn(2, *like.shape, generator=generator) if arriving else torch.zeros(2, *like.shape)
    for finish in ("total", "result"):
        sums = GradientSum(2, like, Arriving(start.clone()) if arriving else None)
        expected = start.clone()
        for first, count in parts:
            new = torch.randn(2, count, 2, 3, 4, generator=generator).bfloat16()
            sums.add(list(new.movedim(1, 3)), slice(None), first)
            expected[:, first : first + count] += new
        actual = sums.total() if finish == "total" else torch.stack(sums.result())
        assert torch.equal(actual, expected if finish == "total" else expected.bfloat16())
