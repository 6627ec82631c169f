"""GPTModel against straight-line references, forward and backward, in float64; padding, documents, dropout, sizes."""

import math

import pytest
import torch

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.description import describe_gpt
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from tests.test_utils.specs import unique_parameter_count

VOCAB, LENGTH, BATCH = 50, 12, 3
LLAMA = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "num_query_groups": 2}


def make_config(**overrides):
    sizes = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "params_dtype": torch.float64}
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    return TransformerConfig(**{**sizes, **rates, "init_method_std": 0.3, "bias_gelu_fusion": True, **overrides})


def make_model(config=None, **overrides):
    names = {"position_embedding_type", "share_embeddings_and_output_weights", "rotary_percent", "seed", "vocab_size",
             "make_vocab_size_divisible_by", "rotary_base", "pre_process", "post_process", "layer_range",
             "branches"}  # fmt: skip
    options = {name: overrides.pop(name) for name in list(overrides) if name in names}
    config = config or make_config(**overrides)
    arguments = {"vocab_size": VOCAB, "max_sequence_length": 16, "make_vocab_size_divisible_by": 64, **options}
    return GPTModel(config, get_gpt_decoder_block_spec(config), **arguments)


def batch(length=LENGTH, seed=0):
    tokens = torch.randint(0, VOCAB, (BATCH, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(length).expand(BATCH, length)


def randomize(model):
    """Norm weights and biases too, so that every parameter matters."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("hidden_size", [24, 48])
def test_scaled_embeddings_are_scaled_by_a_root_in_their_dtype(dtype, hidden_size):
    """Gemma rounds sqrt(24) = 4.89898 to 4.90625 in bf16; positions are scaled too."""
    sizes = {"hidden_size": hidden_size, "params_dtype": dtype}
    scaled, plain = (make_model(**sizes, apply_embedding_scaling=value).embedding for value in (True, False))
    tokens, _, positions = batch()
    words = plain.word_embeddings(tokens.t()) + plain.position_embeddings(positions.t())
    factor = torch.tensor(hidden_size, dtype=torch.float64).sqrt().to(dtype)
    result = scaled(tokens, positions)
    assert (
        result.dtype == dtype and torch.equal(result, words * factor) and torch.equal(plain(tokens, positions), words)
    )
    if dtype == torch.bfloat16:
        assert not torch.equal(result, words * hidden_size**0.5), "the rounding of the factor matters"


def norm(x, w, kind, name):
    if kind == "RMSNorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def rotate(x, base=10000.0):
    """[b, s, heads, d]: pairs (i, i + d/2) by complex multiplication."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]).double(), base ** (-torch.arange(half).double() / half))
    rotated = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def reference_losses(w, config, tokens, labels, rope, window=None):
    """Batch-first, head by head, no shared code: per-token losses [b, s]."""
    heads, groups, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
    length, kind = tokens.shape[1], config.normalization
    x = w["embedding.word_embeddings.weight"][tokens]
    if not rope:
        x = x + w["embedding.position_embeddings.weight"][:length]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance <= (length if window is None else window))
    for i in range(config.num_layers):
        p = f"decoder.layers.{i}"

        def linear(y, name, p=p):
            bias = w.get(f"{p}.{name}.bias")
            return y @ w[f"{p}.{name}.weight"].T + (0 if bias is None else bias)

        per_group = linear(norm(x, w, kind, f"{p}.input_layernorm"), "self_attention.linear_qkv").view(
            *tokens.shape, groups, heads // groups + 2, d
        )
        outputs = []
        for g in range(groups):
            key, value = per_group[..., g, -2, :], per_group[..., g, -1, :]
            key = rotate(key[:, :, None])[:, :, 0] if rope else key
            for h in range(heads // groups):
                query = per_group[..., g, h, :]
                query = rotate(query[:, :, None])[:, :, 0] if rope else query
                scores = query @ key.transpose(1, 2) / math.sqrt(d)
                outputs.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value)
        x = x + linear(torch.cat(outputs, -1), "self_attention.linear_proj")
        y = linear(norm(x, w, kind, f"{p}.pre_mlp_layernorm"), "mlp.linear_fc1")
        if config.swiglu:
            gate, up = y.chunk(2, -1)
            y = gate / (1 + (-gate).exp()) * up
        else:
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, "mlp.linear_fc2")
    x = norm(x, w, kind, "decoder.final_layernorm")
    logits = x @ w.get("output_layer.weight", w["embedding.word_embeddings.weight"])[:VOCAB].T
    return logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mqa_window"])
