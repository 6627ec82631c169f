"""Ranks with other data, settings, software or code end with a message that names the difference."""

import contextlib
import dataclasses
import os
import random
import re
import shutil
from pathlib import Path
from types import FunctionType, ModuleType
from unittest import mock

import numpy as np
import pytest

from megatron.core.groups.process_groups import Group
from megatron.training.arguments import parse_args
from megatron.training.checks import rank_agreement
from tests.test_utils import masked_runs
from tests.test_utils.gpt_runs import MODEL_FLAGS, train_with_errors, write_dataset

LAYOUTS = {
    "data": [],
    "tensor": ["--tensor-model-parallel-size", "2"],
    "pipeline": ["--pipeline-model-parallel-size", "2"],
    "context": ["--context-parallel-size", "2", "--attention-dropout", "0"],
}
SHORT = ["--train-iters", "1", "--lr-warmup-iters", "0", "--eval-iters", "0"]
MOCK = ["--mock-data", *SHORT]
FIX = "start every rank with the same settings"


def run_in_folder(rank, world_size, folders, flags, family="gpt"):
    """Train in this rank's folder with this rank's flags."""
    before = os.getcwd()
    os.chdir(folders[rank])
    try:
        return train_with_errors(rank, world_size, flags[rank], model_family=family)
    finally:
        os.chdir(before)


def run_patched(rank, world_size, patches, argv):
    """Train; the last rank within the contexts of ``patches``."""
    with contextlib.ExitStack() as stack:
        for target, value in patches.items() if rank == world_size - 1 else ():
            if target.isupper():
                stack.enter_context(mock.patch.dict(os.environ, {target: value}))
            else:
                stack.enter_context(mock.patch(target, value))
        return train_with_errors(rank, world_size, argv)


