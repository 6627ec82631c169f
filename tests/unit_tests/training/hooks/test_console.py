"""The lines that existing parsers read."""

import logging
import re
import sys
from datetime import datetime
from pathlib import Path

import pytest

from megatron.training.config.logging import LoggingConfig
from megatron.training.hooks.base import Hooks
from megatron.training.hooks.console import ConsoleHook, MemoryHook, StdoutHandler, memory_line, stdout_logger
from megatron.training.observe.kinds.evaluation import TASK, TEST, VALID
from megatron.training.observe.kinds.sample import SAMPLE
from megatron.training.observe.kinds.train import INTERVAL, training_line
from megatron.training.observe.metrics import StepMetrics
from megatron.training.observe.records import RunInfo
from megatron.training.train_state import TrainState

NOW = datetime(2026, 1, 31, 12, 0, 0, 0)
GOLDEN = (
    " [2026-01-31 12:00:00.000000] iteration        1/     100 | consumed samples:          256 |"
    " elapsed time per iteration (ms): 812.3 | throughput per GPU (TFLOP/s/GPU): 401.2 |"
    " learning rate: 3.000000E-04 | global batch size:   256 | lm loss: 1.082345E+01 | loss scale: 1.0 |"
    " grad norm: 2.345 | num zeros: 0 | params norm: 1.234 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |"
)


def interval(**changed):
    """An interval of one iteration at `NOW`."""
    values = {
        "iterations": 1, "seconds": 0.8123, "losses": {"lm loss": 10.82345}, "learning_rate": 3e-4,
        "global_batch_size": 256, "loss_scale": 1.0, "grad_norm": 2.345, "num_zeros": 0, "params_norm": 1.234,
        "num_skipped": 0, "num_nan": 0, "skipped_samples": 0, "tflops_per_device": 401.2,
    }  # fmt: skip
    return INTERVAL.record(1, 256, values | {"time": NOW.timestamp()} | changed)


def line_of(train_iters=100, with_tflops=True, **changed):
    return training_line(interval(**changed), train_iters, with_tflops)


def evaluated(kind, **values):
    """Lines of an evaluation at iteration 7."""
    return list(kind.console(kind.record(7, 56, values), RunInfo(state=TrainState(), train_iters=9)))


def test_the_iteration_line_is_megatrons_to_the_character():
    assert line_of() == GOLDEN


def test_optional_fields_are_left_out():
    line = line_of(grad_norm=None, num_zeros=None, params_norm=None, with_tflops=False)
    assert line == re.sub(r" throughput per GPU.*?\|| grad norm.*?\|| num zeros.*?\|| params norm.*?\|", "", GOLDEN)


def test_skipped_samples_follow_consumed_samples():
    line = line_of(skipped_samples=16, with_tflops=False)
    assert "| consumed samples:          256 | skipped samples:           16 | elapsed time" in line


def test_large_counts_widen_their_fields():
    large = {"iteration": 123456789, "consumed_samples": 10**13, "global_batch_size": 123456, "num_skipped": 1000}
    line = line_of(987654321, **large)
    assert "iteration 123456789/987654321 | consumed samples: 10000000000000 |" in line
    assert "global batch size: 123456 |" in line and "number of skipped iterations: 1000 |" in line


PARSERS = {
    # the regular expressions that scripts around Megatron-LM use, in kind
    "nemo": r"iteration\s+(\d+)/\s*(\d+)\s*\|.*elapsed time per iteration \(ms\):\s*([\d.]+)\s*\|",
    "loss": r"lm loss:\s*([\d.]+E[+-]\d+)",
    "lr": r"learning rate:\s*([\d.E+-]+)",
    "throughput": r"throughput per GPU \(TFLOP/s/GPU\):\s*(\d+\.?\d*)",
    "grad norm": r"grad norm: (\d+\.\d+) \|",
    "skipped": r"number of skipped iterations:\s+(\d+) \| number of nan iterations:\s+(\d+) \|",
    "time": r"^\s*\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6})\]",
    "old": r"consumed samples:\s+(\d+) \|.* global batch size:\s+(\d+) \| lm loss: (\S+) \| loss scale: (\S+) \|",
}


