"""tools/inspect_batch.py: the samples that it prints are those that a run read, or it says why it cannot know them."""

import json
import os
import shutil

import numpy as np
import pytest

from megatron.console import run_tool
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tools.checkpoint import run_history
from megatron.training.stored_settings import config_to_dict
from tests.test_utils import masked_runs
from tests.test_utils.gpt_runs import MODEL_FLAGS, write_dataset


def train_and_record(rank, world_size, argv, family="gpt"):
    """Train; return the micro-batches of each iteration as this rank read them."""
    from megatron.training.arguments import parse_args
    from megatron.training.run import run
    from megatron.training.tasks.language_model import task_class

    steps = []

    class Recording(task_class(family)):
        def make_batches(self):
            rows = super().make_batches()
            read = rows.read

            def recorded(step, batches):
                for batch in batches:
                    step.append({name: value.numpy().copy() for name, value in batch.items()})
                    yield batch

            def recording(*arguments):
                batches, counts = read(*arguments)
                steps.append([])
                return recorded(steps[-1], batches), counts

            rows.read = recording
            return rows

    assert run(parse_args([*MODEL_FLAGS, "--eval-iters", "0", *argv], model_family=family), Recording) == 0
    return steps


def samples_read(ranks, step):
    """(rank, micro-batch, sample number) -> arrays of the sample, in iteration ``step`` of a recorded run."""
    return {
        (rank, number, int(batch["sample_index"][row])): {name: value[row].tolist() for name, value in batch.items()}
        for rank, steps in enumerate(ranks)
        for number, batch in enumerate(steps[step])
        for row in range(len(batch["sample_index"]))
    }


@pytest.fixture
def inspect(capsys):
    """``inspect(folder, iteration, *flags)``: the parsed JSON, or the message of an error in the input."""

    def call(folder, iteration, *flags):
        capsys.readouterr()
        code = run_tool("inspect-batch", [*map(str, ("--load", folder, "--iteration", iteration, *flags)), "--json"])
        out, err = capsys.readouterr()
        if code == 0:
            return json.loads(out)
        assert code == 2 and not out
        lines = [line for line in err.splitlines() if not line.endswith("as samples are drawn")]
        assert len(lines) == 1 and lines[0].startswith("error: "), err
        return lines[0]

    return call


def same(result, read):
    """Whether the samples of a batch are the recorded ones, in the order of the stream."""
    rows = result["samples"]
    numbers = [row["sample"] for row in rows]
    assert numbers == list(range(result["first_sample"], result["first_sample"] + result["batch_size"]))
    return {(row["rank"], row["micro_batch"], row["sample"]): row["arrays"] for row in rows} == read


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prefixes of two data sets."""
    folder = tmp_path_factory.mktemp("data")
    return [str(write_dataset(folder / name, seed=seed)) for seed, name in enumerate("ab")]


def blend(data):
    return ["--data-path", "0.3", data[0], "0.7", data[1], "--split", "80,10,10"]


@pytest.fixture(scope="module")
def resumed(gloo_pool, data, tmp_path_factory):
    """Folder of a run of 4 iterations that continued with twice the batch size and more iterations, and its batches."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    argv = [*blend(data), "--save", str(folder), "--save-interval", "2"]
    (first,) = gloo_pool.run(train_and_record, 1, [*argv, "--train-iters", "4", "--global-batch-size", "4"])
    more = ["--load", str(folder), "--override-opt-param-scheduler"]
    (second,) = gloo_pool.run(train_and_record, 1, [*argv, *more])
    assert (len(first), len(second)) == (4, 4)
    return folder, [first + second]


@pytest.fixture
def copy(resumed, tmp_path):
    """A copy of that folder without some of its checkpoints."""

    def call(*removed):
        shutil.copytree(resumed[0], tmp_path / "copy")
        for iteration in removed:
            shutil.rmtree(tmp_path / "copy" / f"iter_{iteration:07d}")
        return tmp_path / "copy"

    return call