def refused(results, *texts):
    """Assert that every rank ends with a user's error and only the first one prints it; return the lines."""
    assert [code for code, _ in results] == [2] * len(results), results
    assert all(errors == "" for _, errors in results[1:])
    message = results[0][1]
    assert "Traceback" not in message and all(re.search(text, message) for text in texts), message
    return message.splitlines()


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Two folders: ``same`` is equal in both, ``data`` has the same size and other tokens."""
    folders = [tmp_path_factory.mktemp(f"host{rank}") for rank in range(2)]
    for folder in folders:
        write_dataset(folder / "same", seed=5)
        write_dataset(folder / "data", seed=1)
    tokens = np.fromfile(folders[1] / "data.bin", dtype=np.uint16)
    tokens[len(tokens) // 2] ^= 1
    tokens.tofile(folders[1] / "data.bin")
    return [str(folder) for folder in folders]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_other_tokens_of_equal_length_name_the_file(gloo_pool, copies, layout):
    argv = ["--data-path", "data", "--split", "1,0,0", *SHORT, *LAYOUTS[layout]]
    lines = refused(gloo_pool.run(run_in_folder, 2, copies, [argv, argv]))
    host = r"\(.+\)"
    pattern = (
        rf"error: data\.bin: rank 1 {host} and rank 0 {host} have different content; copy the same file to every host"
    )
    assert len(lines) == 1 and re.fullmatch(pattern, lines[0])


DATA = {
    "blend": ["--data-path", "1", "same", "1", "data"],
    "validation": ["--train-data-path", "same", "--valid-data-path", "data"],
    "test": ["--train-data-path", "same", "--valid-data-path", "same", "--test-data-path", "data"],
    "file of sources": ["--data-args-path", "sources"],
}


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_masked_models_compare_their_data(gloo_pool, tmp_path, family):
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()
        masked_runs.write_corpora(folder)
        (folder / "vocab.txt").write_text("\n".join(masked_runs.TEXTS) + "\n")
    path = folders[1] / "b.bin"
    path.write_bytes(path.read_bytes()[::-1])
    argv = ["--data-path", "1", "a", "2", "b", *masked_runs.PROGRAM_ONLY[family], *SHORT]
    argv += ["--decoder-seq-length", "20"] if family == "t5" else []
    results = gloo_pool.run(run_in_folder, 2, list(map(str, folders)), [argv, argv], family)
    refused(results, r"error: b\.bin: rank 1 .* and rank 0 .* have different content")


@pytest.mark.parametrize("kind", DATA)
def test_every_source_of_data_is_compared(gloo_pool, copies, kind):
    for folder in copies:
        (Path(folder) / "sources").write_text("2 same 1 data")
    argv = [*DATA[kind], *SHORT]
    refused(gloo_pool.run(run_in_folder, 2, copies, [argv, argv]), r"error: data\.bin: rank 1")


def test_equal_copies_in_folders_of_each_host_are_accepted(gloo_pool, copies):
    flags = [["--data-path", f"{folder}/same", *SHORT] for folder in copies]
    assert [code for code, _ in gloo_pool.run(run_in_folder, 2, copies, flags)] == [0, 0]


@pytest.mark.parametrize("source", ["teacher", "stored"])
def test_other_files_of_a_teacher_are_named(gloo_pool, tmp_path, source):
    """Its weights, or its stored log-probabilities."""
    first, second = tmp_path / "first", tmp_path / "second"
    [*map(Path.mkdir, (first, second))]
    run, top = ["--save", str(first / "run")], ["--logits-save-top-k", "3"]
    assert gloo_pool.run(train_with_errors, 1, [*MOCK, *run]) == [(0, "")]
    read = ["--export-kd-teacher-load", "run"]
    if source == "stored":
        store = ["--load", str(tmp_path / "run"), "--logits-save-dir", str(first / "kept"), *top]
        (first / "run").rename(tmp_path / "run")
        assert gloo_pool.run(train_with_errors, 1, [*MOCK, *store]) == [(0, "")]
        read = ["--logits-load-dir", "kept"]
    shutil.copytree(first, second, dirs_exist_ok=True)
    largest = max((path for path in second.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"\xff")
    results = gloo_pool.run(run_in_folder, 2, [str(first), str(second)], [[*MOCK, *read]] * 2)
    refused(results, rf"{largest.name}: rank 1 .* have different content")


def test_other_weights_in_a_file_of_sources_and_missing_files_are_named(gloo_pool, copies, tmp_path):
    for rank, folder in enumerate(copies):
        (Path(folder) / "weights").write_text(f"{rank + 1} same 1 data")
    argv = ["--data-args-path", "weights", *SHORT]
    refused(gloo_pool.run(run_in_folder, 2, copies, [argv, argv]), "data weights: .*1.0.* on rank 0 .*2.0.* on rank 1")
    argv = ["--data-path", "same", *SHORT]
    results = gloo_pool.run(run_in_folder, 2, [copies[0], str(tmp_path)], [argv, argv])
    refused(results, r"same\.bin: readable on rank 0 .*; No such file or directory on rank 1")


def test_ranks_with_other_tokenizers_are_rejected(gloo_pool, tmp_path):
    folders = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        words = [f"w{number}" for number in range(60)]
        random.Random(rank).shuffle(words)
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
        folders.append(str(folder))
    argv = ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", "vocab.txt", *MOCK]
    refused(gloo_pool.run(run_in_folder, 2, folders, [argv, argv]), "tokenizer: .* on rank 0 .* on rank 1")


SETTINGS = {
    "--hidden-dropout": ("0.1", "0.2"),
    "--seed": ("1", "2"),
    "--lr": ("0.01", "0.02"),
    "--clip-grad": ("1.0", "0.5"),
    "--train-iters": ("1", "2"),
    "--init-method-std": ("0.02", "0.03"),
    "--adam-eps": ("1e-08", "1e-06"),
    "--log-interval": ("2", "3"),
}


@pytest.mark.parametrize("flag", SETTINGS)
def test_a_setting_that_differs_is_named_with_both_values(gloo_pool, tmp_path, flag):
    layout = random.Random(flag).choice(list(LAYOUTS.values()))
    flags = [[*MOCK, *layout, flag, value] for value in SETTINGS[flag]]
    first, second = SETTINGS[flag]
    results = gloo_pool.run(run_in_folder, 2, [str(tmp_path)] * 2, flags)
    refused(results, rf"{flag}: {first} on rank 0 \(.+\), {second} on rank 1 \(.+\); {FIX}")


def test_a_yaml_file_with_another_value_on_one_host_is_named_by_its_flag(gloo_pool, tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, value in zip(folders, (0.1, 0.3)):
        folder.mkdir()
        (folder / "run.yaml").write_text(f"attention_dropout: {value}\n")
    argv = [*MOCK, "--yaml-cfg", "run.yaml"]
    refused(gloo_pool.run(run_in_folder, 2, list(map(str, folders)), [argv, argv]),
            "--attention-dropout: 0.1 on rank 0 .*, 0.3 on rank 1")  # fmt: skip


def test_another_layout_on_one_rank_is_named_before_process_groups_are_created(gloo_pool, tmp_path):
    flags = [[*MOCK, *LAYOUTS["tensor"]], [*MOCK, *LAYOUTS["pipeline"]]]
    refused(gloo_pool.run(run_in_folder, 2, [str(tmp_path)] * 2, flags),
            "--tensor-model-parallel-size: 2 on rank 0 .*, 1 on rank 1",
            "--pipeline-model-parallel-size: 1 on rank 0 .*, 2 on rank 1")  # fmt: skip


def scaled_forward(self, x):
    return 1.5 * x, None


PATCHES = {
    "megatron.core.transformer.mlp.MLP.forward": (
        scaled_forward, r"functions of megatron\.core\.transformer\.mlp: rank 2 .* and rank 0 .* have different"),
    "NVIDIA_TF32_OVERRIDE": ("1", r"environment variable NVIDIA_TF32_OVERRIDE: unset on rank 0 .*, 1 on rank 2"),
    "NVTE_FUSED_ATTN": ("0", r"environment variable NVTE_FUSED_ATTN: unset on rank 0 .*, 0 on rank 2"),
    "megatron.training.checks.rank_agreement.__version__": ("9.9", "megatron: 0.1.0 on rank 0 .*, 9.9 on rank 2"),
}  # fmt: skip


@pytest.mark.parametrize("target", PATCHES)
def test_other_code_and_environment_on_one_rank_of_three_is_named(gloo_pool, target):
    value, text = PATCHES[target]
    argv = [*MOCK, "--global-batch-size", "6"]
    refused(gloo_pool.run(run_patched, 3, {target: value}, argv), text, "every host")


def test_a_source_file_with_another_line_is_named(tmp_path, monkeypatch):
    shutil.copytree(rank_agreement.ROOT / "megatron" / "core" / "schedules", tmp_path / "megatron" / "schedules")
    monkeypatch.setattr(rank_agreement, "ROOT", tmp_path)
    before = rank_agreement._sources.__wrapped__()
    with (tmp_path / "megatron" / "schedules" / "batch_size.py").open("a") as file:
        file.write("\n# another line\n")
    after = rank_agreement._sources.__wrapped__()
    assert {name for name in before if before[name] != after[name]} == {"megatron/schedules/batch_size.py"}


def test_one_rank_compares_nothing(monkeypatch):
    monkeypatch.setattr(rank_agreement, "all_gather_json", None)
    rank_agreement.check_settings(parse_args([*MODEL_FLAGS, "--mock-data"]).flat)
    rank_agreement.check_data(["missing"], [], None, Group("world"))


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000, 3_000_000])
def test_a_file_digest_finds_another_size_beginning_end_and_most_contents(tmp_path, size):
    path, generator = tmp_path / "x.bin", np.random.default_rng(size)
    content = generator.integers(0, 256, size, dtype=np.uint8)
    content.tofile(path)
    first = rank_agreement.file_digest(str(path), 64)
    assert first == rank_agreement.file_digest(str(path), 64)
    for position in {0, size - 1} if size else ():
        other = content.copy()
        other[position] ^= 1
        other.tofile(path)
        assert rank_agreement.file_digest(str(path), 64) != first
    generator.integers(0, 256, size + 1, dtype=np.uint8).tofile(path)
    assert rank_agreement.file_digest(str(path), 64) != first


def test_sampled_blocks_of_zeros_have_another_digest_in_another_size(tmp_path):
    digests = []
    for size in (2**40, 2**41):  # sparse files: few of their blocks are read
        with open(tmp_path / "zeros.bin", "wb") as file:
            file.truncate(size)
        digests.append(rank_agreement.file_digest(str(tmp_path / "zeros.bin"), 64))
    assert digests[0] != digests[1]


def test_code_digests_do_not_depend_on_the_process_but_on_every_constant():
    def digest_of(source):
        return rank_agreement._bytecode.__wrapped__(compile(source, "file", "exec"))

    assert digest_of("x in {'a', 'b', 'c'}") == digest_of("\n\nx in {'c', 'b', 'a'}")
    assert digest_of("def f(): return 1.0") != digest_of("def f(): return 1.5")
    assert digest_of("a + b") != digest_of("a - b")


def test_functions_that_triton_adds_to_a_module_do_not_change_its_digest():
    """Its interpreter copies its own names into the module of a kernel, on the ranks that have run one."""
    module = ModuleType("a_module_of_kernels")
    exec("def loss(x): return x + 1", module.__dict__)
    first = rank_agreement._functions_digest(module)
    module.dataclass = dataclasses.dataclass
    exec("def patched(x): return x", {"__name__": "triton.runtime.interpreter"}, added := {})
    vars(module).update(added)
    assert rank_agreement._functions_digest(module) == first
    exec("def loss(x): return x + 2", module.__dict__)
    assert rank_agreement._functions_digest(module) != first


def test_every_function_that_the_interpreter_of_this_suite_adds_counts_as_one_of_triton():
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    from tests.test_utils import interpreter as faster  # noqa: F401  replaces one of them

    functions = {name: member for name, member in vars(interpreter).items() if type(member) is FunctionType}
    assert "_patch_lang" in functions
    for name, function in functions.items():
        assert function.__module__.partition(".")[0] in rank_agreement.ADDED, name


@pytest.mark.parametrize("wrapper", ["", "@property", "@staticmethod", "@classmethod"])
def test_module_digests_depend_on_methods_of_every_kind(wrapper):
    def digest_of(value):
        module = ModuleType("a_module_of_methods")
        exec(f"class A:\n {wrapper}\n def f(*x): return {value}", module.__dict__)
        return rank_agreement._functions_digest(module)

    assert digest_of("1.0") == digest_of("1.0") != digest_of("1.5")