@pytest.mark.parametrize("name", PARSERS)
def test_typical_parsers_find_their_fields(name):
    result = re.search(PARSERS[name], line_of())
    assert result and all(result.groups())


def test_a_parser_that_splits_at_bars_gets_every_field():
    fields = [field.strip() for field in line_of().split("|")]
    assert fields[-1] == ""
    values = dict(field.split(": ", 1) for field in fields[1:-1])
    assert float(values["lm loss"]) == 10.82345 and int(values["consumed samples"]) == 256
    assert list(values)[-1] == "number of nan iterations"


def documented_expression():
    page = (Path(__file__).parents[4] / "docs" / "reference" / "logging.md").read_text()
    assert GOLDEN in page
    return re.compile(page.split("```regex\n")[1].split("```")[0], re.VERBOSE)


def test_the_documented_expression_matches_every_form_of_the_line():
    expression = documented_expression()
    result = expression.match(GOLDEN)
    assert result["loss_scale"] == "1.0" and result["params_norm"] == "1.234" and result["skipped_samples"] is None
    bare = line_of(grad_norm=None, num_zeros=None, params_norm=None, losses={}, with_tflops=False)
    assert expression.match(bare)["losses"] == ""
    losses = {"lm loss": float("nan"), "load balancing loss": 1.0}
    odd = line_of(skipped_samples=8, losses=losses, grad_norm=float("inf"), loss_scale=65536.0, with_tflops=False)
    result = expression.match(odd)
    assert result["losses"] == " lm loss: NAN | load balancing loss: 1.000000E+00 |" and result["grad_norm"] == "inf"


def test_evaluation_lines_are_framed_by_dashes():
    rule, line, repeated = evaluated(VALID, **{"lm loss": 2.0})
    assert line == " validation loss at iteration 7 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert rule == repeated == "-" * (len(line) + 1)


def test_a_sample_is_one_line_without_control_characters():
    texts = {"prompt": 'a "b"', "text": "line\nnext\x1b[31m \u2028end \ufffd é"}
    (line,) = evaluated(SAMPLE, number=2, **texts)
    assert line == ' sample 2 at iteration 7 | "a \\"b\\"" | "line\\nnext\\u001b[31m \\u2028end \ufffd é"'


@pytest.mark.parametrize(
    ("kind", "values", "start"),
    [
        (VALID, {"final": True}, " validation loss at iteration 7 on validation set | "),
        (TEST, {"final": True}, " validation loss at iteration 7 on test set | "),
        (VALID, {"dataset": "code"}, " validation-code loss at iteration 7 | "),
    ],
)
def test_evaluation_lines_name_their_set(kind, values, start):
    assert evaluated(kind, **values)[1] == start


def test_scores_of_a_task_are_one_line():
    assert evaluated(TASK, dataset="arc", acc=0.25) == [" task arc at iteration 7 | acc: 0.2500"]


def test_a_huge_loss_prints_a_bounded_perplexity():
    assert "lm loss PPL: 4.851652E+08 |" in evaluated(VALID, **{"lm loss": 1e6})[1]


def lines_of(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "iteration " in line]


def test_the_first_iteration_and_every_interval_are_logged(simulated_run, capsys):
    simulated_run(train_iters=9).train(Hooks(4, [ConsoleHook()]), 1, 9)
    assert [int(re.search(r"iteration +(\d+)/ +9", line)[1]) for line in lines_of(capsys)] == [1, 4, 8]
    simulated_run(train_iters=9).train(Hooks(4, [ConsoleHook()]), 6, 9)  # resumed
    assert [int(re.search(r"iteration +(\d+)/", line)[1]) for line in lines_of(capsys)] == [6, 8]