def test_batches_of_two_ranks_with_a_blend_and_a_ramp_match_the_run(inspect, gloo_pool, data, tmp_path):
    argv = [*blend(data), "--save", str(tmp_path), "--save-interval", "3", "--train-iters", "6"]
    argv += ["--rampup-batch-size", "4", "4", "12", "--global-batch-size", "12", "--iterations-to-skip", "3"]
    ranks = gloo_pool.run(train_and_record, 2, argv)
    sizes = []
    for step in range(6):
        results = inspect(tmp_path, step + 1)
        assert same(results, samples_read(ranks, step))
        assert results["notes"] == (["read, but not trained on: --iterations-to-skip"] if step == 2 else [])
        sizes.append(results["batch_size"])
        for row in results["samples"]:
            assert row["weight"] == pytest.approx({data[0]: 0.3, data[1]: 0.7}[row["data_set"]])
            source, tokens = IndexedDataset(row["data_set"]), row["arrays"]["tokens"] + row["arrays"]["labels"][-1:]
            pieces = [source.get(part["document"])[slice(*part["tokens"])].tolist() for part in row["documents"]]
            assert sum(pieces, []) == tokens
            assert [text for _, text in row["texts"]] == [" ".join(map(str, piece)) for piece in pieces]
    assert sizes == [4, 4, 8, 12, 12, 12]
    next_item = inspect(tmp_path, 4, "--ckpt-step", "3")
    assert same(next_item, samples_read(ranks, 3)) and "not read yet" in next_item["notes"][0]
    assert len(inspect(tmp_path, 6, "--samples", "3")["samples"]) == 3
    assert "--iteration 7: the run ends at iteration 6" in inspect(tmp_path, 7)


def test_batches_of_a_resumed_run_match_both_parts(inspect, resumed):
    folder, ranks = resumed
    for step in range(8):
        results = inspect(folder, step + 1)
        assert same(results, samples_read(ranks, step)), step
        changes = [note.split(":")[1] for note in results["notes"]]
        expected = [" global_batch_size was 4, is 8", " train_iters was 4, is 8"] if step in (4, 5) else []
        assert changes == expected


def test_iterations_around_an_unknown_change_are_rejected(inspect, resumed, copy):
    ranks, folder = resumed[1], copy(2, 4)
    for iteration in range(1, 7):
        assert "the batch size changed between iterations 0 and 6" in inspect(folder, iteration)
    assert same(inspect(folder, 7), samples_read(ranks, 6))


def test_a_change_of_length_is_rejected_if_a_checkpoint_between_is_missing(inspect, gloo_pool, data, tmp_path):
    argv = [*blend(data), "--save", str(tmp_path), "--save-interval", "2", "--lr-decay-iters", "4"]
    (first,) = gloo_pool.run(train_and_record, 1, [*argv, "--train-iters", "4"])
    more = ["--load", str(tmp_path), "--train-iters", "6"]
    (second,) = gloo_pool.run(train_and_record, 1, [*argv, *more])
    assert same(inspect(tmp_path, 5), samples_read([first + second], 4))
    shutil.rmtree(tmp_path / "iter_0000004")
    answer = inspect(tmp_path, 5)
    assert "settings changed between iterations 2 and 6" in answer and "train_iters was 4, is 6" in answer
    assert same(inspect(tmp_path, 2), samples_read([first], 1))


