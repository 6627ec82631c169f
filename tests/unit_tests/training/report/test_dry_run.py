"""``--dry-run`` reports sizes and schedule without torch, exactly if possible."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.cli import ConfigError
from megatron.core.pipeline_parallel.simulate import peak_activations
from megatron.data.indexed_dataset import DType
from megatron.data.indexed_writer import IndexedDatasetBuilder
from megatron.training.arguments import flag_specs, parse_args, validate_args
from megatron.training.report.dry_run import dry_run_report, known_vocab_size, preflight
from megatron.training.report.pipeline import (
    bubble_fraction,
    count_microbatches,
    enough_microbatches,
    run_schedule,
    simulated_timeline,
)

ROOT = Path(__file__).resolve().parents[4]
TINY = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 48 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
FOLDERS = ("save", "data_cache_path", "tensorboard_dir", "wandb_save_dir")


def settings(text="", world_size=1):
    return validate_args(parse_args((TINY + " " + text).split()), world_size)


def test_gpt2_and_llama_have_their_known_sizes():
    gpt2 = (
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
        "--vocab-size 50257 --make-vocab-size-divisible-by 1"
    )
    assert settings(gpt2).describe(50257).num_parameters == 124_439_808
    llama = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
        "--ffn-hidden-size 14336 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --vocab-size 128256"
    )
    assert settings(llama).describe(128256).num_parameters == 8_030_261_248


def test_report_names_layout_batches_and_schedule():
    report = dry_run_report(
        settings("--global-batch-size 16 --rampup-batch-size 8 8 32 --bf16 --dry-run --eval-global-batch-size 12", 2)
    )
    for part in (
        "2 = tensor 1 x pipeline 1 x context 1 x data 2",
        "from sample 0              8 sequences = 2 x 2 ranks x 2 micro-batches, 256 tokens",
        "from sample 32             16 sequences",
        "100 (--vocab-size), padded to 128",
        "GiB per rank",
        "evaluation                 100 batches of 12, only after training",
        "linear, 0 -> 0.001 -> 0",
    ):
        assert part in report, report


def test_report_states_flops_and_memory_of_an_iteration():
    """A dense parameter of a GEMM counts 6 FLOPs per token, half of the s x s scores 6 s h."""
    text = "--global-batch-size 16 --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 1000"
    text += " --rampup-batch-size 8 8 32 --tensor-model-parallel-size 2"
    (row,) = (row for row in dry_run_report(settings(text, 4)).splitlines() if "computation" in row)
    per_token = 6 * (3 * 12 * 64 * 64 + 64 * 1000) + 3 * 6 * 32 * 64
    per_rank = per_token * 32 * 16 / 4
    assert row.split() == f"computation {per_token:.4g} FLOPs per token, {per_rank:.4g} per rank and iteration".split()


def test_report_of_experts_counts_their_ranks_and_active_parameters():
    text = (
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 40 --moe-shared-expert-intermediate-size 24"
        " --dry-run --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 2"
        " --expert-tensor-parallel-size 2 --swiglu --disable-bias-linear"
    )
    cfg = settings(text, 8)
    report, model = dry_run_report(cfg), cfg.describe(100)
    idle = cfg.model.num_layers * (8 - 2) * 3 * 64 * 40
    assert model.num_active_parameters == model.num_parameters - idle
    for part in (
        "8 = tensor 4 x pipeline 1 x context 1 x data 2",
        "ranks of experts           8 = tensor 2 x expert 2 x pipeline 1 x data 2",
        "experts                    8 of width 40, 2 per token, and a shared one of width 24",
        f"parameters                 {model.num_parameters:,}, of which",
        f"active parameters          {model.num_parameters - idle:,} per token",
    ):
        assert part in report, report


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_report_shows_the_learning_rate_at_quarters_of_the_decay(style):
    """Warm-up of 2 of 10 iterations with 4 samples each; the decay starts after it."""
    text = f"--lr-decay-style {style} --lr-warmup-iters 2 --min-lr 1e-4 --global-batch-size 4"
    rows = re.findall(r"at sample ([\d,]+) +(\S+)", dry_run_report(settings(text, 2)))
    assert [int(sample.replace(",", "")) for sample, _ in rows] == [0, 10, 20, 30, 40]
    for sample, rate in rows:
        finished = (int(sample) - 8) / 32
        share = 1 - finished if style == "linear" else 0.5 * (1 + math.cos(math.pi * finished))
        assert float(rate) == pytest.approx(1e-3 * int(sample) / 8 if finished < 0 else 1e-4 + 9e-4 * share, rel=1e-5)


def test_report_names_every_axis_and_size_of_the_model():
    text = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --context-parallel-size 2 --ffn-hidden-size 96"
        " --group-query-attention --num-query-groups 2"
    )
    report = dry_run_report(settings(text, 48))
    for part in (
        "48 = tensor 2 x pipeline 3 x context 2 x data 4\n",
        "3 layers, width 64, feed-forward 96, 4 heads of 16, 2 key-value groups\n",
    ):
        assert part in report, report


def test_report_counts_samples_tokens_and_parameters_of_layers():
    """Norms with biases (256), attention 4 h^2, then 2 h f of a dense layer, or a router and experts."""
    text = (
        "--global-batch-size 4 --lr-warmup-iters 2 --lr-decay-iters 8 --start-weight-decay 0.02 --end-weight-decay 0.3"
        " --weight-decay-incr-style linear --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 40"
        " --moe-layer-freq [1,0,1]"
    )
    rows = {line[2:28].strip(): line[28:].strip() for line in dry_run_report(settings(text, 2)).splitlines()}
    assert rows["samples"] == "8 of warm-up, 32 until the minimum"
    assert rows["weight decay"] == "0.02 -> 0.3 (linear)"
    assert rows["training"] == "10 iterations, 40 sequences, 1,280 tokens"
    dense, experts = (256 + 4 * 64**2 + rest for rest in (2 * 64 * 256, 4 * (64 + 2 * 64 * 40)))
    assert f" of which {experts:,} to {dense:,} per layer" in rows["parameters"]


@pytest.mark.parametrize("parts, name", [((), ""), (("norm", "adam"), ", apex: norm adam")])
def test_report_names_the_backends(parts, name):
    report = dry_run_report(settings().with_settings(apex_parts=parts))
    (row,) = (line for line in report.splitlines() if line.startswith("  backend"))
    assert row.split(maxsplit=1)[1] == f"gloo, layers: local, attention: auto{name}"


def test_vocabulary_is_counted_from_files(tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({"a": 0, "b": 1}))
    cfg = parse_args(TINY.split()).with_settings(vocab_size=None, vocab_file=str(path))
    assert known_vocab_size(cfg.tokenizer) == (2, str(path))
    path = tmp_path / "vocab.txt"
    path.write_text("a\nb\nc\n")
    assert known_vocab_size(cfg.with_settings(vocab_file=str(path)).tokenizer)[0] == 3
    assert known_vocab_size(cfg.with_settings(vocab_file=None).tokenizer)[0] is None
    assert known_vocab_size(cfg.with_settings(vocab_file=None, tokenizer_type="ByteLevelTokenizer").tokenizer)[0] == 257


def test_report_is_made_for_evaluation_and_unknown_vocabularies(tmp_path):
    cfg = settings("--skip-train --dry-run")
    assert "nothing is trained" in dry_run_report(cfg)
    model = tmp_path / "tokenizer.model"
    cfg = cfg.with_settings(vocab_size=None, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model))
    report = dry_run_report(cfg)
    assert "without the embedding" in report and "computation" not in report


@pytest.mark.parametrize(("text", "world_size"), [("", 4), ("--dry-run-world-size 64", 64)])
def test_assumed_ranks_are_the_launchers_or_given(text, world_size):
    assert settings("--dry-run " + text, 4).world_size == world_size


def test_dry_run_needs_no_torch():
    program = (
        "import sys\n"
        "from megatron.training.arguments import parse_args, validate_args\n"
        "from megatron.training.report.dry_run import dry_run_report\n"
        f"print(dry_run_report(validate_args(parse_args({TINY.split()!r} + ['--dry-run']), 1)))\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0 and "parameters" in result.stdout, result.stderr


def test_preflight_answers_a_dry_run_and_rejects_contradictions(capsys):
    assert not preflight(parse_args(TINY.split()))
    assert not preflight(parse_args(["--use-checkpoint-args", "--load", "x"]))
    assert capsys.readouterr().out == ""
    assert preflight(parse_args((TINY + " --dry-run").split()))
    assert capsys.readouterr().out.startswith("layout")
    with pytest.raises(ConfigError, match="--num-layers: is required"):
        preflight(parse_args([]))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--squared-relu --qk-layernorm --tokenizer-type NullTokenizer",
        "--add-qkv-bias --disable-bias-linear --untie-embeddings-and-output-weights --quick-geglu --kv-channels 8",
        "--swiglu --disable-bias-linear --normalization RMSNorm --group-query-attention --num-query-groups 2 "
        "--qk-layernorm --position-embedding-type rope",
        "--num-experts 4 --moe-layer-freq [0,1,1] --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate",
    ],
)
def test_counted_parameters_are_those_of_the_model(text):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from tests.test_utils.specs import unique_parameter_count

    cfg = settings(text)
    config = cfg.model
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config),
        vocab_size=cfg.tokenizer.vocab_size,
        max_sequence_length=cfg.embeddings.max_position_embeddings,
        position_embedding_type=cfg.embeddings.position_embedding_type,
        share_embeddings_and_output_weights=not cfg.embeddings.untie_embeddings_and_output_weights,
    )
    described = cfg.describe(cfg.tokenizer.vocab_size)
    stored = described.num_parameters + described.padding
    assert sum(parameter.numel() for parameter in model.parameters()) == stored
    assert unique_parameter_count(model) == described.num_parameters


def test_report_counts_parameters_like_the_self_check_and_states_padding():
    report = dry_run_report(settings("--vocab-size 1001 --tensor-model-parallel-size 2 --dry-run", 2))
    number = settings("--vocab-size 1001", 1).describe(1001).num_parameters
    assert f"{number:,}, of which" in report and f"{(1024 - 1001) * 64:,} more of padding" in report


@pytest.mark.parametrize(("text", "order"), [("", "data, pipeline"), ("--use-tp-pp-dp-mapping", "pipeline, data")])
def test_report_says_the_order_of_ranks(text, order):
    assert f"tensor, context, expert, {order} (fastest first)" in dry_run_report(settings(text + " --dry-run"))


def test_buffers_are_estimated_without_a_vocabulary(tmp_path):
    text = (
        "--dry-run --use-distributed-optimizer --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 "
        "--num-layers 4 --num-layers-per-virtual-pipeline-stage 2"
    )
    cfg = settings(text).with_settings(vocab_size=None, tokenizer_type="HuggingFaceTokenizer",
                              tokenizer_model=str(tmp_path / "tokenizer.model"))  # fmt: skip
    assert "GiB per rank" in dry_run_report(cfg)


@pytest.mark.parametrize(
    "text",
    [
        "", "--num-virtual-stages-per-pipeline-rank 2", "--pipeline-schedule zero-bubble",
        "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 6",
        "--pipeline-schedule zero-bubble-h2",
    ],
)  # fmt: skip
def test_long_schedules_are_judged_by_their_beginning_middle_and_end(text):
    """The peaks of all micro-batches, and their bubble."""
    text = f"--pipeline-model-parallel-size 4 --num-layers 16 --global-batch-size 206 --dry-run {text}"
    cfg = settings(text)
    number, few = count_microbatches(cfg), enough_microbatches(cfg)
    assert number == 103 and few < 60
    assert peak_activations(run_schedule(cfg, few)) == peak_activations(run_schedule(cfg, number))
    assert bubble_fraction(cfg, 100) == pytest.approx(simulated_timeline(cfg, number, 100).bubble, abs=2e-3)


def test_a_global_batch_of_millions_is_not_simulated():
    cfg = settings("--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 4194304 --dry-run")
    assert enough_microbatches(cfg) < 10 and "2097152 micro-batches" in dry_run_report(cfg)


def test_a_dry_run_writes_nothing_at_all(tmp_path, monkeypatch, capsys):
    """It creates no folder that flags name, and no file next to the data."""
    monkeypatch.chdir(tmp_path)
    data = Path("text_document")
    with IndexedDatasetBuilder(f"{data}.bin", dtype=DType.optimal_dtype(99)) as builder:
        builder.add_document(np.arange(99), [99])
        builder.finalize(f"{data}.idx")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    folders = [spec.names[0] for spec in flag_specs() if spec.field in FOLDERS]
    assert len(folders) == len(FOLDERS)
    flags = [*TINY.replace("--mock-data", f"--data-path {data}").split(), "--split", "8,1,1", "--dry-run"]
    for flag in folders:
        flags += [flag, f"new/{flag.strip('-')}"]
    assert preflight(parse_args(flags)) and "nothing was started" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("flags, row", [
    ("--pretrained-checkpoint missing", r"--pretrained-checkpoint missing +there is no such folder"),
    ("--load missing --exit-on-missing-checkpoint", r"--load missing +there is no such folder"),
    ("--save file/run", r"--save file/run +.*file is no folder"),
])  # fmt: skip
def test_folders_that_a_run_here_cannot_use_are_reported(tmp_path, monkeypatch, flags, row):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    report = dry_run_report(settings(f"{flags} --dry-run", 1))
    section = report[report.index("missing on this machine\n") :]
    assert re.search(row, section), report
    assert report.endswith(
        'the settings are consistent, but a run here would fail, see "missing on this machine"; nothing was started\n'
    )


def test_a_save_folder_in_a_folder_without_permission_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    report = dry_run_report(settings(f"--save {tmp_path}/run --dry-run", 1))
    assert re.search(rf"--save {tmp_path}/run +{tmp_path} cannot be written", report)


def test_a_run_that_can_start_here_is_consistent(tmp_path):
    report = dry_run_report(settings(f"--save {tmp_path}/new/run --load {tmp_path} --dry-run", 1))
    assert "missing on this machine" not in report
    assert report.endswith("the settings are consistent; nothing was started\n")
