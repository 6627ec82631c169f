"""The maximum attention logit of each head is exact on any number of ranks, and rows within the threshold stay."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.core.attention.context_parallel.zigzag import CHUNKS
from megatron.core.attention.masks import Mask
from megatron.core.attention.max_logits import MaxLogits
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.tiles import Visibility
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.fusions.installed_triton import triton
from megatron.core.fusions.scale_rows import scale_rows, scale_rows_triton
from megatron.core.fusions.storage import Copy, FSDPStorage, Remainder, Storage
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.optimizer.weight_edits import RowScaling
from megatron.core.transformer.qk_clip import QKClip
from tests.test_utils.training_steps import build

interpreted = pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs Triton's interpreter")


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


VISIBILITIES = [Visibility(), Visibility(False), Visibility(True, (3, 0)), Visibility(False, (2, 1))]
DOCUMENTS = {"none": None, "packed": [0, 3, 11, 16, 21, 32]}
LENGTH, BATCH = 16, 2


def expected_maxima(query, key, visibility, bounds, padding=0):
    """The maximum of each head from the scores of all pairs."""
    scores = 0.5 * torch.einsum("sbad,tbad->bast", query, key.repeat_interleave(2, dim=2))
    position = torch.arange(LENGTH)
    distance = position - position[:, None]
    left, right = visibility.window or (-1, -1)
    hidden = (distance > 0) & visibility.causal | (distance < -left) & (left >= 0) | (distance > right) & (right >= 0)
    hidden = hidden.expand(BATCH, 1, LENGTH, LENGTH) | (position >= LENGTH - padding)[:, None]
    if bounds is not None:
        number = torch.bucketize(torch.arange(BATCH * LENGTH), torch.tensor(bounds[1:]), right=True).view(BATCH, -1)
        hidden = hidden | (number[:, None, :, None] != number[:, None, None, :])
    return scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))


def packed(bounds):
    if bounds is None:
        return None
    return PackedSeqParams(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("visibility", VISIBILITIES)
@pytest.mark.parametrize("block", [3, 1024])
def test_maximum_includes_all_visible_pairs(monkeypatch, visibility, block, documents):
    monkeypatch.setattr("megatron.core.attention.max_logits._BLOCK", block)
    actual, bounds = MaxLogits(0.5, 1), DOCUMENTS[documents]
    expected = torch.full((6,), -torch.inf, dtype=torch.float64)
    for seed in (1, 2):
        query, key = random(LENGTH, BATCH, 6, 4, seed=seed), random(LENGTH, BATCH, 3, 4, seed=seed + 5)
        actual.add(query, key, Mask(visibility, packed(bounds)))
        expected = torch.maximum(expected, expected_maxima(query, key, visibility, bounds))
    torch.testing.assert_close(actual.take(expected, 6), expected)
    assert actual.take(expected, 6).max() == -torch.inf


def _maxima(rank, world_size, visibility, bounds, order, padding):
    group = Group("cp", tuple(range(world_size)), rank, torch.distributed.group.WORLD)
    layout = TokenLayout(group, order, padding=padding)
    query, key = random(LENGTH, BATCH, 6, 4, seed=1), random(LENGTH, BATCH, 3, 4, seed=2)
    # queries near the end see the largest keys on other ranks
    key[0] *= 3.0
    result = MaxLogits(0.5, 1)
    result.add(layout.local(query, 0), layout.local(key, 0), Mask(visibility, packed(bounds)), layout)
    return result.values, expected_maxima(query, key, visibility, bounds, padding)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("visibility", VISIBILITIES)
@pytest.mark.parametrize("order, padding", [*((order, 0) for order in CHUNKS), ("zigzag", 3), ("zigzag", 13)])
def test_maxima_of_context_parallel_ranks_include_the_keys_of_all(gloo_pool, visibility, documents, order, padding):
    results = gloo_pool.run(_maxima, 4, visibility, DOCUMENTS[documents], order, padding)
    result = torch.stack([values for values, _ in results]).amax(0)
    torch.testing.assert_close(result, results[0][1])


KINDS = {"fp32": Storage, "copy": Copy, "remainder": Remainder, "fsdp": FSDPStorage}


def stored(kind, values):
    """A storage with the masters ``values``."""
    storage = KINDS[kind](values.clone() if kind in ("fp32", "fsdp") else values.bfloat16())
    if storage.kept_dtype is not None:
        storage.kept = torch.zeros(values.shape, dtype=storage.kept_dtype)
    storage.write(values)
    return storage


@pytest.mark.parametrize("size, first", [(70 * 9, 0), (113, 40), (0, 5)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [scale_rows, pytest.param(scale_rows_triton, marks=interpreted)])
def test_rows_are_scaled_with_their_masters(kind, size, first, function):
    values = random(size, seed=3, dtype=torch.float32)
    factors = torch.where(torch.arange(70) % 3 == 0, 0.37, 1.0)
    storage, before, expected = (stored(kind, values) for _ in range(3))
    expected.write(expected.read() * factors[(first + torch.arange(size)) // 9])
    function(storage, factors, 9, first)
    for part in ("weight", "kept"):
        actual, requested = getattr(storage, part), getattr(expected, part)
        if function is scale_rows_triton and actual is not None and actual.dtype == torch.bfloat16 and kind == "copy":
            torch.testing.assert_close(actual, requested, rtol=2**-7, atol=0)  # Triton's interpreter truncates to bf16
        else:
            assert actual is requested is None or torch.equal(actual, requested)
    stays = factors[(first + torch.arange(size)) // 9] == 1.0
    assert torch.equal(storage.read()[stays], before.read()[stays])


def test_weights_within_the_threshold_are_not_written():
    class Frozen(Storage):
        def write(self, value):
            raise AssertionError("written")

    storage = Frozen(torch.ones(12))
    scale_rows(storage, torch.ones(4), 3, 0)
    with pytest.raises(AssertionError, match="written"):
        scale_rows(storage, torch.tensor([1.0, 0.5, 1.0, 1.0]), 3, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_scaled_on_the_device_gpu(kind):
    values = random(5000 * 96, seed=3, dtype=torch.float32).cuda()
    factors = torch.where(torch.arange(6000) % 7 == 0, 0.37, 1.0).cuda()
    storage, expected = (stored(kind, values.cpu()) for _ in range(2))
    for part in ("weight", "kept"):
        if (local := getattr(storage, part)) is not None:
            setattr(storage, part, local.cuda())
    scale_rows(storage, factors, 96, 100)
    scale_rows(expected, factors.cpu(), 96, 100)
    for part in ("weight", "kept"):
        actual, requested = getattr(storage, part), getattr(expected, part)
        assert actual is requested is None or torch.equal(actual.cpu(), requested)


LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 20, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 10,
}  # fmt: skip
MODELS = {
    "heads": {}, "groups": {"num_query_groups": 2}, "latent": LATENT, "latent queries": {**LATENT, "q_lora_rank": 12},
}  # fmt: skip
THRESHOLD, ALPHA = 0.5, 0.3


def clipped_model(more, **flags):
    model = build(SINGLE_PROCESS, {"position_embedding_type": "rope"}, hidden_dropout=0.0, attention_dropout=0.0,
                  init_method_std=0.5, **more, **flags)  # fmt: skip
    clip = QKClip([model], model.config, SINGLE_PROCESS)
    tokens = torch.arange(24).view(2, 12) * 7 % 53
    model(tokens, None, labels=tokens)
    return model, clip, tokens


def logits_by_head(model, tokens):
    """The maxima of each layer from new accumulators."""
    clip = QKClip([model], model.config, SINGLE_PROCESS)
    model(tokens, None, labels=tokens)
    return [item.values.clone() for item in clip.maxima]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("logs", [False, True])
def test_logits_are_the_threshold_after_the_weights_were_clipped(name, logs):
    """In the first layer, whose input stays. Heads that share a key are clipped by the largest of them."""
    flags = {"qk_clip": True, "qk_clip_threshold": THRESHOLD, "qk_clip_alpha": ALPHA, "log_max_attention_logit": logs}
    model, clip, tokens = clipped_model(MODELS[name], **flags)
    before = [item.values.clone() for item in clip.maxima]
    scaled = []

    def scale(parameter, factors):
        scaled.append(parameter)
        with torch.no_grad():
            parameter.mul_(factors.view(-1, *[1] * (parameter.dim() - 1)))

    clip(scale, torch.tensor(False))
    names = {"layer 1/max_attention_logit", "layer 2/max_attention_logit"} if logs else set()
    assert set(clip.logged) == names
    if logs:
        for number, values in enumerate(before, 1):
            assert float(clip.logged[f"layer {number}/max_attention_logit"]) == pytest.approx(float(values.max()))
    eta = (THRESHOLD / before[0]).clamp(max=1.0)
    if name == "groups":
        eta = eta.view(2, 2).amin(1, keepdim=True).expand(2, 2).flatten()
    assert eta.min() < 0.9 and len(scaled) == len({id(item) for item in scaled})
    after = logits_by_head(model, tokens)[0]
    torch.testing.assert_close(after, before[0] * eta, rtol=1e-9, atol=0)


@pytest.mark.parametrize("flags, skipped", [
    ({"qk_clip": True, "qk_clip_threshold": 0.01}, True), ({"qk_clip": True, "qk_clip_threshold": 1e6}, False),
    ({"log_max_attention_logit": True, "qk_clip_threshold": 0.01}, False),
])  # fmt: skip
def test_weights_stay_without_a_reason(flags, skipped):
    _, clip, _ = clipped_model({}, **flags)
    results = []
    clip(lambda parameter, factors: results.append(factors), torch.tensor(skipped))
    assert len(results) == (2 * 2 if "qk_clip" in flags else 0)  # weight and bias of two layers
    assert all(bool((result == 1.0).all()) for result in results)
    clip(lambda parameter, factors: results.append(factors), torch.tensor(False))  # no forward pass since
    assert all(bool((result == 1.0).all()) for result in results)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_a_forward_pass_nothing_is_scaled_and_the_maximum_is_lowest(num_ranks):
    """A rank may have no micro-batch in a step."""
    model = clipped_model({})[0]
    groups = replace(SINGLE_PROCESS, tp=Group("tp", tuple(range(num_ranks))))
    config = replace(model.config, qk_clip=True, log_max_attention_logit=True)
    clip, results = QKClip([model], config, groups), []
    clip(lambda parameter, factors: results.append(factors), torch.tensor(False))
    rows = model.decoder.layers[0].self_attention.linear_qkv.weight.shape[0] // num_ranks
    assert len(results) == 4 and all(torch.equal(result, torch.ones(rows)) for result in results)
    assert [float(value) for value in clip.logged.values()] == [-torch.inf] * 2


def test_only_self_attention_of_this_library_is_clipped():
    class Foreign(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.core_attention = torch.nn.Identity()

    with pytest.raises(UserError, match=r"--qk-clip, --log-max-attention-logit: layer \(Foreign\) gives no logits"):
        QKClip([torch.nn.ModuleDict({"layer": Foreign()})], clipped_model({})[0].config, SINGLE_PROCESS)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_rows_of_a_shard_are_scaled_where_its_master_is(is_offloaded):
    class State:
        names = {"weight"} if is_offloaded else set()
        opened_names = []

        @contextlib.contextmanager
        def opened(self, name):
            self.opened_names.append(name)
            yield storage

    parameter, storage = torch.nn.Parameter(torch.ones(4, 3)), Storage(torch.ones(7))
    scaling = RowScaling({parameter: "weight"}, {"weight": SimpleNamespace(start=4)}, State())
    scaling(torch.nn.Parameter(torch.ones(4, 3)), torch.full((4,), 2.0))
    scaling(parameter, torch.ones(4))
    assert State.opened_names == ([] if is_offloaded else ["weight"]) and bool((storage.weight == 1).all())
    scaling(parameter, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert storage.weight.tolist() == [2, 2, 3, 3, 3, 4, 4]
