"""BERT as a library: what its description says is what is built, padding is inert, and its heads."""

import dataclasses
import inspect

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.models.bert import BertModel, heads
from megatron.core.models.bert.bert_layer_specs import get_bert_block_spec, get_bert_layer_local_spec
from megatron.core.models.bert.description import describe_bert, with_head_on
from megatron.core.models.bert.model import LabelsAt
from megatron.core.models.common import language_module
from megatron.core.models.common.description import Vocabulary
from megatron.core.models.gpt import GPTModel
from megatron.core.sharding.placement import Partial
from megatron.training.data.batch import pack_rows

SIZES = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "hidden_dropout": 0.0, "attention_dropout": 0.0}
SETTINGS = {
    "classic": ({}, {}),
    "one loss, untied": ({"add_bias_linear": False}, {"add_binary_head": False, "shared": False, "num_tokentypes": 0}),
    "rms": ({"normalization": "RMSNorm", "swiglu": True, "qk_layernorm": True, "num_query_groups": 1}, {}),
    "one piece": ({"use_parallel_residual": True, "norm_placement": "sandwich"}, {"num_tokentypes": 3}),
}


def make(settings="classic", **rest):
    fields, options = SETTINGS[settings]
    options = {"add_binary_head": True, "shared": True, "num_tokentypes": 2} | options
    config = TransformerConfig(**SIZES, **fields)
    shared = options.pop("shared")
    model = BertModel(
        config, transformer_layer_spec=get_bert_block_spec(config), vocab_size=61, max_sequence_length=16,
        share_embeddings_and_output_weights=shared, make_vocab_size_divisible_by=8, groups=SINGLE_PROCESS, **options,
        **rest,
    )  # fmt: skip
    return model.double().eval(), config, Vocabulary(61, shared, 8), options


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("by_spec", [False, True])
def test_the_description_is_the_model(settings, by_spec):
    model, config, vocabulary, options = make(settings)
    spec = get_bert_block_spec(config) if by_spec else None
    described = describe_bert(config, vocabulary, seq_length=16, max_sequence_length=16, spec=spec, **options)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {param.name: param.local_shapes({})[0] for param in described.params() if not param.tied_to} == built
    assert not described.unknown
    assert described.num_parameters + described.padding == sum(p.numel() for p in model.parameters())


def test_attention_is_counted_in_full():
    _, config, vocabulary, options = make()
    one, windowed = (
        describe_bert(x, vocabulary, seq_length=16, max_sequence_length=16, **options)
        for x in (config, dataclasses.replace(config, window_size=(3, 2)))
    )
    flops = [
        [op.flops for piece in described.pieces for op in piece.ops if op.kind == "attention"]
        for described in (one, windowed)
    ]
    pairs = 16**2 - (12**2 + 13**2) / 2
    assert flops == [[4.0 * 16**2 * 24] * 2, [4.0 * pairs * 24] * 2]


@pytest.mark.parametrize("add_binary_head, predicted", [(True, 16), (False, 16), (True, 4)])
def test_the_formula_of_operations_equals_a_counted_trace(add_binary_head, predicted):
    """It leaves out the vocabulary's padding, and pooler and head of a pair, which meet one token of a sample."""
    options = {"num_tokentypes": 2 * add_binary_head, "add_binary_head": add_binary_head}
    config = TransformerConfig(**SIZES, attention_backend="unfused")
    model = BertModel(
        config, transformer_layer_spec=get_bert_block_spec(config), vocab_size=61, max_sequence_length=16,
        share_embeddings_and_output_weights=True, make_vocab_size_divisible_by=8, groups=SINGLE_PROCESS, **options,
    )  # fmt: skip
    ids, _, types, labels = inputs()
    if predicted < 16:
        labels = LabelsAt(labels[:, :predicted], torch.arange(predicted).expand(3, -1))
    with FlopCounterMode(display=False) as counter:
        losses, order = model(ids, None, types if add_binary_head else None, labels)
        (losses.sum() + (order.sum() if add_binary_head else 0)).backward()
    described = describe_bert(config, Vocabulary(61, True, 8), seq_length=16, max_sequence_length=16, **options)
    described = with_head_on(described, predicted / 16, predicted / 16)
    left_out = predicted * 24 * (64 - 61) + (24 * 24 + 24 * 2) * add_binary_head
    assert counter.get_total_flops() / 3 == described.flops_per_sample + 3 * 2 * left_out


def test_bert_description_states_first_and_last_pieces():
    """Bytes of fp32 per token, on one of three tensor-parallel ranks: 61 words in 72 rows."""
    config = TransformerConfig(**SIZES, tensor_model_parallel_size=3)
    described = describe_bert(config, Vocabulary(61, True, 8), seq_length=16, max_sequence_length=16)
    first, *_, last = described.pieces
    assert first.params[0].stored == (72, 24) and "bert_binary_head" in first.settings
    moved = {op.name: op.traffic for op in last.ops}
    assert moved["final_layernorm"] == 8 * 4 * 24 and moved["cross entropy"] == 3 * 4 * 72 / 3