def test_losses_and_gradients_equal_a_straight_line_reference(name, tied, backend):
    overrides = {} if name == "gpt2" else dict(LLAMA)
    window = None
    if name == "mqa_window":
        window = 4
        overrides |= {"num_query_groups": 1, "window_size": (window, 0)}
    rope = name != "gpt2"
    model = make_model(
        attention_backend=backend, position_embedding_type="rope" if rope else "learned_absolute",
        share_embeddings_and_output_weights=tied, **overrides,
    )  # fmt: skip
    randomize(model)
    tokens, labels, positions = batch()
    weights = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    expected = reference_losses(weights, model.config, tokens, labels, rope, window)
    losses = model(tokens, positions, labels=labels)
    assert losses.shape == (BATCH, LENGTH)
    torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-11)
    coefficients = torch.linspace(0, 1, BATCH * LENGTH, dtype=torch.float64).view(BATCH, LENGTH)
    (losses * coefficients).sum().backward()
    (expected * coefficients).sum().backward()
    for key, param in model.named_parameters():
        torch.testing.assert_close(param.grad, weights[key].grad, rtol=1e-9, atol=1e-11, msg=f"{key}: {{}}".format)


def test_weight_names_are_the_known_ones():
    names = set(make_model(qk_layernorm=True).state_dict())
    layer = "decoder.layers.1."
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    norms = ("input_layernorm", "pre_mlp_layernorm", "self_attention.q_layernorm", "self_attention.k_layernorm")
    assert {layer + n + suffix for n in linears + norms for suffix in (".weight", ".bias")} <= names
    assert names - {n for n in names if ".layers." in n} == {
        "embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias", "output_layer.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    "asked, configured, expected",
    [
        ({}, {}, "IdentityOp"),
        ({}, {"qk_layernorm": True}, "RMSNorm"),
        ({}, {"qk_l2_norm": True, "qk_layernorm": True}, "L2Norm"),
        ({"qk_layernorm": True}, {}, "RMSNorm"),
        ({"qk_l2_norm": True}, {}, "L2Norm"),
        ({"qk_layernorm": True}, {"qk_layernorm": True, "qk_layernorm_across_heads": True}, "NormAcrossHeads"),
    ],
)
def test_configuration_chooses_qk_norms_and_specs_override(asked, configured, expected):
    config = make_config(normalization="RMSNorm", **configured)
    attention = GPTModel(config, get_gpt_layer_local_spec(**asked), VOCAB, 16).decoder.layers[0].self_attention
    assert {type(attention.q_layernorm).__name__, type(attention.k_layernorm).__name__} == {expected}


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_padding_changes_neither_loss_nor_gradient(tied):
    tokens, labels, positions = batch()
    results = []
    for multiple in (1, 64, 128):
        model = make_model(make_vocab_size_divisible_by=multiple, share_embeddings_and_output_weights=tied)
        loss = model(tokens, positions, labels=labels).sum()
        loss.backward()
        table = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        assert table.grad[VOCAB:].abs().sum() == 0 and table[VOCAB:].abs().sum() == 0
        results.append((loss.detach(), table.grad[:VOCAB], model(tokens, positions)))
    for loss, grad, logits in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-13, atol=0)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(logits[..., :VOCAB], results[0][2], rtol=1e-12, atol=1e-12)
        assert torch.isneginf(logits[..., VOCAB:]).all()


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("positions_kind", ["rope", "learned_absolute"])
def test_packed_documents_equal_the_same_documents_in_separate_rows(backend, window, positions_kind):
    model = make_model(**LLAMA, attention_backend=backend, window_size=window, position_embedding_type=positions_kind)
    tokens, _, _ = batch()
    bounds = [0, 5, 6, 12, 24, 31, 36]
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))
    flat = tokens.flatten()
    positions = torch.cat([torch.arange(end - start) for start, end in zip(bounds, bounds[1:])])
    together = model(tokens, positions.view(BATCH, LENGTH), packed_seq_params=packed).flatten(0, 1)
    for start, end in zip(bounds, bounds[1:]):
        single = model(flat[None, start:end], positions[None, start:end])[0]
        torch.testing.assert_close(together[start:end], single, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bounds", [[0, 12, 24, 34], [1, 12, 24, 36], [0, 13, 24, 36], [0, 12, 24, 20, 36]])
def test_packed_documents_that_are_not_the_batch_are_rejected(bounds):
    """Padding after the last document would get uninitialized gradients."""
    tokens, _, positions = batch()
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))
    with pytest.raises(ValueError, match="ascend from 0 to 36 and name the start of each of the 3 rows of 12"):
        make_model()(tokens, positions, packed_seq_params=packed)


