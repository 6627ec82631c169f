"""Tasks of BERT and T5: random samples have the form of the data sets', and a description counts what is built."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.context_parallel import zigzag
from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.data.loader import KeyedDataset, collate
from megatron.training.model_description import describe_run, predicted_per_rank
from megatron.training.tasks import language_model
from megatron.training.tasks.language_model import task_class
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
    return task_class(kind)(cfg, build_tokenizer(cfg))


MASKS = {"bert": ("padding_mask", "loss_mask"), "t5": ("dec_mask", "dec_mask")}
"""The longest mask of what the labels are of, and that of the labels."""


@pytest.mark.parametrize("kind", MASKS)
def test_random_samples_have_the_form_of_those_of_the_data(kind, folder):
    task = make_task(kind, folder)
    real = task.train_valid_test_datasets_provider((8, 0, 0))[0]
    for index in range(8):
        made, wanted = task.random_sample(np.random.default_rng(index)), real[index]
        for name in made:
            assert np.shape(made[name]) == np.shape(wanted[name])
            assert np.asarray(made[name]).dtype == np.asarray(wanted[name]).dtype, name
        assert wanted.keys() - made.keys() <= {"truncated", "dataset_id"}
        for sample in (made, wanted):
            outer, own = (sample[name] for name in MASKS[kind])
            assert np.array_equal(own == 1, sample["labels"] >= 0) and (own <= outer).all()
            assert (sample["loss_mask"] <= outer).all() and outer[0] == 1 and (np.diff(outer) <= 0).all()


@pytest.mark.parametrize("kind", MASKS)
def test_parameters_are_those_of_the_description(kind, folder):
    task = make_task(kind, folder)
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
    ("bert", "--use-packed-sequence --attention-dropout 0", 1, None),
    ("t5", "", 1, None),
])  # fmt: skip
def test_the_head_predicts_at_as_many_places_as_can_be_masked(kind, flags, ranks, expected, folder):
    assert predicted_per_rank(settings(kind, folder, flags, ranks)) == expected


def test_only_the_head_is_counted_on_fewer_tokens(folder):
    some, whole = (make_task("bert", folder, flags).description() for flags in ("", "--mask-prob 0.98"))
    assert some.num_parameters == whole.num_parameters and some.layers == whole.layers
    final, *rest = some.head.ops
    assert final == whole.head.ops[0]
    assert [op.flops for op in rest] == [op.flops * 5 / 32 for op in whole.head.ops[1:]]


@pytest.mark.parametrize("flags, ranks", [
    ("--context-parallel-size 2", 2), ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    ("--use-packed-sequence --attention-dropout 0", 1),
])  # fmt: skip
def test_operations_are_those_that_the_loss_needs_in_every_layout(flags, ranks, folder):
    here, alone = (describe_run(settings("bert", folder, *more), 64) for more in ((flags, ranks), ()))
    assert here.flops_per_sample == pytest.approx(alone.flops_per_sample, rel=1e-12)
    assert alone.costs.head < here.costs.head and alone.needless_flops == 0


def batches(task, number=8):
    """Micro-batches of 4 samples."""
    samples = KeyedDataset(task.train_valid_test_datasets_provider((4 * number, 0, 0))[0])
    return [collate([samples[index, index] for index in range(start, start + 4)]) for start in range(0, 4 * number, 4)]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("mask_prob", [0.04, 0.15, 0.22])
def test_every_label_is_among_the_places_of_one_rank(ranks, mask_prob, folder, monkeypatch):
    task = make_task("bert", folder, f"--seq-length 40 --mask-prob {mask_prob} --context-parallel-size {ranks}", ranks)
    given, found = batches(task), []
    wanted = [
        (int(batch["sample_index"][row]), place, int(batch["labels"][row, place]))
        for batch in given for row, place in batch["loss_mask"].nonzero().tolist()
    ]  # fmt: skip
    for rank in range(ranks):
        groups = dataclasses.replace(SINGLE_PROCESS, cp=Group("cp", tuple(range(ranks)), rank))
        monkeypatch.setattr(parallel_state, "get_process_groups", lambda here=groups: here)
        own = zigzag.local_part(torch.arange(40)[None], rank, ranks)[0]
        for batch in map(task.get_batch, map(iter, ([batch] for batch in given))):
            assert batch["labels"].shape == batch["predicted"].shape == (4, predicted_per_rank(task.cfg))
            for row, place in batch["loss_mask"].nonzero().tolist():
                where = int(own[batch["predicted"][row, place]])
                found.append((int(batch["sample_index"][row]), where, int(batch["labels"][row, place])))
    assert sorted(found) == sorted(wanted) and len(found) > 20 * (mask_prob > 0.1)


def test_more_masked_tokens_than_are_predicted_are_refused_before_the_batch_is_used(folder):
    task = make_task("bert", folder, "--mask-prob 0.5")
    given = batches(task)
    most = max(int(batch["loss_mask"].sum(1).max()) for batch in given)
    assert most == 14  # of 29
    task.cfg = dataclasses.replace(task.cfg, mask_prob=0.15)
    said = "--mask-prob 0.15: at most 5 tokens of a sample are predicted, but one has 14 masked; .* here 0.4219"
    with pytest.raises(UserError, match=said):
        list(task.micro_batches(iter(given), 8, 4)["data_iterator"])
    task.cfg = dataclasses.replace(task.cfg, mask_prob=0.4219)
    assert list(task.micro_batches(iter(given), 8, 4)["data_iterator"]) == given
