"""muP in training: every layout equals one rank; resuming changes no bit; another base width is rejected."""

import pytest
import torch

from megatron.console import run_tool
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.test_utils.gpt_runs import train, train_with_errors
from tests.test_utils.layouts import FEW_STEPS, VOCAB_SIZE, Layout

TP2, PP2 = (f"--{axis}-model-parallel-size 2" for axis in ("tensor", "pipeline"))
MUP = "--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 2 --hidden-dropout 0.1"
UNTIED, EXPERTS = f"{MUP} --untie-embeddings-and-output-weights --adam-eps 1e-4", "--num-experts 4 --moe-router-topk 2"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ROWS = {
    "TP 2 + SP": (UNTIED, f"{TP2} --sequence-parallel --micro-batch-size 4", 2),
    "PP 2, tied": (f"{MUP} --adam-eps 1e-4", f"{PP2} --micro-batch-size 2", 2),
    "DP 2, ZeRO-1": (UNTIED, f"{ZERO} --micro-batch-size 2", 2),
    "FSDP2": (UNTIED, "--use-torch-fsdp2 --micro-batch-size 4", 2),
    "EP 2": (f"{UNTIED} {EXPERTS}", "--expert-model-parallel-size 2 --micro-batch-size 4", 2),
    "SGD, TP 2": (f"{MUP} --optimizer sgd --sgd-momentum 0.9", f"{TP2} --micro-batch-size 4", 2),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_layout_equals_one_rank(matrix, name):
    verdict = matrix.verdict(Layout(*ROWS[name], steps=FEW_STEPS))
    assert verdict.equal, verdict.first


RUN = [
    "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE), "--train-iters", "4",
    "--save-interval", "2", "--micro-batch-size", "2",
]  # fmt: skip


def run(gloo_pool, folder, *flags):
    argv = [*RUN, *UNTIED.split(), "--save", str(folder), *map(str, flags)]
    assert gloo_pool.run(train, 1, argv, True) == [0]


def test_resuming_changes_no_bit_and_another_base_width_is_rejected(gloo_pool, tmp_path, capsys):
    complete, parts = tmp_path / "complete", tmp_path / "parts"
    run(gloo_pool, complete)
    run(gloo_pool, parts, "--exit-interval", 2)
    with pytest.raises(CheckpointError):
        CheckpointReader(parts / "iter_0000004")
    run(gloo_pool, parts, "--load", parts)
    assert (complete / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    expected, resumed = (CheckpointReader(folder / "iter_0000004") for folder in (complete, parts))
    for name in expected.names:
        assert torch.equal(*(reader.read(name).view(torch.uint8) for reader in (expected, resumed))), name
    words = ["--loader", "native", "--saver", "hf", "--load-dir", str(complete), "--save-dir", str(tmp_path / "hf")]
    assert run_tool("convert", words) != 0
    assert "use_mup" in capsys.readouterr().err and not (tmp_path / "hf").exists()
    argv = [*RUN, *UNTIED.replace("size 8", "size 16").split(), "--load", str(parts), "--save", str(tmp_path / "out")]
    ((code, errors),) = gloo_pool.run(train_with_errors, 1, argv, True)
    assert code != 0 and "mup_base_hidden_size is 16, the checkpoint has 8" in errors
