"""Weights of other formats in whole runs: loaded on any layout, exported beside checkpoints, and back again."""

import json

import pytest

from megatron.core.dist_checkpointing import CheckpointReader
from megatron.core.export.hf import load_hf
from megatron.training.arguments import parse_args
from tests.test_utils.gpt_runs import losses, train_with_errors
from tests.test_utils.hf_folders import LLAMA, tiny_llama
from tools.checkpoint import convert

RUN = [
    "--seq-length", "32", "--tokenizer-type", "NullTokenizer", "--micro-batch-size", "2", "--global-batch-size", "8",
    "--lr", "1e-2", "--train-iters", "3", "--eval-iters", "0", "--num-workers", "0", "--log-interval", "1",
    "--mock-data",
]  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama") / "hf")


def run(rank, world_size, argv):
    """``pretrain_gpt.py`` with ``argv`` alone; exit code and stderr."""
    import contextlib
    import dataclasses
    import io

    from megatron.training.run import run as run_program
    from megatron.training.tasks.gpt import GPTTask

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = run_program(dataclasses.replace(parse_args(argv), fp64=True), GPTTask)
    return code, errors.getvalue()


@pytest.fixture(scope="module")
def one_rank(gloo_pool, llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    argv = [*RUN, "--load-hf", str(llama), "--save", str(folder), "--save-interval", "1", "--save-hf-interval", "3"]
    assert gloo_pool.run(run, 1, argv) == [(0, "")]
    return folder


@pytest.mark.parametrize("layout", [
    ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    ["--pipeline-model-parallel-size", "2"],
    ["--use-distributed-optimizer"],
    ["--use-torch-fsdp2"],
], ids=lambda flags: flags[0])  # fmt: skip
def test_weights_of_hugging_face_train_on_any_layout_as_on_one_rank(gloo_pool, llama, one_rank, tmp_path, layout):
    argv = [*RUN, "--load-hf", str(llama), "--save", str(tmp_path), *layout]
    for code, errors in gloo_pool.run(run, 2, argv):
        assert code == 0, errors
    assert losses(tmp_path) == pytest.approx(losses(one_rank), rel=1e-10)


def test_a_converted_checkpoint_trains_as_the_folder_itself(gloo_pool, llama, one_rank, tmp_path):
    places = ["--load-dir", str(llama), "--save-dir", str(tmp_path / "native")]
    assert convert.main(["--loader", "hf", "--saver", "native", *places, "--no-checking"]) == 0
    start = ["--pretrained-checkpoint", str(tmp_path / "native"), "--use-checkpoint-args"]
    ((code, errors),) = gloo_pool.run(run, 1, [*RUN, *start, "--save", str(tmp_path / "run")])
    assert code == 0, errors
    assert losses(tmp_path / "run") == losses(one_rank)


def test_exports_hold_what_the_checkpoint_holds(one_rank):
    assert [path.name for path in (one_rank / "hf").iterdir()] == ["iter_0000003"]
    exported = load_hf(one_rank / "hf" / "iter_0000003")
    stored = CheckpointReader(one_rank / "iter_0000003")
    assert exported.tensors.keys() == {name for name in stored.names if name.startswith("model.")}
    assert all(exported.tensors[name].read().equal(stored.read(name)) for name in exported.tensors)


def test_the_same_command_again_goes_on_from_its_own_checkpoint(gloo_pool, llama, one_rank, tmp_path):
    argv = [*RUN, "--load-hf", str(llama), "--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2"]
    assert gloo_pool.run(run, 1, [*argv, "--exit-interval", "2"])[0][0] == 0
    assert gloo_pool.run(run, 1, argv)[0][0] == 0
    assert losses(tmp_path) == losses(one_rank)


def test_flags_that_contradict_the_folder_are_refused_with_both_values(gloo_pool, llama):
    ((code, errors),) = gloo_pool.run(train_with_errors, 1, ["--load-hf", str(llama), "--num-layers", "3"])
    assert code != 0 and "--num-layers is 3, there it is 2" in errors


def test_a_folder_without_a_model_is_refused_by_the_name_of_the_flag(gloo_pool):
    ((code, errors),) = gloo_pool.run(train_with_errors, 1, ["--load-hf", "/nowhere"])
    assert code != 0 and "--load-hf /nowhere: no folder of a Hugging Face model" in errors


def test_a_folder_that_does_not_fit_its_config_is_refused(gloo_pool, llama, tmp_path):
    folder = tiny_llama(tmp_path / "hf")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 65}))
    ((code, errors),) = gloo_pool.run(run, 1, [*RUN, "--load-hf", str(folder)])
    assert code == 1 and "embed_tokens" in errors and "Traceback" not in errors


def test_the_flags_of_the_folder_give_the_same_model(llama):
    settings = load_hf(llama).settings
    cfg = parse_args(LLAMA, needs_data=False)
    assert {name: getattr(cfg, name) for name in cfg.explicit} == {name: settings[name] for name in cfg.explicit}