def test_packed_documents_have_the_gradients_of_a_dense_mask():
    tokens, labels, positions = batch()
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 7, 12, 24, 30, 36], dtype=torch.int32))
    gradients = []
    for backend in ("auto", "unfused"):
        model = make_model(**LLAMA, attention_backend=backend, position_embedding_type="rope")
        model(tokens, positions, labels=labels, packed_seq_params=packed).sum().backward()
        gradients.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_an_attention_mask_adds_to_causality(backend):
    model = make_model(attention_backend=backend)
    tokens, _, positions = batch()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    plain = model(tokens, positions)
    torch.testing.assert_close(model(tokens, positions, causal), plain, rtol=1e-11, atol=1e-11)
    hidden = causal.clone()
    hidden[..., 3:, 1] = True
    other = model(tokens, positions, hidden)
    torch.testing.assert_close(other[:, :3, :VOCAB], plain[:, :3, :VOCAB], rtol=1e-11, atol=1e-11)
    assert not torch.allclose(other[:, 3:, :VOCAB], plain[:, 3:, :VOCAB])


def test_grouped_queries_equal_many_heads_with_repeated_keys_and_values():
    grouped = make_model(num_query_groups=2, position_embedding_type="rope")
    full = make_model(num_query_groups=4, position_embedding_type="rope")
    state = grouped.state_dict()
    for name in list(state):
        if "linear_qkv" in name:
            by_group = state[name].view(2, 4, 6, -1)  # two queries, key, value of 6 channels
            rows = [by_group[g, [q, 2, 3]] for g in range(2) for q in range(2)]
            state[name] = torch.cat(rows).flatten(0, 1).view_as(full.state_dict()[name])
    full.load_state_dict(state)
    tokens, labels, positions = batch()
    torch.testing.assert_close(
        full(tokens, positions, labels=labels), grouped(tokens, positions, labels=labels), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"position_embedding_type": "rope", **LLAMA},
        {"position_embedding_type": "none", "add_bias_linear": False, "add_qkv_bias": True},
        {"qk_layernorm": True, "normalization": "RMSNorm", "num_query_groups": 1},
        {"qk_l2_norm": True, "squared_relu": True, "kv_channels": 8},
        {"quick_geglu": True, "ffn_hidden_size": 40, "apply_layernorm_1p": True},
        {"share_embeddings_and_output_weights": True, "vocab_size": 65},
    ],
)
def test_closed_form_parameter_count_equals_the_built_model(overrides):
    model = make_model(**overrides)
    shared = ("position_embedding_type", "share_embeddings_and_output_weights")
    options = {name: overrides[name] for name in shared if name in overrides}
    described = describe_gpt(
        model.config, vocab_size=model.vocab_size, seq_length=16, max_sequence_length=16, **options
    )
    assert unique_parameter_count(model) == described.num_parameters


