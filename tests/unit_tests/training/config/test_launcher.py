"""Incomplete variables of launchers, and several processes without a rank, are one message."""

import pytest

from megatron.core.config.errors import UserError
from megatron.training import run as program
from megatron.training.arguments import parse_args
from megatron.training.config import launcher
from tests.test_utils.gpt_runs import MODEL_FLAGS

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *launcher.TASKS)
COMPLETE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def set_variables(monkeypatch):
    def set_only(variables):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_only


@pytest.mark.parametrize("variables, text", [
    ({"WORLD_SIZE": "2"}, "environment variable RANK: is not set though WORLD_SIZE is 2"),
    ({"RANK": "0"}, "environment variable WORLD_SIZE: is not set though RANK is"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "environment variable MASTER_ADDR: is not set though RANK is"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, "environment variable MASTER_ADDR: is not set though RANK is"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, "environment variable MASTER_PORT: is not set though RANK"),
    ({"SLURM_NTASKS": "8"}, "environment variable SLURM_NTASKS 8: several processes .* set RANK from SLURM_PROCID"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "environment variable OMPI_COMM_WORLD_SIZE 2: .* RANK from OMPI_COMM_WORLD_RANK"),
    ({"PMI_SIZE": "4"}, "environment variable PMI_SIZE 4: several processes"),
    ({"SLURM_STEP_NUM_TASKS": "4", "WORLD_SIZE": "1"}, "environment variable SLURM_STEP_NUM_TASKS 4: several"),
])  # fmt: skip
def test_an_incomplete_launch_is_one_message(set_variables, capsys, variables, text):
    set_variables(variables)
    with pytest.raises(UserError, match=text):
        launcher.check_launch()
    assert program.run(parse_args([*MODEL_FLAGS, "--mock-data"]), None) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: environment variable") and len(errors.splitlines()) == 1


@pytest.mark.parametrize("variables", [
    {}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "8", **COMPLETE}, COMPLETE,
    {"SLURM_NTASKS": "unknown"}, {"OMPI_COMM_WORLD_SIZE": "1"},
])  # fmt: skip
def test_single_processes_and_complete_launches_are_accepted(set_variables, variables):
    set_variables(variables)
    launcher.check_launch()
