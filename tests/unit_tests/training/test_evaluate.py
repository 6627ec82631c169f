"""Evaluation leaves no processes, descriptors or open pipeline runs."""

import json
import subprocess
from pathlib import Path

import pytest

from megatron.training.evaluate import eval_sets
from tests.test_utils.gpt_runs import MODEL_FLAGS, write_dataset

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = '''
"""Train without garbage collection; write children, descriptors and live pipeline runs after each evaluation."""
import gc, json, multiprocessing, os, sys

sys.path.insert(0, sys.argv[1])
from megatron.core.pipeline_parallel.runtime import PipelineRun
from megatron.training.arguments import parse_args
from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.evaluation import VALID
from megatron.training.run import run
from megatron.training.tasks.language_model import task_class


class Counts(Hook):
    children, descriptors, pipeline_runs = [], [], []
    kinds = (VALID,)

    def on_step(self, state, metrics):
        self.pipeline_runs.append(sum(type(item) is PipelineRun for item in gc.get_objects()))

    def on_record(self, kind, record):
        self.on_step(None, record)
        self.children.append(len(multiprocessing.active_children()))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))


gc.disable()
code = run(parse_args(sys.argv[3:]), task_class("gpt"), [Counts()])
Counts.children.append(len(multiprocessing.active_children()))
with open(sys.argv[2], "w") as file:
    json.dump([code, Counts.children, Counts.descriptors, Counts.pipeline_runs], file)
'''


@pytest.mark.parametrize("watchdog_seconds", [600, 0])  # the watchdog observes every forward step
def test_evaluations_leave_no_workers_descriptors_or_pipeline_runs(warm_python, tmp_path, watchdog_seconds):
    (tmp_path / "program.py").write_text(PROGRAM)
    data, output = write_dataset(tmp_path / "data"), tmp_path / "counts.json"
    flags = [*MODEL_FLAGS, "--data-path", str(data), "--split", "8,2,0", "--train-iters", "5", "--eval-interval", "1",
             "--eval-iters", "1", "--num-workers", "2", "--distributed-backend", "gloo",
             "--watchdog-timeout-seconds", str(watchdog_seconds)]  # fmt: skip
    command = [warm_python, str(tmp_path / "program.py"), str(ROOT), str(output), *flags]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    code, children, descriptors, pipeline_runs = json.loads(output.read_text())
    assert code == 0
    assert children == [2] * 6 + [0], "evaluations, and the run, end their workers"  # the last evaluation is final
    assert max(descriptors) <= descriptors[0], "evaluations close their descriptors"
    assert pipeline_runs == [0] * 11


def test_lists_lose_entries_that_are_none_but_not_empty_data_sets():
    sets = eval_sets([[], None, [3]])
    assert [(part.dataset, part.name) for part in sets] == [([], "0"), ([3], "2")]
