"""The path of fused kernels, with the kernels' interface computed in plain torch: windows as flash kernels count them,
documents in groups, transposed layouts."""

import itertools

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.context_parallel.bands import bands_are_right
from megatron.core.attention.context_parallel.forms import AllGatherAttention, RingAttention
from megatron.core.attention.kernels.base import FlashKernel
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.packing import group_tiles, kernel_window
from megatron.core.attention.tiles import Tile, Visibility, plan_tiles
from megatron.core.attention.token_layout import TokenLayout

LENGTH, BATCH, HEADS, GROUPS, CHANNELS, SCALE = 32, 3, 4, 2, 6, 0.3
DOCUMENTS = (0, 7, 8, 26, 32, 32, 45, 64, 65, 66, 96)
CASES = list(itertools.product(
    [Visibility(True), Visibility(False), Visibility(True, (5, 0)), Visibility(True, (11, 0)),
     Visibility(True, (21, 0)), Visibility(False, (3, 9)), Visibility(False, (6, -1))],
    [None, DOCUMENTS],
))  # fmt: skip


def kernel_limits(window, num_keys):
    """Return window limits from the lower right corner as kernels apply them: None for a negative limit or one of at
    least ``num_keys``; if only one side has a limit, the other one becomes ``num_keys``."""
    left, right = (None if side < 0 or side >= num_keys else side for side in window)
    if (left is None) != (right is None):
        left, right = (num_keys if side is None else side for side in (left, right))
    return left, right


class FlashInTorch(FlashKernel):
    """torch's flash operators as their source has it (FlashAttention 2)."""

    def __init__(self):
        super().__init__(SCALE)
        self.reference, self.calls = UnfusedAttention(SCALE), 0

    def _pieces(self, tensors, shape, window):
        """(tile, tensors [1, a, n, d]) of each segment; ``shape`` as the operators take it."""
        self.calls += 1
        query_bounds, key_bounds, longest_query, longest_key = shape
        if query_bounds is None:
            batch, queries, keys = tensors[0].shape[0], longest_query, longest_key
            assert (queries, keys) == (tensors[0].shape[1], tensors[1].shape[1])
            places = [(row, (0, queries), (0, keys)) for row in range(batch)]
        else:
            assert query_bounds.dtype == key_bounds.dtype == torch.int32
            stretches = [list(zip(x.tolist(), x.tolist()[1:])) for x in (query_bounds, key_bounds)]
            assert max(stop - start for start, stop in stretches[0]) == longest_query
            assert max(stop - start for start, stop in stretches[1]) == longest_key
            places = [(None, *place) for place in zip(*stretches, strict=True)]
        for row, (q0, q1), (k0, k1) in places:
            shift = (k1 - k0) - (q1 - q0)
            left, right = kernel_limits(window, longest_key)
            tile = Tile(None, 0, q1 - q0, 0, k1 - k0, None if left is None else left - shift,
                        None if right is None else right + shift, 0, 0)  # fmt: skip
            yield tile, row, (q0, q1), (k0, k1)

    @staticmethod
    def _cut(x, row, stretch):
        piece = x[stretch[0] : stretch[1]] if row is None else x[row, stretch[0] : stretch[1]]
        return piece.transpose(0, 1).unsqueeze(0)

    def _flash(self, query, key, value, shape, window):
        out, packed = torch.empty_like(query), shape[0] is not None
        lse = query.new_empty((HEADS, len(query)) if packed else (len(query), HEADS, query.shape[1]))
        for tile, row, at_q, at_k in self._pieces((query, key), shape, window):
            pieces = self._cut(query, row, at_q), self._cut(key, row, at_k), self._cut(value, row, at_k)
            part, part_lse = self.reference.forward(*pieces, tile)
            self._cut(out, row, at_q).copy_(part)
            (lse[:, at_q[0] : at_q[1]] if packed else lse[row]).copy_(part_lse[0])
        return out, lse

    def _flash_backward(self, tensors, lse, shape, window):
        grad, query, key, value, out = tensors
        assert lse.is_contiguous()
        grads = [torch.empty_like(x) for x in (query, key, value)]
        for tile, row, at_q, at_k in self._pieces((query, key), shape, window):
            g, q, o = (self._cut(x, row, at_q) for x in (grad, query, out))
            k, v = (self._cut(x, row, at_k) for x in (key, value))
            part_lse = lse[:, at_q[0] : at_q[1]] if row is None else lse[row]
            parts = self.reference.backward(g, q, k, v, o, part_lse.unsqueeze(0), tile)
            for total, part, place in zip(grads, parts, (at_q, at_k, at_k), strict=True):
                self._cut(total, row, place).copy_(part)
        return grads


