"""T5 equals the independent reference; stages pass on both streams; padding, description and rejected settings.

(Every layout: ``tests/functional_tests/test_layouts.py``; whole runs: ``test_reference_masked.py``.)
"""

import dataclasses
import inspect
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.models.backends import get_backend
from megatron.core.models.common.description import Vocabulary
from megatron.core.models.common.layer_specs import layer_spec
from megatron.core.models.common.relative_positions import buckets, position_bias
from megatron.core.models.gpt import GPTModel
from megatron.core.models.T5 import T5Model
from megatron.core.models.t5.description import EncoderDecoder, describe_t5
from megatron.core.models.t5.masks import check_masks, token_mask
from megatron.core.models.t5.t5_spec import (
    get_t5_block_specs,
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.core.statistics import modules_with_statistics
from megatron.core.transformer.context import ForwardContext
from tests.reference import settings
from tests.reference.t5 import T5, bucket, initial_weights

VOCAB, LENGTH, ANSWER, DEPTHS = 61, 24, 16, (2, 3)
SIZES = {"num_layers": DEPTHS[0], "hidden_size": 32, "num_attention_heads": 4}
GROUPS = "--group-query-attention --num-query-groups 2"
KINDS = {
    "learned": ({}, "", {"share_embeddings_and_output_weights": True}),
    "rope": (
        {"num_query_groups": 2, "qk_layernorm": True}, f"{GROUPS} --qk-layernorm", {"position_embedding_type": "rope"}
    ),
    "relative-scaled": (
        {"scale_decoder_outputs": True}, "--scale-decoder-outputs",
        {"share_embeddings_and_output_weights": True, "position_embedding_type": "relative"},
    ),
    "relative-untied": (
        {"num_query_groups": 2, "qk_l2_norm": True}, f"{GROUPS} --qk-l2-norm", {"position_embedding_type": "relative"}
    ),
}  # fmt: skip


def make_config(**fields):
    options = {"params_dtype": torch.float64, "use_cpu_initialization": True, **SIZES, **fields}
    return TransformerConfig(**{"bias_gelu_fusion": True, **options})


def make_model(kind="learned", **options):
    fields, _, chosen = KINDS[kind]
    config = make_config(**fields, **options.pop("fields", {}))
    relative = chosen.get("position_embedding_type") == "relative"
    specs = get_t5_block_specs(config, DEPTHS[1], relative_positions=relative)
    return T5Model(
        config, config, *specs, VOCAB, LENGTH, make_vocab_size_divisible_by=8, seed=1234, **chosen, **options
    )


def arrays():
    generator = torch.Generator().manual_seed(3)
    text, answer, labels = (torch.randint(1, VOCAB, (2, length), generator=generator)
                            for length in (LENGTH, ANSWER, ANSWER))  # fmt: skip
    return text, answer, labels, torch.tensor([LENGTH, 7])


def reference_of(kind):
    _, flags, chosen = KINDS[kind]
    tied = "share_embeddings_and_output_weights" in chosen
    position = chosen.get("position_embedding_type", "learned_absolute")
    return settings.read(
        f"--num-layers {DEPTHS[0]} --decoder-num-layers {DEPTHS[1]} --hidden-size 32 --num-attention-heads 4 "
        f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --vocab-size {VOCAB} {flags} "
        f"--position-embedding-type {position} {'' if tied else '--untie-embeddings-and-output-weights'}".split()
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_losses_and_gradients_are_the_references(kind, training):
    model, c = make_model(kind).train(training), reference_of(kind)
    text, answer, labels, lengths = arrays()
    weights, named = initial_weights(c), dict(model.named_parameters())
    assert weights.keys() == named.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(named[name][: len(weight)], weight, rtol=1e-12, atol=1e-12)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    batch = SimpleNamespace(
        encoder=text.numpy(), decoder=answer.numpy(), labels=labels.numpy(), loss_mask=np.ones((2, ANSWER)),
        real=(torch.arange(LENGTH) < lengths[:, None]).numpy(), samples=np.array([7, 9]),
    )  # fmt: skip
    expected = T5(c, leaves, batch, {}, 2, training).losses()
    losses = model(text, answer, lm_labels=labels, encoder_lengths=lengths, sample_index=torch.tensor([7, 9]))
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    share = torch.rand(losses.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (losses * share).sum().backward()
    (expected * share).sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(named[name].grad[: len(leaf)], leaf.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("number, longest", [(32, 128), (6, 4)])
@pytest.mark.parametrize("bidirectional, stack", [(True, "encoder"), (False, "decoder")])
def test_buckets_are_the_published_ones(bidirectional, stack, number, longest):
    distance = torch.arange(-300, 300)
    c = SimpleNamespace(relative_attention_num_buckets=number, relative_attention_max_distance=longest)
    result = buckets(distance, number, longest, bidirectional)
    assert torch.equal(result, bucket(c, distance, stack)) and result.max() == number - 1 and result.min() == 0


def test_a_bias_is_wide_and_has_an_entry_per_distance():
    table = torch.randn(8, 3, dtype=torch.bfloat16)
    bias = position_bias(table, 5, max_distance=20, bidirectional=True)
    assert bias.dtype == torch.float32 and bias.shape == (3, 9) and bias.is_contiguous()
    assert torch.equal(bias[:, 4], table[0].float()) and torch.equal(bias[:, 5], table[5].float())


@pytest.mark.parametrize("kind", KINDS)
def test_stages_pass_on_both_streams(kind):
    """Cuts inside the encoder, within a layer, between encoder and decoder, and inside the decoder."""
    text, answer, labels, lengths = arrays()
    full = make_model(kind).eval()
    bounds = [0, 1, 4, 6, 13]
    stages = [
        make_model(kind, branches=range(*ends), pre_process=not ends[0], post_process=ends[1] == 13).eval()
        for ends in zip(bounds, bounds[1:])
    ]
    names = [name for stage in stages for name in stage.state_dict()]
    copies = {"lm_head.output_layer.weight"} if full.share_embeddings_and_output_weights else set()
    assert sorted({*names} - copies) == sorted(full.state_dict()) and len(names) == len({*names})
    streams = None
    for stage in stages:
        stage.set_input_tensor(None if streams is None else tuple(stream for stream in streams if stream is not None))
        streams = stage(text, answer, lm_labels=labels, encoder_lengths=lengths)
        if stage is not stages[-1]:
            shapes = [stream.shape for stream in streams if stream is not None]
            assert shapes == [torch.Size(shape) for shape in stage.message_shapes((LENGTH, ANSWER), 2)]
    expected = full(text, answer, lm_labels=labels, encoder_lengths=lengths)
    torch.testing.assert_close(streams, expected, rtol=1e-12, atol=1e-12)


def test_messages_are_of_a_ranks_positions_and_heads():
    config = make_config(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=3)
    three, two = Group("cp", (0, 1, 2), 1), Group("tp", (3, 4), 0)
    model = T5Model(config, config, *get_t5_block_specs(config, 1, relative_positions=True), VOCAB, LENGTH,
                    position_embedding_type="relative", relative_attention_num_buckets=8,
                    groups=dataclasses.replace(SINGLE_PROCESS, cp=three, tp=two))  # fmt: skip
    assert model.message_shapes((24, 12), 5) == [(4, 5, 32), (2, 5, 32), (8, 2), (8, 2)]
    table = model.encoder_relative_pos_emb.table
    context = model._with_bias(ForwardContext(model.layout), table, model.encoder, 4)  # 4 of 12 tokens
    assert table.shape == (8, 2) and context.position_bias.shape == (2, 2 * 12 - 1)


def test_without_padding_there_are_no_documents(monkeypatch):
    monkeypatch.setattr(PackedSeqParams, "of_lengths", None)
    text, answer, *_ = arrays()
    make_model()(text, answer, encoder_lengths=torch.tensor([LENGTH, LENGTH]))


def test_no_token_sees_padding():
    model = make_model().eval()
    text, answer, labels, lengths = arrays()
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    losses = model(text, answer, mask, lm_labels=labels)
    assert torch.equal(losses, model(text, answer, lm_labels=labels, encoder_lengths=lengths))
    padded, longer = text.clone(), answer.clone()
    padded[1, 7:], longer[:, 9:] = 5, 6
    other = model(padded, longer, mask, lm_labels=labels)
    torch.testing.assert_close(other[:, :9], losses[:, :9], rtol=1e-12, atol=1e-12)
    shorter = model(text[1:, :7], answer[1:], lm_labels=labels[1:])
    torch.testing.assert_close(shorter, losses[1:], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="padding must follow all tokens"):
        model(text, answer, 1 - mask, lm_labels=labels)
    with pytest.raises(ValueError, match="a row contains only padding"):
        model(text, answer, lm_labels=labels, encoder_lengths=torch.tensor([LENGTH, 0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_specs", [False, True])
def test_the_description_is_of_the_model_that_is_built(kind, with_specs):
    model, chosen = make_model(kind), KINDS[kind][2]
    specs = get_t5_block_specs(model.config, DEPTHS[1]) if with_specs else (None, None)
    described = describe_t5(
        model.config, Vocabulary(VOCAB, model.share_embeddings_and_output_weights, 8),
        EncoderDecoder(LENGTH, ANSWER, DEPTHS[1]), max_sequence_length=LENGTH, specs=specs,
        position_embedding_type=chosen.get("position_embedding_type", "learned_absolute"),
    )  # fmt: skip
    built = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    local = [param for param in described.params() if param.tied_to is None]
    assert {param.name: param.local_shapes({})[0] for param in local} == built
    assert [len(layer) for layer in described.layers] == [2, 2, 3, 3, 3]


def test_the_formula_of_operations_equals_a_counted_trace():
    config = make_config(hidden_dropout=0.0, attention_dropout=0.0, attention_backend="unfused")
    model = T5Model(config, config, *get_t5_block_specs(config, DEPTHS[1]), VOCAB, LENGTH,
                    share_embeddings_and_output_weights=True, make_vocab_size_divisible_by=8)  # fmt: skip
    text, answer, labels, _ = arrays()
    with FlopCounterMode(display=False) as counter:
        model(text, answer, lm_labels=labels).sum().backward()
    sizes = EncoderDecoder(LENGTH, ANSWER, DEPTHS[1])
    described = describe_t5(config, Vocabulary(VOCAB, True, 8), sizes, max_sequence_length=LENGTH)
    hidden_scores = 3 * 2 * 2 * 32 * DEPTHS[1] * ANSWER**2 / 2  # torch counts what causality hides
    padding = 3 * 2 * ANSWER * 32 * (64 - VOCAB)
    assert counter.get_total_flops() / 2 == described.flops_per_sample + hidden_scores + padding


def test_bytes_of_the_decoder_are_counted_per_token_of_the_encoder():
    full, half = (
        describe_t5(make_config(), Vocabulary(VOCAB, True, 8), EncoderDecoder(LENGTH, length, 3),
                    max_sequence_length=LENGTH).layers for length in (LENGTH, LENGTH // 2)
    )  # fmt: skip
    encoder, decoder, same, shorter = (
        [number for op in layers[layer][-1].ops for number in (op.traffic, *(item.bytes for item in op.saved))]
        for layers in (full, half) for layer in (0, -1)
    )  # fmt: skip
    assert encoder == decoder == same == [2 * item for item in shorter] and sum(encoder) > 0


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_relative_positions_count_where_kernels_without_a_bias_would_serve(stack):
    model = make_model("relative-untied", fields={"attention_dropout": 0.0}).eval()
    text, answer, labels, _ = arrays()
    with torch.no_grad():
        before = model(text, answer, lm_labels=labels)
        getattr(model, f"{stack}_relative_pos_emb").table.mul_(50)
        assert not torch.allclose(before, model(text, answer, lm_labels=labels), rtol=1e-6)


def test_a_stage_of_one_stack_is_rejected():
    with pytest.raises(UserError, match="add_encoder and add_decoder: must be True"):
        make_model(add_decoder=False)


def test_a_program_builds_it_by_the_names_of_megatron_lm():
    config = make_config(attention_dropout=0.0)  # else all kernels but the one for relative positions are out
    encoder, decoder = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(1)
    model = T5Model(
        config=config, encoder_config=config, transformer_encoder_layer_spec=encoder,
        transformer_decoder_layer_spec=decoder, vocab_size=VOCAB, max_sequence_length=LENGTH, add_encoder=True,
        add_decoder=True,
    ).eval()  # fmt: skip
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (2, 1)
    assert [layer.layer_number for layer in (*model.encoder.layers, *model.decoder.layers)] == [1, 2, 3]
    text, answer, *_ = arrays()
    logits = model(text, answer)
    assert logits.shape == (2, ANSWER, 128)
    chosen = T5Model(config, config, *get_t5_block_specs(config, 1), VOCAB, LENGTH)
    assert torch.equal(chosen.eval()(text, answer), logits)
    gpt, t5 = (inspect.signature(x).parameters for x in (GPTModel, T5Model))
    assert all(t5[name].default == gpt[name].default for name in gpt.keys() & t5.keys())
    assert (t5["relative_attention_num_buckets"].default, t5["relative_attention_max_distance"].default) == (32, 128)


def test_masks_that_programs_build_from_data_sets_are_those_of_the_model():
    """Every release's masks: [b, keys], [b, 1, queries, keys] that hide all keys from padding, [b, 1, 1, keys]."""
    encoder, decoder = (torch.arange(length) < torch.tensor([[length], [5]]) for length in (8, 6))
    for use_local in (True, False):
        masks = T5MaskedWordPieceDataset.config_attention_mask(None, None, ~encoder, ~decoder, use_local)
        assert torch.equal(token_mask(masks[0]), encoder)
        check_masks(masks[1], masks[2], encoder)
        with pytest.raises(ValueError, match="encoder_decoder_attn_mask"):
            check_masks(masks[1], masks[2], torch.ones_like(encoder))
    local = T5MaskedWordPieceDataset.config_attention_mask(None, None, ~encoder, ~decoder, True)[1]
    with pytest.raises(ValueError, match="must be causal"):
        check_masks(local.transpose(2, 3), None, None)
    hides_the_second = torch.tensor([[False, True, False]]).view(1, 1, 1, 3)
    with pytest.raises(ValueError, match="padding behind all tokens"):
        check_masks(hides_the_second, None, None)


def test_statistics_of_experts_name_the_stack():
    """Library programs may put experts in the layers of a stack; layers of the decoder count from 1 again."""
    config = make_config(num_moe_experts=2, moe_router_load_balancing_type="none")
    experts = layer_spec(get_backend("local"), ("attention", "experts")).submodules.branches[-1]

    def with_experts(block):
        branches = [getattr(item.submodules, "branches", item.submodules) for item in block.layer_specs]
        layers = [
            replace(item, submodules=(*local[:-1], experts)) for item, local in zip(block.layer_specs, branches)
        ]  # fmt: skip
        return replace(block, layer_specs=layers)

    specs = map(with_experts, get_t5_block_specs(config, DEPTHS[1]))
    model = T5Model(config, config, *specs, VOCAB, LENGTH)
    labels = [modules_with_statistic.statistics.label for modules_with_statistic in modules_with_statistics([model])]
    assert labels == [f"encoder layer {n + 1}" for n in range(DEPTHS[0])] + [
        f"decoder layer {n + 1}" for n in range(DEPTHS[1])
    ]
