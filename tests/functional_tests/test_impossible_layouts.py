"""Impossible layouts are rejected with every reason before any process group exists; accepted layouts can be built."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.groups.process_groups import RankGrid
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.report.pipeline import run_stages
from megatron.training.rules.run_all import check
from tests.test_utils.layouts import MODEL, VOCAB_SIZE

ROOT = Path(__file__).resolve().parents[2]


def problems(flags, world_size):
    cfg = resolve(parse_args([*MODEL, *flags.split()], needs_data=False), world_size)
    return cfg, [str(item) for item in check(cfg)]


@pytest.mark.parametrize(
    ("flags", "world_size", "reasons"),
    [
        (
            "--micro-batch-size 3 --tensor-model-parallel-size 3 --context-parallel-size 5", 7,
            ["world size 7: TP 3 x PP 1 x CP 5 = 15", "--num-attention-heads 4: is not a multiple", "nearest: 3 or 6",
             "--seq-length 32: is not a multiple of 2 x --context-parallel-size 5", "nearest: 30 or 40"],
        ),
        (
            "--micro-batch-size 1 --pipeline-model-parallel-size 8 --recompute-granularity full"
            " --overlap-param-gather", 8,
            ["--num-layers 4: 4 layers cannot fill 8 pipeline stages", "--recompute-method", "--overlap-param-gather"],
        ),
        (
            "--micro-batch-size 1 --tensor-model-parallel-size 2 --distribute-saved-activations --use-torch-fsdp2"
            " --ddp-bucket-size 1000 --num-distributed-optimizer-instances 3", 4,
            ["--distribute-saved-activations", "--ddp-bucket-size 1000", "--num-distributed-optimizer-instances 3"],
        ),
        ("--micro-batch-size 3", 2, ["--global-batch-size 8", "6", "12"]),
    ],
)  # fmt: skip
def test_all_reasons_come_at_once_with_sizes_that_fit(flags, world_size, reasons):
    text = "\n".join(problems(flags, world_size)[1])
    for reason in reasons:
        assert reason in text, text


def test_a_rejected_rank_never_looks_for_the_others():
    """No launcher listens at the address; a rank that tried to connect would wait for it."""
    flags = "--micro-batch-size 1 --tensor-model-parallel-size 3 --pipeline-model-parallel-size 9 --mock-data"
    place = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    program = [sys.executable, "pretrain_gpt.py", *MODEL, *flags.split(), "--tokenizer-type", "NullTokenizer"]
    result = subprocess.run(
        [*program, "--vocab-size", str(VOCAB_SIZE)], cwd=ROOT, env={**os.environ, **place}, capture_output=True,
        text=True, timeout=30,
    )  # fmt: skip
    assert result.returncode == 2
    assert "--num-attention-heads" in result.stderr and "--num-layers" in result.stderr


CHOICES = {
    "--tensor-model-parallel-size": [1, 2, 3, 4],
    "--pipeline-model-parallel-size": [1, 2, 3, 4],
    "--context-parallel-size": [1, 2, 3],
    "--num-virtual-stages-per-pipeline-rank": [None, 2, 3],
    "--decoder-first-pipeline-num-layers": [None, None, 1, 2],
    "--micro-batch-size": [1, 2],
    "--num-layers": [1, 3, 4, 7, 12],
    "--pipeline-schedule": [None, "1f1b", "zero-bubble"],
}
SWITCHES = ["--sequence-parallel", "--use-distributed-optimizer", "--account-for-loss-in-pipeline-split"]


def test_accepted_layouts_have_a_grid_and_stages_of_all_layers():
    """Random layouts: each is rejected with a reason, or its grid and stages exist and hold all layers."""
    generator = random.Random(0)
    accepted = 0
    for _ in range(800):
        drawn = {flag: generator.choice(values) for flag, values in CHOICES.items()}
        words = [f"{flag} {value}" for flag, value in drawn.items() if value is not None]
        words += [switch for switch in SWITCHES if generator.random() < 0.3]
        world_size = generator.choice([1, 2, 4, 6, 8, 12, 16, 24])
        cfg, actual = problems(" ".join(words), world_size)
        if actual:
            continue
        accepted += 1
        model = cfg.model
        tp, cp, pp = model.tensor_model_parallel_size, model.context_parallel_size, model.pipeline_model_parallel_size
        assert RankGrid.from_world(world_size, tp=tp, cp=cp, pp=pp).dp == cfg.data_parallel_size
        stages = run_stages(cfg, VOCAB_SIZE)
        assert [branch for stage in stages for branch in stage.branches] == list(range(2 * cfg.model.num_layers))
    assert accepted > 30