def dropout_losses(model, tokens, positions, labels, samples):
    return model(tokens, positions, labels=labels, sample_index=torch.tensor(samples))


def test_dropout_follows_the_sample_and_not_the_micro_batch():
    model = make_model(hidden_dropout=0.2, attention_dropout=0.3)
    tokens, labels, positions = batch()
    full = dropout_losses(model, tokens, positions, labels, [7, 8, 9])
    assert torch.equal(full, dropout_losses(model, tokens, positions, labels, [7, 8, 9]))
    for row in range(BATCH):
        one = slice(row, row + 1)
        single = dropout_losses(model, tokens[one], positions[one], labels[one], [7 + row])
        torch.testing.assert_close(single, full[one], rtol=1e-11, atol=1e-11)
    assert not torch.allclose(full, dropout_losses(model, tokens, positions, labels, [10, 11, 12]))
    assert not torch.equal(model(tokens, positions, labels=labels), model(tokens, positions, labels=labels))
    model.eval()
    assert torch.equal(model(tokens, positions, labels=labels), model(tokens, positions, labels=labels))


def test_initial_weights_depend_on_the_seed_and_scale_with_depth():
    first, repeated, other = make_model(seed=1), make_model(seed=1), make_model(seed=2)
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), repeated.parameters()))
    layer = first.decoder.layers[0]
    assert not torch.equal(layer.mlp.linear_fc1.weight, other.decoder.layers[0].mlp.linear_fc1.weight)
    assert layer.mlp.linear_fc2.weight.std().item() == pytest.approx(0.3 / 2, rel=0.1)
    assert layer.mlp.linear_fc1.weight.std().item() == pytest.approx(0.3, rel=0.1)


def test_without_initialization_weights_are_zero_and_norms_the_identity():
    model = make_model(perform_initialization=False)
    assert model.output_layer.weight.abs().sum() == 0 and model.decoder.final_layernorm.weight.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "overrides", [{}, {"fp32_residual_connection": True, **LLAMA}, {"apply_query_key_layer_scaling": True,
    "attention_backend": "unfused"}],
)  # fmt: skip
def test_every_dtype_trains_close_to_float64(dtype, overrides):
    overrides = {"init_method_std": 0.1, **overrides}
    exact, model = make_model(**overrides), make_model(params_dtype=dtype, **overrides)
    tokens, labels, positions = batch()
    expected, losses = exact(tokens, positions, labels=labels), model(tokens, positions, labels=labels)
    assert losses.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
    losses.mean().backward()
    expected.mean().backward()
    for (name, param), twin in zip(model.named_parameters(), exact.parameters()):
        difference = (param.grad.double() - twin.grad).norm() / twin.grad.norm()
        assert difference < (1e-4 if dtype == torch.float32 else 0.1), name


def test_post_norm_residuals_take_the_normed_stream():
    model = make_model(num_layers=1, apply_residual_connection_post_layernorm=True)
    layer = model.decoder.layers[0]
    x = torch.randn(LENGTH, BATCH, 24, dtype=torch.float64)
    normed = layer.input_layernorm(x)
    middle = layer.pre_mlp_layernorm(normed + layer.self_attention(normed))
    torch.testing.assert_close(layer(x), middle + layer.mlp(middle))


def test_one_layer_spec_serves_all_layers_and_wrong_counts_are_rejected():
    config = make_config()
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=16)
    assert len(model.decoder.layers) == 2
    block = get_gpt_decoder_block_spec(make_config(num_layers=3))
    with pytest.raises(ValueError, match="3 layer specs for 2 layers"):
        GPTModel(config, block, vocab_size=VOCAB, max_sequence_length=16)


