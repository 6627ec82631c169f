"""The end of a run: errors that the user can fix are one message, all other errors keep their traceback."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.compat.rerun_state_machine import RejectedResult, get_rerun_state_machine
from megatron.core.config.cli import ConfigError
from megatron.core.config.errors import UserError
from megatron.core.datasets.megatron_dataset import EmptySplitError
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.tensor_parallel.vocabulary import IdOutOfRange
from megatron.core.tokenizers import build_tokenizer
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetError, MissingDatasetError
from megatron.training import run as program
from megatron.training.arguments import exit_on_config_error, parse_args
from megatron.training.checks.self_checks import BuildError, ReplicasDiffer
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import compose
from megatron.training.exits.endings import error_message, notify_launcher
from megatron.training.observe.metrics import NonFiniteError
from megatron.training.start.rendezvous import RendezvousError
from megatron.training.train_state import TrainState
from tests.test_utils.gpt_runs import MODEL_FLAGS

KINDS = {
    ConfigError: ValueError, CheckpointError: ValueError, IndexedDatasetError: ValueError, EmptySplitError: ValueError,
    BuildError: ValueError, MissingDatasetError: FileNotFoundError, RendezvousError: OSError,
    NonFiniteError: ArithmeticError, ReplicasDiffer: ArithmeticError, RejectedResult: ArithmeticError,
    IdOutOfRange: IndexError,
}  # fmt: skip


def ending(monkeypatch, error):
    """Return the result of ``run`` if the run raises ``error``."""

    def fail(*args):
        raise error

    monkeypatch.setattr(program, "build", fail)
    return program.run(parse_args([*MODEL_FLAGS, "--mock-data"]), None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_for_users_have_one_base_and_keep_the_class_that_programs_catch(kind):
    assert issubclass(kind, UserError) and issubclass(kind, KINDS[kind])


def test_user_error_ends_in_one_message_and_code_2(monkeypatch, capsys):
    assert ending(monkeypatch, UserError("--data-path x: is empty; give another")) == 2
    assert capsys.readouterr().err == "error: --data-path x: is empty; give another\n"


@pytest.mark.parametrize("kind", [ValueError, OSError, ArithmeticError, ZeroDivisionError, KeyError])
def test_a_bug_keeps_its_traceback(monkeypatch, capsys, kind):
    with pytest.raises(kind, match="a bug"):
        ending(monkeypatch, kind("a bug"))
    assert capsys.readouterr().err == ""


class Damaged:
    """A data set whose file turns out to be damaged."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise IndexedDatasetError("a.bin is truncated")


def test_error_of_a_data_loader_worker_ends_in_its_message_only():
    loader = torch.utils.data.DataLoader(Damaged(), num_workers=1)
    with pytest.raises(IndexedDatasetError) as caught:
        next(iter(loader))
    assert "Traceback" in str(caught.value) and error_message(caught.value) == "a.bin is truncated"


def test_bad_files_and_values_are_errors_for_users(tmp_path):
    with pytest.raises(MissingDatasetError):
        IndexedDataset(str(tmp_path / "none"))
    with pytest.raises(UserError, match="--vocab-size"):
        build_tokenizer(parse_args(["--tokenizer-type", "NullTokenizer"]).tokenizer)
    with pytest.raises(RejectedResult, match="a loss: nan"):
        get_rerun_state_machine().validate_result(float("nan"), lambda x: x != x, message="a loss")


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Return this process's part of torchrun's error report, read by torch."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    def read():
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
        return ChildFailedError("pretrain_gpt.py", {0: failure}).format_msg()

    return read


def test_torchruns_report_holds_the_message_of_a_users_error(report, monkeypatch):
    ending(monkeypatch, UserError("--data-path x: is empty; give another"))
    notify_launcher("a later reason")
    assert "traceback : --data-path x: is empty; give another\n" in report() and "later" not in report()


def test_torchruns_report_holds_the_traceback_of_a_bug(report, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        ending(monkeypatch, ZeroDivisionError("a bug"))
    assert "in fail" in report() and "ZeroDivisionError: a bug" in report()


def test_torchruns_report_explains_the_exit_code_that_torchrun_hides(report, monkeypatch):
    monkeypatch.setattr(program, "build", lambda *args: SimpleNamespace(task=None))
    monkeypatch.setattr(program, "training", lambda *args: nullcontext(SimpleNamespace(train=lambda: None)))
    monkeypatch.setattr(program, "_final_evaluation", lambda *args: program.UNSAVED_EXIT_CODE)
    assert program.run(parse_args([*MODEL_FLAGS, "--mock-data"]), None) == 75
    assert "the last checkpoint could not be written (exit code 75)" in report()


def test_torchruns_report_lists_wrong_flags(report, monkeypatch):
    with pytest.raises(SystemExit, match="2"), exit_on_config_error("pretrain_gpt.py"):
        parse_args(["--nmu-layers", "2"])
    assert "--nmu-layers: unknown flag; did you mean --num-layers" in report()


@pytest.mark.parametrize("iteration, is_said", [(3, False), (4, True)])
def test_a_signal_in_the_last_iteration_leaves_the_final_evaluation_to_the_next_start(iteration, is_said, caplog):
    parts = SimpleNamespace(
        state=TrainState(iteration), checkpointer=SimpleNamespace(failed_saves=0), valid_sets=[], test_sets=[]
    )
    reason = SimpleNamespace(finished=False, exit_code=0)
    cfg = compose(FlatConfig(train_iters=4))
    trainer = SimpleNamespace(cfg=cfg, parts=parts, exits=None)
    assert program._final_evaluation(trainer, reason) == 0
    assert ("the final evaluation is not complete" in caplog.text) == is_said
    assert ("and nothing is saved without --save" in caplog.text) == is_said


@pytest.mark.parametrize("sets, is_said", [((["valid"], []), False), ((["valid"], ["test"]), True)])
def test_a_signal_in_the_final_validation_is_reported_only_if_a_set_is_left(sets, is_said, caplog):
    evaluated = []
    parts = SimpleNamespace(valid_sets=sets[0], test_sets=sets[1])
    exits = SimpleNamespace(interrupted=lambda: bool(evaluated))
    trainer = SimpleNamespace(
        cfg=compose(FlatConfig(train_iters=4, save="run")), parts=parts, exits=exits, periodic_work=[],
        evaluate=lambda sets, name, final: evaluated.append(name),
    )  # fmt: skip
    assert program._final_evaluation(trainer, None) == 0 and evaluated == ["validation"]
    assert ("interrupted; the same command completes it" in caplog.text) == is_said
