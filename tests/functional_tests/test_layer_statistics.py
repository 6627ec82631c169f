"""Statistics of layers, equal to one rank on every layout and to an independent sum; the host waits at the interval."""

import math

import pytest

from megatron.core.optimizer.layer_norms import layer_labels
from tests.test_utils.gpt_runs import read_records, train_with_errors

INTERVAL = ["--log-layer-statistics-interval", "2", "--train-iters", "4", "--lr-decay-iters", "6", "--eval-iters", "0"]
DENSE = ["--clip-grad", "0.5", "--attention-dropout", "0", "--hidden-dropout", "0"]
EXPERTS = [*DENSE, "--num-experts", "4", "--moe-router-load-balancing-type", "none"]
SHARDED = ["--use-distributed-optimizer"]
DENSE_LAYOUTS = {
    "tp2 dp2": (4, ["--tensor-model-parallel-size", "2", "--sequence-parallel", *SHARDED]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "fsdp2": (2, ["--use-torch-fsdp2"]),
    "zero two instances": (4, [*SHARDED, "--num-distributed-optimizer-instances", "2"]),
    "offloaded": (2, [*SHARDED, "--optimizer-cpu-offload"]),
    "cp2": (2, ["--context-parallel-size", "2"]),
}
EXPERT_LAYOUTS = {
    "ep2": (2, ["--expert-model-parallel-size", "2"]),
    "ep2 tp2 sharded": (
        4,
        ["--expert-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel", *SHARDED],
    ),
}


def run(pool, world_size, dataset, save, flags, fp64=True):
    """Statistics by iteration and name."""
    argv = ["--data-path", str(dataset), "--split", "80,10,10", "--save", str(save), *INTERVAL, *flags]
    for code, errors in pool.run(train_with_errors, world_size, argv, fp64):
        assert code == 0, errors
    records = [record for record in read_records(save / "metrics.jsonl") if record["kind"] == "train"]
    return {record["iteration"]: record.get("statistics", {}) for record in records}


def layer_norms(statistics):
    return {name: value for name, value in statistics.items() if name.endswith(("_norm", "_logit"))}


@pytest.mark.parametrize(
    ("flags", "layouts"), [(DENSE, DENSE_LAYOUTS), (EXPERTS, EXPERT_LAYOUTS)], ids=["dense", "experts"]
)
def test_layer_statistics_match_single_rank(gloo_pool, dataset, tmp_path, flags, layouts):
    expected = run(gloo_pool, 1, dataset, tmp_path / "one", flags)
    assert not layer_norms(expected[1]) and not layer_norms(expected[3])
    names = {name.partition("/")[2] for name in layer_norms(expected[2])}
    assert names >= {"weight_norm", "grad_norm", "update_norm", "max_attention_logit"}
    assert {"layer 1/grad_norm", "layer 2/grad_norm", "decoder.final_layernorm/grad_norm"} <= expected[2].keys()
    for name, (world_size, layout) in layouts.items():
        actual = run(gloo_pool, world_size, dataset, tmp_path / name, [*flags, *layout])
        for iteration in (2, 4):
            assert actual[iteration].keys() == expected[iteration].keys(), name
            for key, value in actual[iteration].items():
                assert value == pytest.approx(expected[iteration][key], rel=1e-9), (name, iteration, key)


PRECISIONS = {
    "fp64": ([], True, 1e-9),
    "fp16": (["--fp16", "--loss-scale", "512"], False, 1e-5),
    "fp16 with a changing scale": (["--fp16", "--initial-loss-scale", "4096", "--loss-scale-window", "1"], False, 1e-5),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_layer_norms_add_up_to_the_norms_of_the_model(gloo_pool, dataset, tmp_path, precision):
    flags, fp64, tolerance = PRECISIONS[precision]
    result = run(gloo_pool, 2, dataset, tmp_path, [*DENSE, *SHARDED, "--log-params-norm", *flags], fp64)
    record = read_records(tmp_path / "metrics.jsonl")[-1]
    for kind, total in ("grad_norm", record["grad_norm"]), ("weight_norm", record["params_norm"]):
        squares = [value**2 for name, value in result[4].items() if name.endswith(f"/{kind}")]
        assert math.sqrt(sum(squares)) == pytest.approx(total, rel=tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_norm_of_an_sgd_update_is_that_of_the_unscaled_gradient(gloo_pool, dataset, tmp_path, precision):
    flags, fp64, tolerance = PRECISIONS[precision]
    flags = [*DENSE, "--optimizer", "sgd", "--sgd-momentum", "0", "--weight-decay", "0", *flags]
    flags += ["--lr-decay-style", "constant", "--clip-grad", "0", "--lr-warmup-iters", "0"]
    result = run(gloo_pool, 1, dataset, tmp_path, flags, fp64)
    for label in ("layer 1", "layer 2", "embedding.word_embeddings"):
        update, gradient = result[2][f"{label}/update_norm"], result[2][f"{label}/grad_norm"]
        assert update == pytest.approx(1e-2 * gradient, rel=max(tolerance, 1e-9))


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["decoder.layers.0.mlp.weight", "decoder.layers.11.mlp.bias"], ["layer 1", "layer 12"]),
        (["encoder.layers.0.a.weight", "pooler.dense.weight"], ["layer 1", "pooler.dense"]),
        (
            ["decoder.layers.0.a.weight", "mtp.layers.0.eh_proj.weight", "decoder.layers.1.a.weight"],
            ["layer 1", "mtp layer 1", "layer 2"],
        ),
        (
            ["encoder.layers.0.a.weight", "encoder.layers.1.a.weight", "decoder.layers.0.a.weight", "lm_head.bias"],
            ["encoder layer 1", "encoder layer 2", "decoder layer 1", "lm_head"],
        ),
        (["scale", "net.0.weight"], ["scale", "net.0"]),
    ],
)
def test_labels_name_layers_from_one(names, labels):
    assert list(layer_labels(names).values()) == labels


def test_masters_are_read_at_the_interval_only(gloo_pool, dataset, tmp_path):
    argv = ["--data-path", str(dataset), "--split", "80,10,10", *INTERVAL, *DENSE]
    (counts,) = gloo_pool.run(count_reads, 1, argv)
    assert counts == [0, 3, 0, 3]  # the copy before the update, the norm after it, the difference


def count_reads(rank, world_size, argv):
    """Reads of one weight's master, per iteration."""
    from unittest import mock

    from megatron.core.optimizer.host_state import HostState
    from megatron.training.step import TrainStep
    from tests.test_utils.gpt_runs import train

    names, read, step, counts = [], HostState.read, TrainStep.run, []

    def noting_read(self, name, **keywords):
        names.append(name)
        return read(self, name, **keywords)

    def noting_step(self):
        names.clear()
        metrics = step(self)
        counts.append(names.count("decoder.layers.0.mlp.linear_fc1.weight"))
        return metrics

    with mock.patch.object(HostState, "read", noting_read), mock.patch.object(TrainStep, "run", noting_step):
        assert train(rank, world_size, argv) == 0
    return counts