def results(form, inputs, mask):
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    output = form(*leaves, mask)
    output.backward(inputs[3])
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def largest_difference(rank, size, form):
    groups = parallel_state.initialize_model_parallel(context_parallel_size=size)
    generator = torch.Generator().manual_seed(2)
    shapes = [(HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, CHANNELS), (HEADS, CHANNELS)]
    full = [torch.randn(LENGTH, BATCH, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    local = [zigzag.local_part(x, rank, size, dim=0).contiguous() for x in full]
    worst, single = 0.0, parallel_state.get_process_groups().ep
    for visibility, documents in CASES:
        mask = Mask(visibility, None if documents is None else PackedSeqParams(bounds=documents))
        expected = results(RingAttention(TokenLayout(single), UnfusedAttention(SCALE)), full, mask)
        kernel = FlashInTorch()
        actual = results(form(TokenLayout(groups.cp), kernel), local, mask)
        assert kernel.calls > 0
        for x, part in zip(expected, actual, strict=True):
            part_of_whole = zigzag.local_part(x, rank, size, dim=0)
            worst = max(worst, ((part_of_whole - part).norm() / part_of_whole.norm()).item())
    return worst


@pytest.mark.parametrize("form", [RingAttention, AllGatherAttention])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_path_of_fused_kernels_equals_the_reference(gloo_pool, size, form):
    assert max(gloo_pool.run(largest_difference, size, form)) < 1e-12


@pytest.mark.parametrize("visibility", [Visibility(True), Visibility(False), Visibility(True, (5, 0))])
def test_documents_go_into_few_groups_without_a_token_twice(visibility):
    documents = tuple(range(0, 4097, 16))
    spans = [zigzag.spans(4096, rank, 2) for rank in range(2)]
    for keys in (*spans, ((0, 4096),)):
        tiles = plan_tiles(spans[0], keys, visibility, 4096, documents)
        groups = group_tiles(tiles)
        assert len(groups) <= 3 and sorted(sum(groups, ())) == sorted(tiles)
        for group in groups:
            assert len({kernel_window(tile) for tile in group}) == 1
            for start, count in (("query", "num_queries"), ("key", "num_keys")):
                tokens = [getattr(tile, start) + i for tile in group for i in range(getattr(tile, count))]
                assert len(tokens) == len(set(tokens))


def errors_of(kernel, tile):
    """Return relative errors of the output and the gradients of query, key and value for a single tile."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(HEADS, tile.num_queries), (GROUPS, tile.num_keys), (GROUPS, tile.num_keys), (HEADS, tile.num_queries)]
    q, k, v, g = (torch.randn(1, *size, CHANNELS, generator=generator, dtype=torch.float64) for size in sizes)
    plain = UnfusedAttention(SCALE)
    out, lse = plain.forward(q, k, v, tile)
    actual = [kernel.forward(q, k, v, tile)[0], *kernel.backward(g, q, k, v, out, lse, tile)]
    expected = [out, *plain.backward(g, q, k, v, out, lse, tile)]
    return [((x - y).norm() / y.norm()).item() for x, y in zip(actual, expected, strict=True)]


def test_flash_kernels_drop_keys_where_a_band_has_more_queries_than_keys():
    """Why ``plan_tiles`` makes no such band: a missing limit on the right becomes the number of keys."""
    tall = Tile(None, 0, 18, 0, 12, 6, None, 0, 0)
    assert errors_of(FlashInTorch(), tall)[0] > 0.03
    assert max(errors_of(FlashInTorch(), tall._replace(num_queries=12))) < 1e-12


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bands_with_a_limit_on_the_left_have_no_more_queries_than_keys(size):
    spans = [zigzag.spans(48, rank, size) for rank in range(size)]
    tiles = [
        tile
        for visibility, documents in itertools.product(
            [Visibility(causal, (left, 0 if causal else right)) for causal in (True, False) for left in range(0, 48, 5)
             for right in (-1, 0, 7)], [None, (0, 7, 8, 26, 48)],
        )
        for queries, keys in itertools.product(spans, [*spans, ((0, 48),)])
        for tile in plan_tiles(queries, keys, visibility, 48, documents)
    ]  # fmt: skip
    assert all(tile.num_queries <= tile.num_keys for tile in tiles if tile.left is not None)


class WithoutWindows(FlashInTorch):
    def _flash(self, query, key, value, shape, window):
        return super()._flash(query, key, value, shape, (-1, -1))


def test_a_kernel_that_is_wrong_on_bands_is_found_out():
    settings = (SCALE, 8, torch.float32, torch.device("cpu"))
    assert bands_are_right(FlashInTorch(), *settings)
    assert not bands_are_right(WithoutWindows(), *settings)
