"""Tasks of BERT and T5: random samples have the form of the data sets', and a description counts what is built."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.distillation import TEACHER
from megatron.core.config.errors import UserError
from megatron.core.config.preferences import REFERENCE, PreferenceConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.models.bert.description import predicted_per_rank
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.data.loader import BatchReader, KeyedDataset, collate
from megatron.training.tasks import language_model
from megatron.training.tasks.distillation import check_vocabulary
from megatron.training.tasks.language_model import task_class
from megatron.training.tasks.preferences import preference_losses
from tests.test_utils import masked_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    masked_runs.write_corpora(folder)
    return folder


def settings(kind, folder, flags="", ranks=1):
    data = f"--data-path {folder / 'a'} --split 1,0,0 --eval-iters 0 --short-seq-prob 0.5 {flags}"
    argv = masked_runs.command_line(kind, data.split())
    words = [text if text != "vocab.txt" else str(folder / text) for text in masked_runs.PROGRAM_ONLY[kind]]
    return validate_args(parse_args([*argv, *words, "--data-cache-path", str(folder)], model_family=kind), ranks)


def make_task(kind, folder, flags="", ranks=1):
    cfg = settings(kind, folder, flags, ranks)
    return task_class(kind)(cfg, build_tokenizer(cfg.tokenizer))


MASKS = {"bert": ("padding_mask", "loss_mask"), "t5": ("dec_mask", "dec_mask")}
"""(mask of the longest sequence, mask of the labels) by family."""


@pytest.mark.parametrize("kind", MASKS)
def test_random_samples_have_the_form_of_those_of_the_data(kind, folder):
    task = make_task(kind, folder)
    real, written = task.train_valid_test_datasets_provider((8, 0, 0))[0], np.zeros(2, dtype=int)
    for index in range(8):
        created, expected = task.random_sample(np.random.default_rng(index)), real[index]
        written += created["loss_mask"].sum(), (created[MASKS[kind][0]] == 1).sum()
        for name in created:
            assert np.shape(created[name]) == np.shape(expected[name])
            assert np.asarray(created[name]).dtype == np.asarray(expected[name]).dtype, name
        assert expected.keys() - created.keys() <= {"truncated", "dataset_id"}
        for sample in (created, expected):
            outer, local = (sample[name] for name in MASKS[kind])
            assert np.array_equal(local == 1, sample["labels"] >= 0) and (local <= outer).all()
            assert (sample["loss_mask"] <= outer).all() and outer[0] == 1 and (np.diff(outer) <= 0).all()
    assert 0 < written[0] < written[1]  # tokens in the loss, and all


@pytest.mark.parametrize("kind, flags", [("bert", ""), ("bert", "--bert-no-binary-head"), ("t5", "")])
def test_parameters_are_those_of_the_description(kind, flags, folder):
    task = make_task(kind, folder, flags)
    assert task.num_parameters() == sum(parameter.numel() for parameter in task.model_provider().parameters()) - (
        task.description().padding
    )


def test_a_rank_has_one_chunk_of_every_round_of_stages(folder, monkeypatch):
    task = make_task("bert", folder)
    stages = [SimpleNamespace(branches=range(number, number + 1)) for number in range(6)]
    monkeypatch.setattr(language_model, "pipeline_stages", lambda cfg, costs: stages)
    groups = dataclasses.replace(SINGLE_PROCESS, pp=Group("pp", (0, 1), 1))
    monkeypatch.setattr(language_model.parallel_state, "get_process_groups", lambda: groups)
    assert [task.branches(chunk).start for chunk in range(3)] == [1, 3, 5]


@pytest.mark.parametrize("kind, flags, ranks, expected", [
    ("bert", "", 1, 5),  # 0.15 * 32 is 4.8
    ("bert", "--mask-prob 0.5", 1, 16),
    ("bert", "--mask-prob 0.04 --seq-length 44", 1, 2),
    ("bert", "--mask-prob 0.98", 1, None),
    ("bert", "--context-parallel-size 2", 2, 5),
    ("bert", "--context-parallel-size 4 --seq-length 40", 4, 6),  # of 10 tokens of this rank
    ("bert", "--context-parallel-size 2 --mask-prob 0.5", 2, None),  # one rank may have them all
    ("bert", "--tensor-model-parallel-size 2", 2, 5),
    ("bert", "--tensor-model-parallel-size 2 --sequence-parallel", 2, None),
    ("bert", "--use-packed-sequence --attention-dropout 0", 1, 5),  # of a sample
])  # fmt: skip
def test_the_head_predicts_at_as_many_places_as_can_be_masked(kind, flags, ranks, expected, folder):
    assert predicted_per_rank(settings(kind, folder, flags, ranks)) == expected


def test_only_the_head_is_counted_on_fewer_tokens(folder):
    some, full = (make_task("bert", folder, flags).description() for flags in ("", "--mask-prob 0.98"))
    assert some.num_parameters == full.num_parameters and some.layers == full.layers
    final, *rest = some.head.ops
    assert final == full.head.ops[0]
    assert [op.flops for op in rest] == [op.flops * 5 / 32 for op in full.head.ops[1:]]


@pytest.mark.parametrize("flags", ["--context-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_operations_are_those_that_the_loss_needs_in_every_layout(flags, folder):
    local, single = (settings("bert", folder, *more).describe(64) for more in ((flags, 2), ()))
    assert local.flops_per_sample == pytest.approx(single.flops_per_sample, rel=1e-12)
    assert single.costs.head < local.costs.head and single.needless_flops == 0


def batches(task, number=8):
    """Micro-batches of 4 samples."""
    samples = KeyedDataset(task.train_valid_test_datasets_provider((4 * number, 0, 0))[0])
    return [collate([samples[index, index] for index in range(start, start + 4)]) for start in range(0, 4 * number, 4)]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("mask_prob", [0.04, 0.15, 0.22])
def test_every_label_is_among_the_places_of_one_rank(ranks, mask_prob, folder, monkeypatch):
    task = make_task("bert", folder, f"--seq-length 40 --mask-prob {mask_prob} --context-parallel-size {ranks}", ranks)
    inputs, actual = batches(task), []
    inputs[-1]["loss_mask"] *= -1  # weights may be negative
    expected = [
        (int(batch["sample_index"][row]), place, int(batch["labels"][row, place]))
        for batch in inputs for row, place in batch["loss_mask"].nonzero().tolist()
    ]  # fmt: skip
    for rank in range(ranks):
        groups = dataclasses.replace(SINGLE_PROCESS, cp=Group("cp", tuple(range(ranks)), rank))
        monkeypatch.setattr(parallel_state, "get_process_groups", lambda local=groups: local)
        custom = zigzag.local_part(torch.arange(40)[None], rank, ranks)[0]
        for batch in map(task.get_batch, map(iter, ([batch] for batch in inputs))):
            assert batch["labels"].shape == batch["predicted"].shape == (4, predicted_per_rank(task.cfg))
            for row, place in batch["loss_mask"].nonzero().tolist():
                where = int(custom[batch["predicted"][row, place]])
                actual.append((int(batch["sample_index"][row]), where, int(batch["labels"][row, place])))
    assert sorted(actual) == sorted(expected) and len(actual) > 20 * (mask_prob > 0.1)


def test_more_masked_tokens_than_are_predicted_are_rejected_before_the_batch_is_used(folder):
    task = make_task("bert", folder, "--mask-prob 0.5")
    inputs = batches(task)
    most = max(int(batch["loss_mask"].sum(1).max()) for batch in inputs)
    assert most == 14  # of 29
    task = make_task("bert", folder, "--mask-prob 0.15")
    messages = "--mask-prob 0.15: at most 5 tokens of a sample are predicted, but one has 14 masked; .* here 0.42188"
    with pytest.raises(UserError, match=messages):
        list(task.batches.split(iter(inputs), 8, 4)["data_iterator"])
    task = make_task("bert", folder, "--mask-prob 0.42188")
    assert list(task.batches.split(iter(inputs), 8, 4)["data_iterator"]) == inputs


PACKED = "--use-packed-sequence --attention-dropout 0"


def on_ranks(monkeypatch, **axes):
    """Lets tasks believe that they are one of several ranks."""
    groups = dataclasses.replace(SINGLE_PROCESS, **axes)
    monkeypatch.setattr(parallel_state, "get_process_groups", lambda: groups)


def test_masked_tokens_and_pairs_are_counted(folder):
    task = make_task("bert", folder)
    inputs = batches(task)
    masked = [int(batch["loss_mask"].sum()) for batch in inputs]
    assert task.losses == ("lm loss", "sop loss")
    reader = BatchReader(iter(inputs), task.batches.counts, reads_ahead=True)
    for first, number in ((0, 3), (3, 1)):
        selected, counts = task.batches.read(reader, number, 1)
        assert counts.tolist() == [sum(masked[first : first + number]), 4 * number]
        assert all(batch is one for batch, one in zip(selected, inputs[first:], strict=False))
    task = make_task("bert", folder, "--bert-no-binary-head")
    assert task.losses == ("lm loss",) and [int(count) for count in task.batches.counts(inputs[0])] == masked[:1]


@pytest.mark.parametrize("flags, ranks, multiple", [
    ("", 2, 1), ("--context-parallel-size 2", 4, 4), ("--tensor-model-parallel-size 2", 4, 1),
    ("--tensor-model-parallel-size 4 --sequence-parallel", 8, 4),
    ("--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2", 8, 4),
    ("--tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2", 16, 8),
])  # fmt: skip
def test_stages_know_the_lengths_of_rows_that_the_batches_get(flags, ranks, multiple, folder, monkeypatch):
    task = make_task("bert", folder, f"{PACKED} --pipeline-model-parallel-size 2 {flags}", ranks)
    inputs, cp = batches(task), task.cfg.model.context_parallel_size
    on_ranks(monkeypatch, cp=Group("cp", tuple(range(cp)), 0))
    arguments = task.batches.split(iter(inputs), 3, 4)
    used = [int(batch["padding_mask"].sum()) for batch in inputs[:3]]
    assert arguments["row_lengths"] == [-(-number // multiple) * multiple for number in used]
    rows = [task.get_batch(arguments["data_iterator"])["text"] for _ in used]
    assert [row.shape for row in rows] == [(1, length // cp) for length in arguments["row_lengths"]]
    with pytest.raises(StopIteration):
        next(arguments["data_iterator"])


@pytest.mark.parametrize("flags, ranks", [
    (PACKED, 1), ("--pipeline-model-parallel-size 2", 2), ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
])  # fmt: skip
def test_only_rows_that_stages_exchange_have_lengths(flags, ranks, folder):
    task = make_task("bert", folder, flags, ranks)
    iterator = iter(batches(task))
    result = task.batches.split(iterator, 2, 4)
    assert (result.pop("data_iterator") is iterator) == task.cfg.model.sequence_parallel  # elsewhere masks are counted
    assert result == {"num_microbatches": 2, "micro_batch_size": 4, "seq_length": 32, "decoder_seq_length": None}


@pytest.mark.parametrize("rank", [0, 1])
def test_packed_row_carries_the_fields_of_its_samples(rank, folder, monkeypatch):
    task = make_task("bert", folder, f"{PACKED} --context-parallel-size 2 --tensor-model-parallel-size 2", 4)
    on_ranks(monkeypatch, cp=Group("cp", (0, 1), rank))
    (given, *_) = batches(task)
    given["sample_index"][2] = -1  # it evens out a batch of an evaluation
    row = task.get_batch(iter([given]))
    tokens, count = {}, 0
    for index, *line in zip(given["sample_index"].tolist(), given["text"], given["padding_mask"], given["is_random"]):
        tokens[index] = (line[0][: int(line[1].sum())].tolist(), int(line[2]))
        count += len(tokens[index][0])
    assert row["text"].shape[1] == -(-count // 4) * 4 // 2
    for text, index, place in zip(*(row[name][0].tolist() for name in ("text", "sample_index", "position_ids"))):
        assert index in tokens and text == tokens[index][0][place] or index == -1 and text == 0
    starts = [row["sample_index"][0, first].item() for first in row["first_tokens"]]
    assert (row["position_ids"][0, row["first_tokens"]] == 0).all()
    assert len(starts) == int((row["position_ids"] == 0).sum())
    assert row["counts"].tolist() == [index >= 0 for index in starts] and row["counts"].any()
    for index, is_random in zip(starts, row["is_random"].tolist(), strict=True):
        assert index == -1 or is_random == tokens[index][1]


def test_pairs_of_one_context_parallel_rank_count(folder, monkeypatch):
    task = make_task("bert", folder, "--context-parallel-size 2", 2)
    (inputs, *_) = batches(task)
    inputs["sample_index"][1] = -1
    lengths, order = inputs["padding_mask"].sum(1).sort(descending=True, stable=True)
    padding = PackedSeqParams.of_lengths(lengths, 32).all_bounds()
    for rank, expected in ((0, (inputs["sample_index"] >= 0)[order]), (1, torch.zeros(4, dtype=torch.bool))):
        on_ranks(monkeypatch, cp=Group("cp", (0, 1), rank))
        batch = task.get_batch(iter([inputs]))
        assert torch.equal(batch["counts"], expected)
        assert int(batch["labels"].min()) == 0
        assert batch["documents"].all_bounds() == padding


def test_sentence_order_loss_is_added_to_the_masked_token_loss(folder):
    task = make_task("bert", folder)
    logits = torch.tensor([[2.0, 0], [0, 0], [1, 3]], dtype=torch.bfloat16, requires_grad=True)
    batch = {"is_random": torch.tensor([0, 1, 0]), "counts": torch.tensor([True, False, True]),
             "loss_mask": torch.tensor([[1, 0], [1, 1], [0, 1]])}  # fmt: skip
    losses = torch.arange(6.0).view(3, 2)
    order = float(np.log1p(np.exp(-2.0)) + np.log1p(np.exp(2.0)))
    result = task.loss_func(batch, (losses, logits))
    assert [item.item() for item in result["lm loss"]] == [10, 4]
    assert [item.item() for item in result["sop loss"]] == pytest.approx([order, 2], rel=1e-6)
    assert result["sop loss"][0].dtype == torch.float32 and result["sop loss"][0].requires_grad
    exact = task.loss_func(batch, (losses.double(), logits.double()))["sop loss"]
    assert exact[0].item() == pytest.approx(order, rel=1e-14)
    assert task.loss_func(batch, (losses, None)).keys() == {"lm loss"}


@pytest.mark.parametrize("rank", [0, 1])
def test_t5_has_its_longest_texts_first_and_their_lengths_on_the_host(rank, folder, monkeypatch):
    task = make_task("t5", folder, "--context-parallel-size 2", 2)
    on_ranks(monkeypatch, cp=Group("cp", (0, 1), rank))
    (inputs, *_) = batches(task)
    lengths, order = inputs["enc_mask"].sum(1).sort(descending=True, stable=True)
    assert order.tolist() != sorted(order)
    batch = task.get_batch(iter([inputs]))
    assert torch.equal(batch["lengths"], lengths) and torch.equal(batch["sample_index"], inputs["sample_index"][order])
    inputs["labels"] = inputs["labels"].clamp(min=0)
    for name in ("text_enc", "text_dec", "labels", "loss_mask"):
        assert torch.equal(batch[name], zigzag.local_part(inputs[name][order], rank, 2)), name


@pytest.mark.parametrize("kind", MASKS)
def test_random_samples_differ_between_splits(kind, folder):
    task = make_task(kind, folder)
    task.cfg = task.cfg.with_settings(mock_data=True)
    splits = task.train_valid_test_datasets_provider((3, 2, None))
    assert [len(split) for split in splits] == [3, 2, language_model.MOCK_SAMPLES]
    texts = [sample["labels"].tolist() for split in splits for sample in (split[0], split[1])]
    assert len(set(map(tuple, texts))) == 6 and splits[0][1]["labels"].tolist() == texts[1]


def test_row_is_predicted_at_its_masked_tokens_only(folder):
    task = make_task("bert", folder, PACKED)
    (inputs, *_) = batches(task)
    row = task.get_batch(iter([inputs]))
    assert row["predicted"].shape == (1, int(inputs["loss_mask"].sum())) and row["loss_mask"].all()
    row = task.get_batch(iter([{**inputs, "loss_mask": torch.zeros_like(inputs["loss_mask"])}]))
    assert row["predicted"].shape == (1, 1) and not row["loss_mask"].any()  # a kernel wants a token


@pytest.mark.parametrize("stored, tokens, size", [(None, 70, 70), (64, 70, 70), (70, 64, 70), (70, None, 70)])
def test_vocabulary_of_a_teacher_is_its_size_or_that_of_the_tokenizer(tmp_path, stored, tokens, size):
    teacher = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=stored))
    cfg = SimpleNamespace(
        companions={TEACHER: teacher}, group=lambda kind: SimpleNamespace(export_kd_teacher_load=str(tmp_path))
    )
    tokenizer = None if tokens is None else SimpleNamespace(vocab_size=tokens)
    check_vocabulary(cfg, size, tokenizer)
    with pytest.raises(UserError, match=f"has a vocabulary of {size}, the student 64"):
        check_vocabulary(cfg, 64, tokenizer)


def test_equal_pairs_are_not_accurate():
    """TRL counts a pair if the chosen reward exceeds the rejected one: at the reference itself none does."""
    completions = torch.tensor([[-1, 0, 0, 1, 1, 1, 2, 3, 3]])
    losses = torch.linspace(0.5, 3.0, 9)[None]
    better = losses - (completions == 2) * 0.25  # the chosen completion of the second pair
    batch = {"completions": completions, "num_completions": 4, REFERENCE: losses}
    for output, accurate in ((losses, 0.0), (better, 1.0)):
        figures = preference_losses(PreferenceConfig(dpo=True), batch, output)
        count, pairs = figures["rewards/accuracies"]
        assert (float(count), float(pairs)) == (accurate, 2.0)
