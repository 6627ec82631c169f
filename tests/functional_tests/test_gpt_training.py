"""Whole runs: resuming changes no bit, ranks and micro-batches change no loss, bad data stops with its reason."""

import hashlib
import json
import os
import subprocess
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.evaluate import Evaluator
from tests.test_utils.gpt_runs import VOCAB_SIZE, losses, read_records, train, train_with_errors, write_dataset

ROOT = Path(__file__).resolve().parents[2]


def data_flags(dataset, save):
    return ["--data-path", str(dataset), "--split", "80,10,10", "--save", str(save)]


def digests(checkpoint):
    """Name -> sha256 of every tensor of a checkpoint, and its counters."""
    reader = CheckpointReader(checkpoint)
    tensors = {name: reader.read(name).view(torch.uint8).numpy().tobytes() for name in reader.names}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}
    return {**hashes, **{key: reader.objects[key] for key in ("train_state", "optimizer", "scheduler")}}


PRECISIONS = {
    "fp32": ["--eval-interval", "3"],
    "bf16": ["--bf16", "--attention-dropout", "0"],
    "fp16": ["--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "3"],
    "sgd": ["--optimizer", "sgd", "--rampup-batch-size", "4", "4", "12", "--lr", "1e-1"],
}


@pytest.mark.parametrize("world_size, name", [(1, "fp32"), (2, "fp32"), (2, "bf16"), (2, "fp16"), (1, "sgd")])
def test_resuming_changes_no_bit(gloo_pool, dataset, tmp_path, world_size, name):
    """Train 8 iterations; train 4, resume, train 4: equal metrics files, equal weights, moments and counters."""
    full, parts = tmp_path / "whole", tmp_path / "parts"
    argv = PRECISIONS[name] + ["--save-interval", "4"]
    assert gloo_pool.run(train, world_size, argv + data_flags(dataset, full)) == [0] * world_size
    resumable = argv + data_flags(dataset, parts) + ["--load", str(parts)]
    assert gloo_pool.run(train, world_size, resumable + ["--exit-interval", "4"]) == [0] * world_size
    assert (parts / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert gloo_pool.run(train, world_size, resumable) == [0] * world_size
    assert (full / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    assert digests(full / "iter_0000008") == digests(parts / "iter_0000008") != {}


def test_ranks_and_micro_batches_change_no_loss(gloo_pool, dataset, tmp_path):
    """Dropout on, loss masked at document ends: the same losses to fp32 rounding for any data-parallel layout."""
    layouts = {"one": (1, 8), "micro": (1, 2), "two": (2, 2), "four": (4, 1)}
    flags = ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"]
    results = {}
    for name, (world_size, micro_batch_size) in layouts.items():
        argv = flags + data_flags(dataset, tmp_path / name) + ["--micro-batch-size", str(micro_batch_size)]
        gloo_pool.run(train, world_size, argv)
        results[name] = losses(tmp_path / name)
    for name in ("micro", "two", "four"):
        np.testing.assert_allclose(results[name], results["one"], rtol=2e-5, err_msg=name)
    assert results["one"][-1] < results["one"][0]


def test_evaluations_of_the_same_weights_agree_exactly(gloo_pool, dataset, tmp_path):
    flags = data_flags(dataset, tmp_path / "run")
    gloo_pool.run(train, 2, flags)
    evaluation = ["--load", str(tmp_path / "run"), "--skip-train", "--lr-decay-iters", "99"]
    gloo_pool.run(train, 2, [*flags, *evaluation])  # questions of training are not asked
    records = [record for record in read_records(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "valid"]
    assert len(records) == 2 and records[0]["lm loss"] == records[1]["lm loss"]


def test_evaluation_is_without_dropout(gloo_pool, dataset, tmp_path):
    """Equal weights with and without dropout have equal validation and test losses, and different training losses."""
    results = {}
    for rate in ("0", "0.5"):
        flags = [*data_flags(dataset, tmp_path / rate), "--hidden-dropout", rate, "--attention-dropout", rate]
        flags += ["--init-method-std", "0.2", "--train-iters", "1", "--lr-warmup-iters", "0", "--lr", "1e-12"]
        gloo_pool.run(train, 1, flags)
        records = read_records(tmp_path / rate / "metrics.jsonl")
        results[rate] = {record["kind"]: record["lm loss"] for record in records}
    for kind in ("valid", "test"):
        np.testing.assert_allclose(results["0.5"][kind], results["0"][kind], rtol=1e-6)
    assert abs(results["0.5"]["train"] - results["0"]["train"]) > 1e-2


def train_counting_evaluations(rank, world_size, argv):
    """Like ``train``; the sets that were evaluated."""
    evaluated = []
    evaluate = Evaluator.evaluate

    def count(self, sets, name, final=False):
        evaluated.append(name)
        return evaluate(self, sets, name, final)

    with mock.patch.object(Evaluator, "evaluate", count):
        assert train(rank, world_size, argv) == 0
    return evaluated


@pytest.mark.parametrize("interval, expected", [("4", ["validation"] * 2), ("3", ["validation"] * 3)])
def test_the_last_evaluation_is_done_once_and_reported_as_final_too(gloo_pool, dataset, tmp_path, interval, expected):
    flags = data_flags(dataset, tmp_path / "run") + ["--eval-interval", interval]
    assert gloo_pool.run(train_counting_evaluations, 1, flags) == [[*expected, "test"]]
    records = [record for record in read_records(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "valid"]
    assert [record.get("final", False) for record in records] == [False, False, True]
    assert records[1]["lm loss"] == records[2]["lm loss"] or interval == "3"


def test_skipped_iterations_consume_data_and_leave_weights(gloo_pool, dataset, tmp_path):
    flags = data_flags(dataset, tmp_path / "run") + ["--iterations-to-skip", "2", "3"]
    gloo_pool.run(train, 1, flags)
    records = [record for record in read_records(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["skipped"] for record in records] == [False, True, True] + [False] * 5
    assert [record["consumed_samples"] for record in records] == [8 * i for i in range(1, 9)]


@pytest.mark.parametrize("ramp, layout", [
    (False, ""), (True, "--pipeline-model-parallel-size 2"), (True, "--use-distributed-optimizer"),
])  # fmt: skip
def test_a_run_that_uses_up_its_data_saves_what_it_trained(gloo_pool, tmp_path, ramp, layout):
    """A blend without weights is one pass over its sources; with weights the same run continues from that save."""
    sources = [str(write_dataset(tmp_path / f"data{seed}", 12, seed)) for seed in (0, 1)]
    num_samples = sum((np.fromfile(f"{source}.bin", np.uint16).size - 1) // 32 for source in sources)
    flags = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--eval-iters", "0"]
    flags += [*layout.split(), *(["--rampup-batch-size", "4", "4", "12"] if ramp else [])]
    expected = [4] * 3 + [8] * ((num_samples - 12) // 8) if ramp else [8] * (num_samples // 8)
    argv = [*flags, "--train-iters", str(len(expected) + 2), "--train-data-path"]
    assert gloo_pool.run(train, 2, [*argv, *sources]) == [2, 2]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == str(len(expected))
    state = CheckpointReader(str(tmp_path / "run" / f"iter_{len(expected):07}")).objects["train_state"]
    assert state["consumed_train_samples"] == sum(expected)
    assert gloo_pool.run(train, 2, [*argv, *sources]) == [2, 2]  # the same command finds no further batch
    assert gloo_pool.run(train, 2, [*argv, "1", sources[0], "1", sources[1]]) == [0, 0]
    assert len(losses(tmp_path / "run")) == len(expected) + 2


@pytest.mark.parametrize(("size", "sizes"), [(16, [8] * 3 + [16] * 2), (4, [8] * 3 + [4] * 11)])
def test_a_run_by_samples_that_continues_with_another_batch_size_ends_at_its_samples(
    gloo_pool, dataset, tmp_path, size, sizes
):
    """70 samples are 8 iterations of the first batch size, and 4 or 17 of the others."""
    flags = [*data_flags(dataset, tmp_path / "run"), "--load", str(tmp_path / "run"), "--train-samples", "70"]
    flags += ["--lr-warmup-samples", "16", "--lr-decay-samples", "60", "--eval-iters", "1", "--log-interval", "1"]
    by_samples = False, "gpt", ("--train-iters", "--lr-warmup-iters")
    assert gloo_pool.run(train, 1, [*flags, "--exit-interval", "3"], *by_samples) == [0]
    assert gloo_pool.run(train, 1, [*flags, "--global-batch-size", str(size)], *by_samples) == [0]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["consumed_samples"] for record in trained] == np.cumsum(sizes).tolist()
    assert records[-1]["kind"] == "test", "the final evaluation"
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == str(len(sizes))
    timing = read_records(tmp_path / "run" / "timing.jsonl")
    assert [record["train_iters"] for record in timing if "train_iters" in record] == [8, len(sizes)]


def refused(gloo_pool, argv):
    """The message of a run that must stop."""
    code, message = gloo_pool.run(train_with_errors, 1, argv)[0]
    assert code != 0 and message.startswith("error: ")
    return message


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_start_into_a_used_folder_is_rejected_or_starts_over(gloo_pool, dataset, tmp_path, world_size):
    """Without --load the run would start at 0 and overwrite the existing run."""
    save = tmp_path / "run"
    argv = [*data_flags(dataset, save), "--save-interval", "4"]
    assert gloo_pool.run(train, world_size, argv) == [0] * world_size
    before = contents(save)
    codes, messages = zip(*gloo_pool.run(train_with_errors, world_size, argv))
    assert set(codes) == {2} and f"--load {save}" in messages[0] and "--start-over" in messages[0]
    assert not any(messages[1:]), "the first rank says it for all"
    assert contents(save) == before
    assert gloo_pool.run(train, world_size, [*argv, "--start-over"]) == [0] * world_size
    retained = {path for path in before if path.parent != save}
    assert retained and all(contents(save / "set-aside-001")[save / "set-aside-001" / path.relative_to(save)]
                        == before[path] for path in retained)  # fmt: skip
    assert digests(save / "iter_0000008") == digests(save / "set-aside-001" / "iter_0000008"), "the same run again"


def train_on_a_full_disk(rank, world_size, argv):
    """Exit code and log of a run whose every save fails."""
    import errno
    import logging
    from unittest import mock

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron").addHandler(handler)
    try:
        with mock.patch("megatron.core.dist_checkpointing.writer._write_blocks", full):
            return train(rank, world_size, argv), lines
    finally:
        logging.getLogger("megatron").removeHandler(handler)


def test_saves_that_fail_again_and_again_stop_the_run(gloo_pool, dataset, tmp_path):
    save = tmp_path / "run"
    argv = [*data_flags(dataset, save), "--save-interval", "1"]
    for limit, iterations in ((None, 3), (5, 5)):
        flags = [] if limit is None else ["--max-failed-saves", str(limit)]
        for code, lines in gloo_pool.run(train_on_a_full_disk, 2, argv + flags):
            assert code == 75
            [message] = [line for line in lines if line.startswith("stopping: the last")]
            assert "No space left" in message and "--load" in message and "--max-failed-saves" in message
        records = [record for record in read_records(save / "metrics.jsonl") if record["kind"] == "train"]
        assert len(records) == iterations
    assert not list(save.glob("iter_*"))


def test_a_token_beyond_the_vocabulary_is_named(gloo_pool, tmp_path):
    from megatron.data.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path}/bad.bin", dtype=np.uint16)
    for _ in range(40):
        builder.add_document(np.full(50, VOCAB_SIZE + 5), [50])
    builder.finalize(f"{tmp_path}/bad.idx")
    message = refused(gloo_pool, ["--data-path", f"{tmp_path}/bad", "--split", "80,10,10"])
    assert f"token id {VOCAB_SIZE + 5} in document" in message


def test_an_empty_validation_split_is_rejected_with_the_fix(gloo_pool, dataset):
    message = refused(gloo_pool, ["--data-path", str(dataset), "--split", "100,0,0", "--eval-interval", "2"])
    assert "--split" in message and "--eval-iters" in message


def test_truncated_data_is_rejected(gloo_pool, dataset, tmp_path):
    (tmp_path / "cut.idx").write_bytes(dataset.with_suffix(".idx").read_bytes())
    (tmp_path / "cut.bin").write_bytes(dataset.with_suffix(".bin").read_bytes()[:-10])
    message = refused(gloo_pool, ["--data-path", str(tmp_path / "cut"), "--split", "80,10,10"])
    assert "cut.bin" in message


def test_a_loss_that_is_not_a_number_stops_the_run(gloo_pool, dataset, tmp_path):
    message = refused(gloo_pool, data_flags(dataset, tmp_path / "run") + ["--lr", "1e30", "--clip-grad", "0"])
    assert "iteration" in message and "--lr" in message


def test_all_contradictions_are_reported_at_once(dataset):
    from megatron.core.config.cli import ConfigError
    from megatron.training.arguments import parse_args, validate_args
    from tests.test_utils.gpt_runs import MODEL_FLAGS

    argv = MODEL_FLAGS + ["--data-path", str(dataset), "--fp16", "--bf16"]
    argv += ["--global-batch-size", "7", "--overlap-cpu-optimizer-d2h-h2d"]
    with pytest.raises(ConfigError) as error:
        validate_args(parse_args(argv), world_size=2)
    for flag in ("--fp16", "--global-batch-size", "--overlap-cpu-optimizer-d2h-h2d"):
        assert flag in str(error.value)


def test_metrics_hold_plain_json(gloo_pool, dataset, tmp_path):
    gloo_pool.run(train, 1, data_flags(dataset, tmp_path / "run"))
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert {"kind", "iteration", "consumed_samples"} <= set(json.loads(line))


def train_on_data_that_is_cut(rank, world_size, argv, path):
    """The file loses its end after the third batch; exit code and message."""
    import os
    from unittest import mock

    from megatron.training.tasks.gpt import GPTTask

    get_batch, calls = GPTTask.get_batch, []

    def cut(self, iterator):
        calls.append(1)
        if len(calls) == 3:
            os.truncate(path, os.path.getsize(path) - 10)
        return get_batch(self, iterator)

    with mock.patch.object(GPTTask, "get_batch", cut):
        return train_with_errors(rank, world_size, argv)


def train_without_tokens(rank, world_size, argv, evaluation):
    """Every loss mask is 0 from the third batch on (in evaluation: from the first); exit code and message."""
    from unittest import mock

    import torch

    from megatron.training.data.loader import FlatBatch

    tensors, calls = FlatBatch.tensors, []

    def unmasked(self):
        batch = tensors(self)
        calls.append(torch.is_grad_enabled())
        if (evaluation and not calls[-1]) or (not evaluation and sum(calls) > 4):
            batch = {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}
        return batch

    with mock.patch.object(FlatBatch, "tensors", unmasked):
        return train_with_errors(rank, world_size, argv)


@pytest.mark.parametrize(
    "flags, world_size, where",
    [
        ([], 1, "iteration 2 (samples from 8 on)"),
        (["--fp16"], 1, "iteration 2 (samples from 8 on)"),
        (["--pipeline-model-parallel-size", "2"], 2, "iteration 2 (samples from 8 on)"),
        (["--eval-interval", "2"], 1, "evaluation"),
        (["--eval-interval", "2", "--pipeline-model-parallel-size", "2"], 2, "evaluation"),
    ],
    ids=["fp32", "fp16", "pp2", "eval", "eval-pp2"],
)
def test_a_loss_without_tokens_is_an_error(gloo_pool, dataset, tmp_path, flags, world_size, where):
    argv = [*data_flags(dataset, tmp_path / "run"), "--micro-batch-size", "2", *flags]
    results = gloo_pool.run(train_without_tokens, world_size, argv, "--eval-interval" in flags)
    assert all(code == 2 for code, _ in results)
    text = "".join(message for _, message in results)
    assert f"{where}: no token contributes to the loss" in text, text
    assert not list((tmp_path / "run").glob("iter_*")) or "--eval-interval" in flags


LOSE_ALL_DATA = """
import os, sys
from megatron.training.tasks.gpt import GPTTask
from tests.test_utils.gpt_runs import train

path, get_batch, calls = sys.argv.pop(1), GPTTask.get_batch, []

def cut(self, iterator):
    calls.append(1)
    if len(calls) == 3:
        os.truncate(path, 0)  # reads raise SIGBUS: no page is left
    return get_batch(self, iterator)

GPTTask.get_batch = cut
sys.exit(train(0, 1, sys.argv[1:]))
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_one_process_names_the_file_if_mapped_data_is_truncated(warm_python, tmp_path, workers):
    data = write_dataset(tmp_path / "numbers", num_documents=4000)
    argv = [*data_flags(data, tmp_path / "run"), "--log-interval", "100", "--num-workers", str(workers)]
    program = tmp_path / "program.py"
    program.write_text(LOSE_ALL_DATA)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [warm_python, str(program), f"{data}.bin", *argv, "--train-iters", "100", "--global-batch-size", "64"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 2, result
    assert f"error: {data}.bin was cut while this run read it" in result.stderr
    assert "continue from the last checkpoint" in result.stderr and "Traceback" not in result.stderr


def test_data_that_is_cut_under_a_run_is_named_and_nothing_is_saved_of_it(gloo_pool, tmp_path):
    data = write_dataset(tmp_path / "numbers")
    argv = [*data_flags(data, tmp_path / "run"), "--save-interval", "1", "--log-interval", "100"]
    [(code, message)] = gloo_pool.run(train_on_data_that_is_cut, 1, argv, f"{data}.bin")
    assert code == 2 and f"{data}.bin was cut while this run read it" in message
    assert not list((tmp_path / "run").glob("iter_*")), "it was cut in the first iteration"