def test_unavailable_position_embedding_is_rejected_by_name():
    with pytest.raises(ValueError, match="position_embedding_type 'mrope'"):
        make_model(position_embedding_type="mrope")


def test_ids_outside_of_the_vocabulary_are_rejected():
    model = make_model()
    tokens, labels, positions = batch()
    with pytest.raises(IndexError):
        model(tokens.masked_fill(tokens == tokens[0, 0], VOCAB + 1), positions)
    with pytest.raises(IndexError, match="outside of the vocabulary"):
        model(tokens, positions, labels=labels.masked_fill(labels == labels[0, 0], VOCAB))


@pytest.mark.parametrize(
    "attention",
    [
        {},
        {
            "multi_latent_attention": True,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
            "kv_lora_rank": 8,
        },
    ],
    ids=["heads", "latent"],
)
def test_documents_with_padding_between_them_have_the_outputs_of_separate_rows(attention):
    """By Megatron-LM's arguments for packed sequences; without position_ids, which a rotary model does not read."""
    model = make_model(position_embedding_type="rope", **attention).eval()
    tokens, labels, _ = (item[:2] for item in batch())
    lengths, places = [LENGTH - 2, LENGTH - 4], [0, LENGTH, 2 * LENGTH]
    actual = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    passed = torch.tensor(places, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=actual, cu_seqlens_kv=actual, cu_seqlens_q_padded=passed,
        cu_seqlens_kv_padded=passed, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH,
    )  # fmt: skip
    losses = model(tokens.view(1, -1), None, None, labels.view(1, -1), packed_seq_params=packed).view(2, LENGTH)
    for row, length in enumerate(lengths):
        single = model(tokens[row : row + 1, :length], None, labels=labels[row : row + 1, :length])
        torch.testing.assert_close(losses[row, :length], single[0])
    with pytest.raises(UserError, match="position_ids: None, but the model has learned positions"):
        make_model()(tokens, None)


@pytest.mark.parametrize("chunk", [None, 5])
def test_negative_labels_are_positions_that_the_caller_masks(chunk):
    """Their loss is finite and their masked gradient is zero; other positions do not change."""
    model = make_model(cross_entropy_chunk_tokens=chunk)
    tokens, labels, positions = batch()
    mask = torch.ones_like(labels)
    mask[0, 1], mask[1, 3] = 0, 0
    gradients = []
    for passed in (labels, labels.masked_fill(mask == 0, -1), labels.masked_fill(mask == 0, -100)):
        model.zero_grad()
        losses = model(tokens, positions, labels=passed)
        assert losses.isfinite().all()
        (losses * mask).sum().backward()
        gradients.append([(losses * mask).detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for other in gradients[1:]:
        for mine, foreign in zip(gradients[0], other, strict=True):
            assert torch.equal(mine, foreign)


@pytest.mark.parametrize("backend", ["unfused", "auto"])
def test_a_model_that_was_run_in_inference_mode_can_be_trained(backend):
    model = make_model(position_embedding_type="rope", attention_backend=backend, window_size=(7, 0))
    tokens, labels, positions = batch()
    with torch.inference_mode():
        expected = model(tokens, positions, labels=labels)
    losses = model(tokens, positions, labels=labels)
    assert torch.equal(losses, expected)
    losses.sum().backward()


def test_both_factors_of_embeddings_are_multiplied():
    plain, both = (
        make_model(apply_embedding_scaling=scaled, embedding_multiplier=factor).embedding
        for scaled, factor in ((False, 1.0), (True, 3.0))
    )
    tokens, _, positions = batch()
    expected = plain(tokens, positions) * plain.word_embeddings.weight.shape[1] ** 0.5 * 3.0
    torch.testing.assert_close(both(tokens, positions), expected)
