"""Multi-token prediction against its definition, and over context-parallel ranks; rejected settings."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.multi_token_prediction import shifted_tokens

VOCAB, LENGTH, BATCH, DEPTHS, FACTOR = 50, 12, 3, 2, 0.3
BOUNDS = torch.tensor([0, 5, 12, 13, 24, 36], dtype=torch.int32)


MASKS = {
    "every token": torch.ones(BATCH, LENGTH),
    "no token": torch.zeros(BATCH, LENGTH),
    "first tokens": (torch.arange(LENGTH) == 0).float().repeat(BATCH, 1),  # later depths have no target
    "last tokens": (torch.arange(LENGTH) == LENGTH - 1).float().repeat(BATCH, 1),
    "early half": (torch.arange(LENGTH) < LENGTH // 2).float().repeat(BATCH, 1),
    "uneven rows": (torch.arange(LENGTH) < torch.tensor([[2], [7], [12]])).float(),
    "one row": torch.tensor([[0.0], [1.0], [0.0]]) * (torch.arange(LENGTH) % 3 > 0),
}
"""Loss masks under which ranks count different numbers of tokens, or none."""


def make_model(tied=True, groups=SINGLE_PROCESS, **overrides):
    settings = {
        "num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "params_dtype": torch.float64,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True, "init_method_std": 0.3,
        "mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": FACTOR,
    }  # fmt: skip
    config = TransformerConfig(**{**settings, **overrides})
    spec = get_gpt_decoder_block_spec(config)
    return GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=16, share_embeddings_and_output_weights=tied,
        make_vocab_size_divisible_by=64, mtp_block_spec=get_gpt_mtp_block_spec(config, spec), groups=groups,
    )  # fmt: skip


def batch(masked=True):
    """Ids, positions, labels and loss mask; a whole row and single tokens do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    mask = (torch.rand(BATCH, LENGTH, generator=generator) < 0.7).float() if masked else torch.ones(BATCH, LENGTH)
    mask[1] *= not masked
    return tokens[:, :-1], torch.arange(LENGTH).expand(BATCH, -1), tokens[:, 1:], mask


def document_of(row, position):
    return int(torch.searchsorted(BOUNDS, row * LENGTH + position, right=True))


def objective(model, ids, positions, labels, mask, packed):
    """Sum of main losses and weighted sums of later ones, token by token; the layers themselves are the model's."""
    weights = dict(model.named_parameters())
    table = weights["embedding.word_embeddings.weight"]

    def embed(ids, positions):
        return (table[ids] + weights["embedding.position_embeddings.weight"][positions]).transpose(0, 1)

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def losses_of(hidden, labels):
        output = table if model.share_embeddings_and_output_weights else weights["output_layer.weight"]
        logits = hidden.transpose(0, 1) @ output[:VOCAB].T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)

    context = ForwardContext(
        layout=TokenLayout(documents=PackedSeqParams(cu_seqlens_q=BOUNDS) if packed else None)
    )
    hidden = model.decoder(embed(ids, positions), context)
    total, means, depths = (losses_of(hidden, labels) * mask).sum(), [], model.mtp.num_depths
    for depth in range(1, depths + 1):
        at, rows = f"mtp.layers.{depth - 1}", []
        next_ids, next_positions, next_labels, left = (torch.zeros_like(x) for x in (ids, positions, labels, mask))
        for row in range(BATCH):
            for i in range(LENGTH - depth):
                next_ids[row, i], next_positions[row, i] = ids[row, i + depth], positions[row, i + depth]
                next_labels[row, i] = labels[row, i + depth]
                apart = packed and document_of(row, i) != document_of(row, i + depth)
                left[row, i] = 0 if apart else mask[row, i + depth]
        both = norm(embed(next_ids, next_positions), f"{at}.enorm"), norm(hidden, f"{at}.hnorm")
        projected = torch.cat(both, dim=-1) @ weights[f"{at}.eh_proj.weight"].T
        hidden = norm(model.mtp.layers[depth - 1].mtp_model_layer(projected, context), f"{at}.final_layernorm")
        losses = losses_of(hidden, next_labels) * left
        for row in range(BATCH):
            if left[row].sum():
                rows.append(losses[row].sum() * mask[row].sum() / left[row].sum())
        means.append((losses.sum() / left.sum()).item())
        total = total + FACTOR / depths * sum(rows)
    return total, means


def gradients(model):
    result = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return result


def logged(model):
    """Means of the depths since the last call."""
    pairs = model.mtp.statistics.take(torch.device("cpu")).view(DEPTHS, 2)
    return (pairs[:, 0] / pairs[:, 1]).tolist()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("chunks", [None, 7])
