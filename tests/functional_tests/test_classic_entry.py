"""A third-party entry script runs as it is, and equals the suite's own where it computes the same."""

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.test_utils import masked_runs
from tests.test_utils.entry_scripts import run_script
from tests.test_utils.gpt_runs import MODEL_FLAGS, losses, read_records, train, write_dataset

ROOT = Path(__file__).resolve().parents[2]


NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
"""Without dropout, a script's loss equals the built-in task's."""


@pytest.fixture(scope="module")
def launch(warm_python):
    """``launch(script, argv, ranks=1)``: start a script in separate processes; return its standard output."""
    return partial(_launch, warm_python)


@pytest.fixture(scope="module")
def launch_failing(warm_python):
    """``launch_failing(script, argv)``: the finished process."""
    return partial(_start, warm_python)


def _launch(python, script, argv, ranks=1):
    result = _start(python, script, argv, ranks)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _start(python, script, argv, ranks=1):
    launcher = [python] if ranks == 1 else [
        python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        launcher + [script] + MODEL_FLAGS + argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )  # fmt: skip


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    dataset = write_dataset(tmp_path_factory.mktemp("data") / "numbers")
    return ["--data-path", str(dataset), "--split", "80,10,10", "--train-iters", "4"]


@pytest.fixture(scope="module")
def builtin_losses(gloo_pool, flags, tmp_path_factory):
    """The suite's own losses, with a vocabulary as large as what the scripts build, so that the sums agree."""
    folder = tmp_path_factory.mktemp("own")
    gloo_pool.run(train, 1, flags + NO_DROPOUT + ["--save", str(folder), "--make-vocab-size-divisible-by", "64"])
    return losses(folder)


def test_example_script_trains_like_the_program(launch, flags, builtin_losses, tmp_path):
    argv = flags + NO_DROPOUT + ["--label_smoothing=0", "--save", str(tmp_path)]
    output = launch("examples/pretrain_custom_gpt.py", argv, ranks=2)
    assert "building a GPT model of this script's own" in output
    np.testing.assert_allclose(losses(tmp_path), builtin_losses, rtol=2e-5)