def test_a_run_that_continued_in_another_folder_is_followed(inspect, gloo_pool, data, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    argv = [*blend(data), "--save-interval", "2", "--lr-decay-iters", "4"]
    (first,) = gloo_pool.run(train_and_record, 1, [*argv, "--save", str(old), "--train-iters", "4"])
    more = ["--load", str(old), "--save", str(new), "--train-iters", "6"]
    (second,) = gloo_pool.run(train_and_record, 1, [*argv, *more])
    for step in range(6):
        assert same(inspect(new, step + 1), samples_read([first + second], step)), step
    shutil.rmtree(old)
    assert f"continues a checkpoint of --load {old}, which is not there now" in inspect(new, 5)


def test_epochs_of_the_cyclic_loader_match_the_run(inspect, gloo_pool, tmp_path):
    small = [str(write_dataset(tmp_path / name, 6, seed)) for seed, name in enumerate("ab")]
    argv = ["--data-path", *small, "--split", "1,0,0", "--dataloader-type", "cyclic", "--save", str(tmp_path / "run")]
    ranks = gloo_pool.run(train_and_record, 1, argv)
    assert all(same(inspect(tmp_path / "run", step + 1), samples_read(ranks, step)) for step in range(8))
    argv = ["--data-path", *small, "--split", "1,0,0", "--exit-interval", "1", "--save", str(tmp_path / "once")]
    gloo_pool.run(train_and_record, 1, argv)
    assert "--iteration 5: the training data is used up; it holds" in inspect(tmp_path / "once", 5)
    (single,) = gloo_pool.run(train_and_record, 1, ["--mock-data", "--train-iters", "4", "--save", str(tmp_path / "m")])
    assert all(same(inspect(tmp_path / "m", step + 1), samples_read([single], step)) for step in range(4))


MASKED = {
    "bert": [],
    "t5": ["--vocab-extra-ids", str(masked_runs.SENTINELS), "--decoder-seq-length", "20"],
}


@pytest.mark.parametrize("family", MASKED)
def test_masked_samples_match_the_run(inspect, gloo_pool, tmp_path, family, capsys):
    masked_runs.write_corpora(tmp_path)
    vocab, prefixes = tmp_path / "vocab.txt", {name: str(tmp_path / name) for name in "ab"}
    argv = [*MASKED[family], "--data-path", "2", prefixes["a"], "1", prefixes["b"], "--split", "90,10,0"]
    argv += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocab), "--train-iters", "3"]
    argv += ["--save", str(tmp_path / "run"), "--max-position-embeddings", "44"]
    ranks = gloo_pool.run(train_and_record, 2, argv, family)
    texts, marks = masked_runs.TEXTS, 0
    for step in range(3):
        results = inspect(tmp_path / "run", step + 1)
        assert same(results, samples_read(ranks, step))
        for row in results["samples"]:
            (part,) = row["documents"]
            source, arrays = IndexedDataset(row["data_set"]), row["arrays"]
            first, end = source.document_indices[part["document"] : part["document"] + 2]
            tokens = source.joined(first, end)[slice(*part["tokens"])].tolist()
            names = dict(row["texts"])
            if family == "t5":
                assert {index for index in arrays["text_enc"] if 0 < index < len(texts)} <= set(tokens)
                spans = sum(index >= len(texts) for index in arrays["text_enc"])
                assert [names[name].count("<extra_id_") for name in ("input", "target")] == [spans, spans]
                assert names["target"].endswith("[SEP]")
                marks += spans
                continue
            original = [label if label >= 0 else index for label, index in zip(arrays["labels"], arrays["text"])]
            used = original[: sum(arrays["padding_mask"])]
            assert arrays["truncated"] or sorted(used) == sorted([2, 3, 3, *tokens])
            text = names["first"] + names["second"]
            assert text.count("|") == sum(arrays["loss_mask"]) and text.startswith("[CLS]")
            marks += text.count("|")
    assert marks > 24
    assert run_tool("inspect-batch", ["--load", str(tmp_path / "run"), "--iteration", "2", "--width", "20"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 + 8 * 3 and all(len(line.split(": ", 1)[1]) <= 23 + line.count("\\") for line in out[2::3])
    first = inspect(tmp_path / "run", 1)
    vocab.write_text(vocab.read_text() + "more\n")
    assert inspect(tmp_path / "run", 1) == first  # by the copies in the checkpoints
    for copies in (tmp_path / "run").glob("iter_*/tokenizer"):
        shutil.rmtree(copies)
    assert f"{vocab}: is not the tokenizer of" in inspect(tmp_path / "run", 1)
    vocab.unlink()
    assert f"--vocab-file {vocab} cannot be read" in inspect(tmp_path / "run", 1)


def test_moved_and_changed_data_is_rejected_unless_it_is_named(inspect, gloo_pool, data, tmp_path):
    folder, local = tmp_path / "run", []
    for prefix in data:
        local.append(str(tmp_path / os.path.basename(prefix)))
        for suffix in (".bin", ".idx"):
            shutil.copy2(prefix + suffix, local[-1] + suffix)
    ranks = gloo_pool.run(train_and_record, 1, [*blend(local), "--train-iters", "4", "--save", str(folder)])
    expected = samples_read(ranks, 1)
    assert same(inspect(folder, 2, "--data-path", *data), expected)
    assert same(inspect(folder, 2, "--data-path", "0.3", data[0], "0.7", data[1]), expected)
    for wrong in (data[:1], ["0.5", data[0], "0.5", data[1]]):
        assert "must name the run's data sets in its order" in inspect(folder, 2, "--data-path", *wrong)
    os.utime(local[1] + ".bin")
    assert f"{local[1]}.bin: was written after {folder}" in inspect(folder, 2)
    assert same(inspect(folder, 2, "--data-path", *local), expected)
    os.remove(local[1] + ".idx")
    answer = inspect(folder, 2)
    assert f"no data set at {local[1]}" in answer and "add --data-path" in answer


@pytest.mark.parametrize(("flags", "message"), [
    (["--iteration", "0"], "--iteration 0: must be at least 1"),
    (["--iteration", "-3"], "--iteration -3: must be at least 1"),
    (["--samples", "0"], "--samples 0: must be at least 1"),
    (["--ckpt-step", "3"], "--ckpt-step 3"),
    (["--family", "no.such"], "no.such"),
])  # fmt: skip
def test_wrong_flags_are_named(inspect, resumed, flags, message):
    assert message in inspect(resumed[0], 1, *flags)


def test_a_folder_without_a_checkpoint_is_named(inspect, tmp_path):
    assert f"--load {tmp_path}: holds no checkpoint" in inspect(tmp_path, 1)


@pytest.mark.parametrize(("change", "message"), [
    ({"tokenizer_type": "Unknown"}, "tokenizer_type is 'Unknown'"),
    ({"tokenizer_type": None}, "--tokenizer-type is not set"),
    ({"data_parallel_size": 0}, "data_parallel_size is 0"),
    ({"micro_batch_size": "x"}, "micro_batch_size is 'x'"),
    ({"model_family": "none"}, "unknown family 'none'"),
    ({"dataloader_type": "external"}, "makes the data itself"),
    ({"needs_data": False}, "makes the data itself"),
])  # fmt: skip
def test_settings_that_cannot_be_used_are_named(inspect, resumed, monkeypatch, change, message):
    def changed(directory):
        manifest = read_manifest(directory)
        manifest["objects"]["args"].update(change)
        return manifest

    monkeypatch.setattr(run_history, "read_manifest", changed)
    assert message in inspect(resumed[0], 1)


def test_stored_settings_are_those_of_the_run(resumed):
    directory = str(resumed[0] / "iter_0000008")
    stored = read_manifest(directory)["objects"]["args"]
    result = config_to_dict(run_history.read_saved(directory).cfg.flat)
    other = {name for name in stored if result[name] != stored[name]}
    assert other <= {"explicit", "extra", "resolved"}


def test_the_text_form_has_a_line_per_document(resumed, capsys):
    assert run_tool("inspect-batch", ["--load", str(resumed[0]), "--iteration", "1", "--samples", "1"]) == 0
    first, sample, *documents = capsys.readouterr().out.splitlines()
    assert first == f"iteration 1: 4 samples from 0 on, settings of {resumed[0]}/iter_0000002"
    assert sample.startswith("sample 0: ") and sample.endswith("rank 0, micro-batch 0") and documents
    assert all(line.startswith("  document ") for line in documents)
    tokens = [int(word) for line in documents for word in line.split(": ")[1].strip('"…').split()]
    assert len(tokens) <= 33 and np.all(np.array(tokens) < 64)