def test_gradients_and_logged_means_are_those_of_the_definition(tied, packed, chunks):
    model = make_model(tied, cross_entropy_chunk_tokens=chunks)
    ids, positions, labels, mask = batch()
    documents = PackedSeqParams(cu_seqlens_q=BOUNDS) if packed else None
    losses = model(ids, positions, labels=labels, loss_mask=mask, packed_seq_params=documents)
    ((losses * mask).sum() * 5).backward()
    actual, means = gradients(model), logged(model)
    total, expected_means = objective(model, ids, positions, labels, mask, packed)
    (total * 5).backward()
    expected = gradients(model)
    assert means == pytest.approx(expected_means, rel=1e-12)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_those_of_the_definition_under_every_mask(name, depths):
    model, mask = make_model(mtp_num_layers=depths), MASKS[name]
    ids, positions, labels, _ = batch()
    losses = model(ids, positions, labels=labels, loss_mask=mask)
    (losses * mask).sum().backward()
    actual = gradients(model)
    objective(model, ids, positions, labels, mask, False)[0].backward()
    for weight, expected in gradients(model).items():  # None: the definition has no loss that reads the weight
        expected = torch.zeros_like(actual[weight]) if expected is None else expected
        torch.testing.assert_close(actual[weight], expected, rtol=1e-9, atol=1e-11, msg=weight)


def gradients_under_every_mask(rank, size, cp_size, depths):
    """Mask -> gradients of the sum over all ranks, each rank with its rows and its part of the sequences."""
    groups = parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    model = make_model(groups=groups, mtp_num_layers=depths, context_parallel_size=cp_size)
    weights = MainLoss(torch.tensor(5.0, dtype=torch.float64))
    *tokens, _ = batch()
    result = {}
    for name, mask in MASKS.items():
        rows = (x.chunk(groups.dp.size)[groups.dp.rank] for x in (*tokens, mask))
        ids, positions, labels, local = (zigzag.local_part(row, groups.cp.rank, cp_size) for row in rows)
        losses = model(ids, positions, labels=labels, loss_mask=local, main_loss=weights)
        ((losses * local).sum() * 5).backward()
        result[name] = torch.cat([gradient.flatten() for gradient in gradients(model).values()])
        if size > 1:
            torch.distributed.all_reduce(result[name])
    return {name: gradient.numpy() for name, gradient in result.items()}


@pytest.mark.parametrize("depths", [1, 3])
def test_uneven_tokens_of_data_and_context_parallel_ranks_change_no_gradient(gloo_pool, depths):
    (expected,) = gloo_pool.run(gradients_under_every_mask, 1, 1, depths)
    for size, cp_size in ((3, 1), (2, 2), (6, 2)):
        actual = gloo_pool.run(gradients_under_every_mask, size, cp_size, depths)[0]
        for name, gradient in expected.items():
            scale = abs(gradient).max()
            np.testing.assert_allclose(actual[name], gradient, rtol=0, atol=1e-12 * scale, err_msg=f"{name}, {size}")


@pytest.mark.parametrize("passes_mask", [True, False])
def test_a_mean_loss_weighs_later_tokens_equally(passes_mask):
    """Loss functions of two values differentiate a mean."""
    model = make_model()
    ids, positions, labels, mask = batch(masked=False)
    losses = model(ids, positions, labels=labels, loss_mask=mask if passes_mask else None)
    losses.mean().backward()
    actual = gradients(model)
    (objective(model, ids, positions, labels, mask, False)[0] / mask.numel()).backward()
    for name, expected in gradients(model).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-9, atol=1e-11, msg=name)


def test_evaluation_predicts_one_token():
    model = make_model().eval()
    ids, positions, labels, mask = batch()
    losses = model(ids, positions, labels=labels, loss_mask=mask)
    assert losses.shape == (BATCH, LENGTH) and not losses.grad_fn.next_functions[0][0].name().startswith("Attach")
    assert not model.mtp.statistics.take(torch.device("cpu")).any()


def shifted_parts(rank, size):
    """Return whether this rank's shifted tokens equal its part of one rank's shifted tokens."""
    groups = parallel_state.initialize_model_parallel(context_parallel_size=size)
    ids, positions, labels, mask = batch()
    packed = PackedSeqParams(cu_seqlens_q=BOUNDS)
    local = [zigzag.local_part(x, rank, size) for x in (ids, positions, labels, mask)]
    result = shifted_tokens(local[:3], local[3], 3, TokenLayout(groups.cp, documents=packed))
    full = shifted_tokens((ids, positions, labels), mask, 3, TokenLayout(documents=packed))
    parts = [(*(zigzag.local_part(token, rank, size) for token in tokens[:4]), tokens.weight) for tokens in full]
    return all(torch.equal(one, other) for a, b in zip(result, parts) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel_ranks_shift_over_their_borders(gloo_pool, size):
    assert all(gloo_pool.run(shifted_parts, size))


def test_shifts_longer_than_a_sequence_leave_nothing():
    ids = torch.arange(3).view(1, 3)
    last = shifted_tokens((ids, ids, ids), None, 5, TokenLayout())[-1]
    assert not last.loss_mask.any() and not last.input_ids.any() and last.weight.tolist() == [0.0]


def test_a_number_of_depths_goes_with_their_spec():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    spec = get_gpt_decoder_block_spec(config)
    assert get_gpt_mtp_block_spec(config, spec, vp_stage=None) is None
    deeper = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, mtp_num_layers=1)
    with pytest.raises(ValueError, match=r"mtp_num_layers 1 goes with mtp_block_spec=get_gpt_mtp_block_spec"):
        GPTModel(deeper, spec, vocab_size=9, max_sequence_length=4)
    with pytest.raises(ValueError, match="mtp_num_layers None goes with"):
        GPTModel(config, spec, vocab_size=9, max_sequence_length=4, mtp_block_spec=get_gpt_mtp_block_spec(deeper, spec))
