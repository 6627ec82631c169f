"""Whole runs with mixtures of experts: a checkpoint of one layout of experts continues on any other, and on the
same layout without a changed bit."""

import pytest

from tests.functional_tests.test_data_parallel_training import digests, run, tensors, train_records

MODEL = (
    "--swiglu --hidden-dropout 0.1 --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"
    " --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01"
    " --moe-input-jitter-eps 0.05 --train-iters 6 --lr-decay-iters 8"
)
ALL = "--moe-token-dispatcher-type alltoall"
LAYOUTS = {
    "ep4": (4, f"--expert-model-parallel-size 4 {ALL}"),
    "one": (1, ""),
    "ep2 etp2": (4, f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 {ALL}"),
    "tp2 ep2 zero": (
        4, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
        " --expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 1500",
    ),
    "pp2 ep2": (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
    "ep2 fsdp": (4, "--expert-model-parallel-size 2 --use-torch-fsdp2"),
}  # fmt: skip
BUFFERS = ("router.expert_bias", "router.last_choices")


@pytest.fixture(scope="module")
def whole(gloo_pool, dataset, tmp_path_factory):
    """Six iterations on one rank, in fp64."""
    return run(gloo_pool, 1, dataset, tmp_path_factory.mktemp("whole"), MODEL.split(), fp64=True)


@pytest.mark.parametrize("chain", [("ep4", "one", "ep2 etp2"), ("tp2 ep2 zero", "ep2 fsdp", "pp2 ep2")], ids=" - ".join)
def test_experts_move_between_layouts_in_the_middle_of_a_run(gloo_pool, dataset, whole, tmp_path, chain):
    load, records = [], []
    for name in chain:
        world_size, layout = LAYOUTS[name]
        flags = [*MODEL.split(), *layout.split(), *load, "--exit-interval", "2"]
        folder = run(gloo_pool, world_size, dataset, tmp_path / name, flags, fp64=True)
        records += train_records(folder)
        load = ["--load", str(folder)]
    expected = train_records(whole)
    assert [item["iteration"] for item in records] == [1, 2, 3, 4, 5, 6]
    for record, requested in zip(records, expected):
        for field in ("lm loss", "global_load_balancing_loss", "z_loss", "grad_norm"):
            assert record[field] == pytest.approx(requested[field], rel=1e-9), (record["iteration"], field)
        assert record["statistics"] == pytest.approx(requested["statistics"], rel=1e-9)
    actual, requested = tensors(folder / "iter_0000006"), tensors(whole / "iter_0000006")
    assert actual.keys() == requested.keys()
    for name, tensor in requested.items():
        assert (actual[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max() + 1e-11, name


@pytest.mark.parametrize("name", ["ep4", "tp2 ep2 zero"])
def test_resuming_experts_on_the_same_layout_changes_no_bit(gloo_pool, dataset, tmp_path, name):
    world_size, layout = LAYOUTS[name]
    flags = [*MODEL.split(), *layout.split(), "--bf16", "--check-replicas", "2"]
    one, parts = run(gloo_pool, world_size, dataset, tmp_path / "whole", flags), tmp_path / "parts"
    run(gloo_pool, world_size, dataset, parts, [*flags, "--load", str(parts), "--exit-interval", "3"])
    run(gloo_pool, world_size, dataset, parts, [*flags, "--load", str(parts)])
    assert (one / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    bits = digests(one / "iter_0000006")
    assert bits == digests(parts / "iter_0000006")
    for buffer in BUFFERS:
        assert sum(bit.endswith(buffer) for bit in bits) == 2, buffer
    changed = digests(parts / "iter_0000003")
    assert all(changed[bit] != bits[bit] for bit in bits if bit.endswith(BUFFERS)), "they take part in training"


BALANCE = "--moe-router-load-balancing-type"


@pytest.mark.parametrize(
    "balance",
    [f"{BALANCE} global_aux_loss --moe-aux-loss-coeff 0.05", f"{BALANCE} seq_aux_loss --moe-aux-loss-coeff 0.1"],
)
def test_the_architecture_of_experts_is_taken_from_a_checkpoint(gloo_pool, dataset, whole, tmp_path, balance):
    """Load balancing is not part of the architecture and may change."""
    flags = ["--load", str(whole), "--use-checkpoint-args", "--train-iters", "7", "--lr-decay-iters", "8"]
    flags += [*balance.split(), "--expert-model-parallel-size", "2", "--override-opt_param-scheduler"]
    folder = run(gloo_pool, 2, dataset, tmp_path, flags, fp64=True)
    (record,) = train_records(folder)
    assert record["iteration"] == 7 and "layer 2/tokens_per_expert max" in record["statistics"]
    assert tensors(folder / "iter_0000007").keys() >= {"model.decoder.layers.1.mlp.router.expert_bias"}
