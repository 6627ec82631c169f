"""Tasks of BERT and T5: random samples have the form of the data sets', and a description counts what is built."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.tasks import language_model
from megatron.training.tasks.language_model import task_class
from tests.test_utils import masked_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    masked_runs.write_corpora(folder)
    return folder


def make_task(kind, folder):
    data = f"--data-path {folder / 'a'} --split 1,0,0 --eval-iters 0 --short-seq-prob 0.5"
    argv = masked_runs.command_line(kind, data.split())
    words = [text if text != "vocab.txt" else str(folder / text) for text in masked_runs.PROGRAM_ONLY[kind]]
    cfg = validate_args(parse_args([*argv, *words, "--data-cache-path", str(folder)], model_family=kind), 1)
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
