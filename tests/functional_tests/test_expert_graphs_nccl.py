"""Micro-batches recorded as CUDA graphs, with experts on two GPUs that exchange tokens, give the bits of plain
execution: losses, gradient norms, statistics of routers and weights."""

import pytest

from tests.functional_tests.test_data_parallel_training import digests, run, train_records

MODEL = (
    "--swiglu --hidden-dropout 0.1 --num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 2 --bf16"
    " --attention-backend unfused --expert-model-parallel-size 2 --moe-router-load-balancing-type"
)  # cuDNN's backward pass does not repeat its own bits
ROWS = [
    "seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-token-dispatcher-type allgather --moe-static-rows",
    "global_aux_loss --moe-aux-loss-coeff 0.1 --moe-token-dispatcher-type allgather --moe-static-rows"
    " --use-distributed-optimizer --moe-shared-expert-intermediate-size 16",
    "seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-token-dispatcher-type allgather --moe-static-rows"
    " --overlap-moe-expert-parallel-comm",
    "none --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
]


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("rows", ROWS)
def test_recorded_experts_of_two_ranks_equal_plain_execution_bit_for_bit(nccl_pool, dataset, tmp_path, rows):
    flags = [*MODEL.split(), *rows.split(), "--train-iters", "6"]
    graphs = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
    plain = run(nccl_pool, 2, dataset, tmp_path / "plain", [*flags, "--no-copy-engines"])
    replayed = run(nccl_pool, 2, dataset, tmp_path / "replayed", [*flags, *graphs.split()])
    assert len(train_records(plain)) == 6
    assert (replayed / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
    assert digests(replayed / "iter_0000006") == digests(plain / "iter_0000006")