EXPERTS = ["--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "2"]
"""The script passes no loss mask to the model."""


@pytest.mark.parametrize(
    "script, ranks, more",
    [
        ("2024", 2, []),
        ("2025", 2, ["--reset-attention-mask", "--reset-position-ids"]),
        ("2025", 1, ["--old-loss"]),
        ("2024", 2, EXPERTS),
    ],
    ids=["2024", "2025", "old-loss", "experts"],
)
def test_scripts_of_earlier_years_run_as_they_are(
    launch, flags, builtin_losses, tmp_path, gloo_pool, script, ranks, more
):
    argv = flags + NO_DROPOUT + ["--make-vocab-size-divisible-by", "64", "--save", str(tmp_path / "script")]
    launch(f"tests/functional_tests/scripts/pretrain_classic_{script}.py", argv + more, ranks)
    if more and more != ["--old-loss"]:
        gloo_pool.run(train, 1, argv[:-1] + [str(tmp_path / "own")] + more)
        builtin_losses = losses(tmp_path / "own")
    np.testing.assert_allclose(losses(tmp_path / "script"), builtin_losses, rtol=2e-5)


@pytest.mark.parametrize("more", [[], ["--old-loss"]], ids=["sum", "mean"])
def test_scripts_train_prediction_depths_with_both_loss_functions(launch, flags, tmp_path, gloo_pool, more):
    """No token is masked, so that a mean of micro-batches' means is that over all tokens."""
    argv = [*flags, *NO_DROPOUT, "--make-vocab-size-divisible-by", "64", "--mtp-num-layers", "2"]
    script = "tests/functional_tests/scripts/pretrain_classic_2025.py"
    launch(script, [*argv, *more, "--save", str(tmp_path / "script")])
    gloo_pool.run(train, 1, [*argv, "--save", str(tmp_path / "own")])
    np.testing.assert_allclose(losses(tmp_path / "script"), losses(tmp_path / "own"), rtol=2e-5)
    assert "mtp_2 loss" in (tmp_path / "script/metrics.jsonl").read_text()


def test_a_script_with_dropout_resumes_bit_for_bit(launch, flags, tmp_path):
    """Although it does not know of the sample indices that dropout masks depend on."""
    script = "tests/functional_tests/scripts/pretrain_classic_2024.py"
    full, parts = (flags + ["--save", str(tmp_path / name), "--seed", "5"] for name in ("whole", "parts"))
    launch(script, full)
    launch(script, parts + ["--exit-interval", "2"])
    launch(script, parts + ["--load", str(tmp_path / "parts")])
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()


TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
LAYOUTS = {
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "tp2-pp2": (4, TP2 + PP2),
    "pp4": (4, ["--pipeline-model-parallel-size", "4"]),
    "pp2-vpp2-tp2": (4, TP2 + PP2 + ["--num-layers-per-virtual-pipeline-stage", "1"]),
}
"""World sizes and flags."""

DOCUMENTS = ["--reset-attention-mask", "--reset-position-ids"]
SHORT = ["--train-iters", "2", "--log-interval", "1", "--lr-warmup-iters", "0", "--eval-iters", "1"]
HARD = [*DOCUMENTS, "--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "2"]
"""Every rank must know document boundaries and which tokens count, and with dropout the sample indices."""


def evaluations(folder):
    return [record["lm loss"] for record in read_records(folder / "metrics.jsonl") if record["kind"] != "train"]


def check_script(gloo_pool, folder, script, layout, argv, local):
    """A script in a layout has the training and evaluation losses of the run in ``own``."""
    world_size, flags = LAYOUTS[layout]
    assert set(gloo_pool.run(run_script, world_size, script, [*argv, *flags, "--save", str(folder)])) == {0}
    np.testing.assert_allclose(losses(folder), losses(local), rtol=2e-5)
    np.testing.assert_allclose(evaluations(folder), evaluations(local), rtol=2e-5)


@pytest.fixture(scope="module")
def builtin_hard_run(gloo_pool, flags, tmp_path_factory):
    """Flags of a model with four layers, and the folder of the built-in program's run with them on one rank."""
    folder = tmp_path_factory.mktemp("hard")
    argv = [*flags, *HARD, "--num-layers", "4", "--make-vocab-size-divisible-by", "64", *SHORT]
    gloo_pool.run(train, 1, [*argv, "--save", str(folder)])
    return argv, folder


@pytest.mark.parametrize(
    "script, layout",
    [("2024", "pp4"), ("2024", "pp2-vpp2-tp2"), ("2025", "tp2-pp2"), ("2026", "pp4"), ("2026", "pp2-vpp2-tp2")],
)
def test_scripts_that_read_data_on_some_ranks_match_our_program(gloo_pool, builtin_hard_run, tmp_path, script, layout):
    """They build data on the first tensor-parallel rank of the outer pipeline stages and give middle stages nothing."""
    argv, local = builtin_hard_run
    check_script(gloo_pool, tmp_path, f"pretrain_classic_{script}", layout, argv, local)


def test_model_provider_passed_with_parsed_settings_is_used(gloo_pool, builtin_hard_run, tmp_path):
    argv, local = builtin_hard_run
    check_script(gloo_pool, tmp_path, "pretrain_classic_2026", "tp2-pp2", [*argv, "--own-model"], local)


def test_settings_that_a_script_assigns_after_parsing_hold(gloo_pool, flags, tmp_path):
    script, argv = "pretrain_classic_2026", [*flags, "--mtp-num-layers", "1", "--train-iters", "3"]
    for name, more in {"flag": ["--seed", "7"], "assigned": ["--changed-seed", "7"], "default": []}.items():
        folder = ["--save", str(tmp_path / name)]
        assert gloo_pool.run(run_script, 1, script, [*argv, *more, *folder]) == [0]
    assert losses(tmp_path / "assigned") == losses(tmp_path / "flag") != losses(tmp_path / "default")


def test_wrong_flags_of_a_script_end_in_one_message(launch_failing):
    for script in ("2025", "2026"):
        result = launch_failing(f"tests/functional_tests/scripts/pretrain_classic_{script}.py", ["--num-layerz", "2"])
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert "--num-layerz" in result.stderr and "--num-layers" in result.stderr


@pytest.mark.parametrize("layout", ["pp4", "tp2-pp2"])
def test_data_sets_that_only_some_ranks_hold_are_shared(gloo_pool, tmp_path, layout):
    argv = ["--num-layers", "4", *SHORT, "--num-experts", "4", "--moe-ffn-hidden-size", "32"]
    everywhere = tmp_path / "everywhere"
    gloo_pool.run(run_script, 1, "pretrain_own_data", [*argv, "--data-on-every-rank", "--save", str(everywhere)])
    check_script(gloo_pool, tmp_path / "some", "pretrain_own_data", layout, argv, everywhere)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "pp2-vpp2-tp2"])