def inputs(padding=0):
    generator = torch.Generator().manual_seed(1)
    ids, types, labels = (torch.randint(0, high, (3, 16), generator=generator) for high in (61, 2, 61))
    mask = torch.ones(3, 16, dtype=torch.long)
    if padding:
        mask[1, -padding:] = 0
    return ids, mask, types, labels


def test_padding_is_inert_and_said_in_two_ways():
    model, *_ = make()
    ids, mask, types, labels = inputs(padding=5)
    losses, binary = model(ids, mask, types, labels)
    ids[1, -5:] = 7
    repeated, binary_again = model(ids, mask, types, labels)
    used = mask.bool()
    assert torch.equal(losses[used], repeated[used]) and torch.equal(binary, binary_again)
    lengths = PackedSeqParams.of_lengths(mask.sum(1), 16)
    by_lengths, _ = model(ids, tokentype_ids=types, lm_labels=labels, packed_seq_params=lengths)
    assert torch.equal(by_lengths, repeated)
    shorter, _ = model(ids[1:2, :-5], None, types[1:2, :-5], labels[1:2, :-5])
    torch.testing.assert_close(shorter, losses[1:2, :-5])


@pytest.mark.parametrize("position_embedding_type", ["learned_absolute", "rope"])
def test_packed_samples_equal_samples_in_rows(position_embedding_type):
    model, *_ = make(position_embedding_type=position_embedding_type)
    ids, mask, types, labels = inputs()
    lengths = torch.tensor([16, 7, 11])
    used = torch.arange(16) < lengths[:, None]
    losses, binary = model(ids, used.long(), types, labels)
    row = {"loss_mask": mask, "ids": ids, "types": types, "labels": labels, "sample_index": torch.arange(3)}
    row, documents = pack_rows(row, lengths, 8)
    packed, packed_binary = model(
        row["ids"], tokentype_ids=row["types"], lm_labels=row["labels"], packed_seq_params=documents,
        position_ids=row["position_ids"], first_tokens=torch.tensor([0, 16, 23, 34]),
    )  # fmt: skip
    torch.testing.assert_close(packed[0, :34], losses[used])
    torch.testing.assert_close(packed_binary[:3], binary)


def test_samples_that_share_a_row_drop_no_attention_weights():
    model, *_ = make()
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="train with attention_dropout 0"):
        model.train()(torch.zeros(1, 16, dtype=torch.long), position_ids=torch.arange(16)[None])


def test_tokens_see_later_tokens():
    model, *_ = make()
    ids, mask, types, labels = inputs()
    losses, _ = model(ids, mask, types, labels)
    ids[:, -1] = (ids[:, -1] + 1) % 61
    assert (model(ids, mask, types, labels)[0] != losses).all()


def test_padding_before_a_token_is_rejected():
    model, *_ = make()
    ids, mask, types, _ = inputs()
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="padding must follow all tokens"):
        model(ids, mask, types)


def test_logits_have_a_bias_and_no_padding():
    model, *_ = make()
    ids, mask, types, labels = inputs()
    with torch.no_grad():
        model.output_layer.bias[:61].copy_(torch.linspace(0, 1, 61))
        logits, binary = model(ids, mask, types)
        losses, _ = model(ids, mask, types, labels)
    assert logits.shape == (3, 16, 64) and binary.shape == (3, 2) and (logits[..., 61:] == -torch.inf).all()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)


@pytest.mark.parametrize("settings", ["classic", "one loss, untied"])
def test_losses_and_gradients_of_some_positions_equal_those_of_full_rows(settings):
    model, *_ = make(settings)
    ids, mask, types, labels = inputs(padding=5)
    places = torch.tensor([[2, 15, 0, 7], [1, 4, 3, 10], [15, 14, 13, 12]])
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64).expand(3, 4)
    results = []
    for passed in (labels, LabelsAt(labels.gather(1, places), places)):
        losses, order = model(ids, mask, types if model.pooler else None, passed)
        losses = losses.gather(1, places) if passed is labels else losses
        ((losses * weights).sum() + (0 if order is None else order[:, 0].sum())).backward()
        results.append((losses, *(parameter.grad for parameter in model.parameters())))
        model.zero_grad()
    assert results[1][0].shape == (3, 4) and len(results[0]) > 20
    torch.testing.assert_close(*results)


def test_places_are_rejected_where_ranks_hold_parts_of_rows():
    model, *_ = make("one loss, untied")
    model.config.sequence_parallel = True
    with pytest.raises(ValueError, match=r"LabelsAt: under sequence parallelism .* give labels \[b, s\]"):
        model(inputs()[0], lm_labels=LabelsAt(inputs()[0], inputs()[0]))