def test_losses_are_averaged_over_iterations_that_were_not_skipped(simulated_run, capsys):
    def metrics(iteration):
        return StepMetrics(
            losses={"lm loss": 1e9 if iteration == 3 else float(iteration)}, num_tokens=1, learning_rate=1.0,
            global_batch_size=1, skipped=iteration == 3, elapsed=0.1 * iteration,
        )  # fmt: skip

    simulated_run().train(Hooks(5, [ConsoleHook()]), 1, 5, metrics=metrics)
    line = lines_of(capsys)[-1]
    assert f"lm loss: {(2 + 4 + 5) / 3:.6E} |" in line
    assert "number of skipped iterations:   1 |" in line and "elapsed time per iteration (ms): 350.0 |" in line


def test_throughput_has_a_field_and_a_separate_line(simulated_run, capsys):
    run = simulated_run(logging=LoggingConfig(log_throughput=True), world_size=2, device_name="NVIDIA H200")
    run.train(Hooks(10, [ConsoleHook()]), 1, 1)
    first, second = capsys.readouterr().out.splitlines()
    assert "| throughput per GPU (TFLOP/s/GPU): 2.0 |" in first
    assert second == "     tokens/s: 2048.0 | tokens/s/GPU: 1024.0 | MFU: 0.2%"


def test_the_time_remaining_follows_the_pace_since_the_first_log_point(simulated_run, capsys):
    clock = iter(range(0, 1000, 20))  # 20 s from log point to log point
    simulated_run(train_iters=12).train(Hooks(2, [ConsoleHook(clock=lambda: next(clock))]), 1, 12)
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if "remaining" in line]
    assert [line.split(" | ")[0] for line in found] == ["     time remaining: 0:01:47", "     time remaining: 0:00:46"]
    assert re.fullmatch(r" +time remaining: \S+ \| complete about: \d{4}-\d\d-\d\d \d\d:\d\d", found[0])
    assert lines.index(found[0]) == 1 + next(index for index, line in enumerate(lines) if "iteration        4/" in line)


def test_console_line_is_printed_once_under_any_logging_configuration(simulated_run, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("megatron"), "handlers", [StdoutHandler()])
        for _ in range(2):  # each console hook asks for the same handler
            simulated_run().train(Hooks(1, [ConsoleHook()]), 1, 1)
    assert len(lines_of(capsys)) == 2
    assert sum(isinstance(handler, StdoutHandler) for handler in stdout_logger().handlers) == 1


def test_a_full_disk_under_standard_output_warns_once(monkeypatch, caplog, capsys):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    handler = StdoutHandler()
    record = logging.LogRecord("x", logging.INFO, "", 0, "line", None, None)
    for _ in range(3):
        handler.emit(record)
    assert [item.getMessage() for item in caplog.records] == [
        "cannot write the log to standard output: [Errno 28] No space left on device"
    ]


def test_the_memory_line():
    line = memory_line(3, 1, {"allocated": 1.5, "max allocated": 2.0, "reserved": 4.0, "max reserved": 4.0})
    expected = "memory (MB) | allocated: 1.5 | max allocated: 2.0 | reserved: 4.0 | max reserved: 4.0"
    assert line == f"[Rank 3] (after 1 iterations) {expected}"


def test_memory_is_reported_once_or_at_its_interval(monkeypatch, capsys):
    monkeypatch.setattr("megatron.training.hooks.console.cuda_memory_megabytes", lambda: {"allocated": 1.0})
    for interval, expected in ((None, [5]), (3, [5, 6, 9])):
        hook = MemoryHook(interval)
        hook.on_start(RunInfo(state=TrainState(), train_iters=9))
        for iteration in range(5, 10):
            hook.on_step(TrainState(iteration=iteration), None)
        actual = re.findall(r"\[Rank 0\] \(after (\d+) iterations\) memory \(MB\)", capsys.readouterr().out)
        assert [int(number) for number in actual] == expected