def test_program_with_a_custom_loop_gets_the_same_model_on_every_layout(gloo_pool, tmp_path, layout):
    argv = ["--mock-data", *NO_DROPOUT, "--num-layers", "4", "--make-vocab-size-divisible-by", "64"]
    results = []
    for number, (world_size, more) in enumerate([(1, []), LAYOUTS[layout]]):
        path = tmp_path / f"{number}.json"
        assert set(gloo_pool.run(run_script, world_size, "own_loop", [*argv, *more, "--result", str(path)])) == {0}
        results.append(json.loads(path.read_text()))
    one, several = results
    assert one["loss"] == pytest.approx(several["loss"], rel=2e-5) == pytest.approx(np.log(64), rel=0.05)
    assert one["norm"] == pytest.approx(several["norm"], rel=2e-5) and one["norm"] > 0
    assert one["wrapped"] == several["wrapped"] == [True, False], "wrap_with_ddp"
    assert several["chunks"] == (2 if "vpp" in layout else 1)


MASKED = ["--hidden-size", "32", "--num-attention-heads", "4", "--max-position-embeddings", "44", "--num-layers", "2",
          "--micro-batch-size", "4", "--global-batch-size", "4", "--train-iters", "4", "--lr", "5e-3", "--eval-iters",
          "1", "--seq-length", "32", "--split", "80,10,10", "--log-interval", "1", "--num-workers", "0"]  # fmt: skip
FAMILIES = {
    "bert": ["--make-vocab-size-divisible-by", "61", "--vocab-size", "61"],
    "t5": ["--decoder-num-layers", "2", "--decoder-seq-length", "20", "--vocab-extra-ids", "30",
           "--make-vocab-size-divisible-by", "91", "--vocab-size", "91"],
}  # fmt: skip


@pytest.fixture(scope="module")
def builtin_masked_runs(gloo_pool, tmp_path_factory):
    """Flags of BERT and T5, and the folders of the built-in programs' runs with them on one rank."""
    folder = tmp_path_factory.mktemp("masked")
    masked_runs.write_corpora(folder)
    data = ["--data-path", str(folder / "a"), "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file",
            str(folder / "vocab.txt")]  # fmt: skip
    runs = {}
    for family, more in FAMILIES.items():
        argv = [*MASKED, *more, *data]
        gloo_pool.run(train, 1, [*argv, "--save", str(folder / family)], False, family)
        runs[family] = argv, folder / family
    return runs


@pytest.mark.parametrize(
    "family, layout, more",
    [
        ("bert", "tp2-pp2", []), ("bert", "pp2", ["--local-layers"]), ("t5", "tp2", ["--local-layers"]),
        ("t5", "tp2", ["--masks-of-2024"]), ("t5", None, []),
    ],
)  # fmt: skip
def test_masked_scripts_match_our_programs(gloo_pool, builtin_masked_runs, tmp_path, family, layout, more):
    """One micro-batch is the global batch: the scripts' BERT loss is a mean of micro-batches' means."""
    argv, local = builtin_masked_runs[family]
    world_size, flags = LAYOUTS.get(layout, (1, []))
    argv = [*argv, *flags, *more, "--save", str(tmp_path)]
    assert set(gloo_pool.run(run_script, world_size, "pretrain_classic_masked", argv)) == {0}
    for name in ("lm loss", "sop loss")[: 2 if family == "bert" else 1]:
        actual, expected = (
            [record[name] for record in read_records(folder / "metrics.jsonl") if name in record]
            for folder in (tmp_path, local)
        )
        assert len(actual) == 6
        np.testing.assert_allclose(actual, expected, rtol=2e-5)