def test_one_layer_spec_serves_all_layers():
    config = TransformerConfig(**SIZES)
    model = BertModel(config, 0, get_bert_layer_local_spec(), 61, 16, add_binary_head=False, groups=SINGLE_PROCESS)
    one, other = torch.zeros(1, 16, dtype=torch.long), torch.arange(16)[None] // 15
    logits, binary = model.eval()(one)
    assert binary is None and len(model.encoder.layers) == 2 and logits.shape == (1, 16, 128)
    assert not torch.equal(logits[0, 0], model(other)[0][0, 0])  # sees the last token
    gpt, bert = (inspect.signature(x).parameters for x in (GPTModel, BertModel))
    assert all(bert[name].default == gpt[name].default for name in gpt.keys() & bert.keys())


def test_stage_holds_its_branches_of_the_full_model():
    """The last of two pipeline ranks, which needs no process group to be built."""
    full, config, *_ = make()
    config = dataclasses.replace(config, pipeline_model_parallel_size=2)
    groups = dataclasses.replace(SINGLE_PROCESS, pp=Group("pp", (0, 1), 1))
    stages = [
        BertModel(
            config, 2, get_bert_block_spec(config), 61, 16, pre_process=False, groups=groups,
            make_vocab_size_divisible_by=8, **chosen,
        )
        for chosen in ({}, {"branches": range(3, 4)})
    ]  # fmt: skip
    local, passed = (set(stage.state_dict()) for stage in stages)
    assert "encoder.layers.1.mlp.linear_fc2.weight" in local & passed and "pooler.dense.weight" in local
    assert local < {*full.state_dict(), "output_layer.weight"} and not any("layers.0" in name for name in local)
    assert not any("self_attention" in name or "layers.0" in name for name in passed) and passed < local


def test_a_stage_takes_its_chunk_from_the_program_and_its_input_in_either_form(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_rank", lambda: 1)
    sizes = {**SIZES, "num_layers": 4}
    config = TransformerConfig(**sizes, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    options = {
        "transformer_layer_spec": get_bert_block_spec(config), "vocab_size": 61, "max_sequence_length": 16,
        "pre_process": False, "post_process": False,
        "groups": dataclasses.replace(SINGLE_PROCESS, pp=Group("pp", (0, 1))),
    }  # fmt: skip
    requested, reported = BertModel(config, 2, **options), BertModel(config, 2, vp_stage=0, **options)
    assert (requested.vp_stage, reported.vp_stage) == (
        1,
        0,
    ) and requested.state_dict().keys() != reported.state_dict().keys()
    for passed in (torch.zeros(1), [torch.zeros(1)]):
        requested.set_input_tensor(passed)
        assert requested.received is (passed[0] if isinstance(passed, list) else passed)


def test_calls_without_sample_index_draw_other_masks_each_time():
    config = TransformerConfig(**{**SIZES, "hidden_dropout": 0.5})
    model, ids = BertModel(config, 0, get_bert_layer_local_spec(), 61, 16, groups=SINGLE_PROCESS), inputs()[0]
    (first, _), (second, _), (repeated, _) = model(ids), model(ids), model(ids, sample_index=torch.arange(3))
    assert not torch.equal(first[..., :61], second[..., :61]) and torch.equal(first, repeated)


def test_the_first_and_the_last_stage_share_a_weight_and_the_work():
    config, hidden = TransformerConfig(**SIZES, pipeline_model_parallel_size=2), None
    for rank, tied_to in enumerate((None, "embedding.word_embeddings.weight")):
        stage = BertModel(
            config, 0, get_bert_block_spec(config), 61, 16, pre_process=rank == 0, post_process=rank == 1,
            share_embeddings_and_output_weights=True,
            groups=dataclasses.replace(SINGLE_PROCESS, pp=Group("pp", (0, 1), rank)),
        )  # fmt: skip
        spec = stage.shared_embedding_or_output_weight().spec
        assert spec.tied_to == tied_to and spec.grad["embedding"] == Partial()
        assert (stage.encoder.final_layernorm is not None) == (rank == 1)
        stage.set_input_tensor(hidden)
        hidden = stage(inputs()[0])
    assert [item.shape for item in hidden] == [(3, 16, 128), (3, 2)]


def test_logits_are_gathered_where_full_ones_are_requested(monkeypatch):
    gathered = []
    monkeypatch.setattr(language_module, "gather_from_region", lambda x, group: gathered.append(group.name) or x)
    for parallel_output in (True, False):
        make("one loss, untied", parallel_output=parallel_output)[0](inputs()[0])
    assert gathered == ["tp"]


def test_first_tokens_come_from_the_ranks_that_hold_them(monkeypatch):
    config = TransformerConfig(**SIZES, tensor_model_parallel_size=3, sequence_parallel=True)
    hidden, first_tokens, results = torch.randn(12, 1, 24), torch.tensor([0, 3, 4, 7, 11]), []
    monkeypatch.setattr(heads, "reduce_from_region", lambda x, group: results.append(x) or x)
    for rank in range(3):
        pooler = heads.Pooler(config, dataclasses.replace(SINGLE_PROCESS, tp=Group("tp", (0, 1, 2), rank)))
        local = hidden[4 * rank : 4 * rank + 4]
        pooler(local), pooler(local, first_tokens)
    assert torch.equal(sum(results[::2]), hidden[0]) and torch.equal(sum(results[1::2]), hidden[first_tokens, 0])
