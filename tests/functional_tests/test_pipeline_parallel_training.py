"""Whole runs over pipeline stages: one rank's losses, evaluations, weights; checkpoints that any layout continues."""

import hashlib

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from tests.test_utils.gpt_runs import losses, read_records, train_with_errors

FOUR_LAYERS = ["--num-layers", "4"]
PP2 = ["--pipeline-model-parallel-size", "2"]
VPP2 = [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]
CUT = ["--pipeline-model-parallel-layout"]
UNTIED = ["--untie-embeddings-and-output-weights"]


def run(pool, world_size, dataset, save, *flags, fp64=True):
    """Trains; returns the folder."""
    argv = [*FOUR_LAYERS, "--data-path", str(dataset), "--split", "80,10,10", "--save", str(save)]
    for code, errors in pool.run(train_with_errors, world_size, [*argv, *map(str, flags)], fp64):
        assert code == 0, errors
    return save


def tensors(checkpoint):
    reader = CheckpointReader(checkpoint)
    return {name: reader.read(name) for name in reader.names if not name.startswith("rng.")}


def digests(checkpoint):
    """Name -> sha256 of every tensor, random states included, and the counters."""
    reader = CheckpointReader(checkpoint)
    data = {name: reader.read(name).view(torch.uint8).numpy().tobytes() for name in reader.names}
    hashes = {name: hashlib.sha256(item).hexdigest() for name, item in data.items()}
    return {**hashes, **{key: reader.objects[key] for key in ("train_state", "optimizer", "scheduler")}}


def evaluations(folder):
    return [record["lm loss"] for record in read_records(folder / "metrics.jsonl") if record["kind"] != "train"]


def assert_same_run(actual, expected, iteration="iter_0000008"):
    """Losses of every step, evaluations, weights and moments agree to fp64 rounding, under the same names."""
    np.testing.assert_allclose(losses(actual), losses(expected), rtol=1e-12)
    np.testing.assert_allclose(evaluations(actual), evaluations(expected), rtol=1e-10)
    assert len(evaluations(actual)) >= 2
    mine, foreign = tensors(actual / iteration), tensors(expected / iteration)
    assert mine.keys() == foreign.keys()
    for name, tensor in foreign.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-6, atol=1e-10, msg=name)


LAYOUTS = {
    "two stages, four chunks, odd micro-batches": (
        2, [*VPP2, "--micro-batch-size", "1", "--global-batch-size", "8",
            "--microbatch-group-size-per-virtual-pipeline-stage", "3"],
    ),
    "cut layers in four chunks, zero bubble": (2, [*PP2, *CUT, "Ea|fta|fa|fL", "--pipeline-schedule", "zero-bubble"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(gloo_pool, dataset, tmp_path_factory):
    return run(gloo_pool, 1, dataset, tmp_path_factory.mktemp("one") / "run", "--eval-interval", 4)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_pipeline_trains_and_evaluates_as_one_rank_does(gloo_pool, dataset, tmp_path, one_rank, layout):
    """Tied embeddings, dropout on."""
    world_size, flags = layout
    assert_same_run(run(gloo_pool, world_size, dataset, tmp_path / "run", "--eval-interval", 4, *flags), one_rank)


def test_rising_batch_sizes_give_any_number_of_micro_batches(gloo_pool, dataset, tmp_path):
    """1, 2, 3 … micro-batches on three stages of untied, uneven layers: fewer than stages, and no multiple."""
    flags = [*UNTIED, "--micro-batch-size", 2, "--rampup-batch-size", 2, 2, 30]
    expected = run(gloo_pool, 1, dataset, tmp_path / "one", *flags, "--eval-interval", 4)
    stages = [*flags, "--eval-interval", 4, "--pipeline-model-parallel-size", 3]
    assert_same_run(run(gloo_pool, 3, dataset, tmp_path / "three", *stages), expected)


@pytest.mark.parametrize("flags", [PP2, [*VPP2, "--bf16"]], ids=["1f1b", "interleaved bf16"])
def test_resuming_a_pipeline_changes_no_bit(gloo_pool, dataset, tmp_path, flags):
    full, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [*flags, "--save-interval", "4"]
    run(gloo_pool, 2, dataset, full, *argv, fp64=False)
    run(gloo_pool, 2, dataset, parts, *argv, "--load", parts, "--exit-interval", "4", fp64=False)
    run(gloo_pool, 2, dataset, parts, *argv, "--load", parts, fp64=False)
    assert (full / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    assert digests(full / "iter_0000008") == digests(parts / "iter_0000008") != {}


def test_a_checkpoint_of_cut_layers_continues_on_other_stages(gloo_pool, dataset, tmp_path, one_rank):
    """Written by stages that end inside a layer, continued where others do, over chunks of layers, on one rank."""
    folder = tmp_path / "run"
    steps = [
        (2, [*PP2, *CUT, "Eta|fttL"], 2), (2, [*PP2, *CUT, "Ea|fta|fa|fL", "--use-distributed-optimizer"], 4),
        (2, VPP2, 6), (4, [*PP2, *CUT, "Etta|ftL"], 7), (1, [], 8),
    ]  # fmt: skip
    for world_size, flags, last in steps:
        stop = ["--exit-interval", last, "--load", folder, "--eval-interval", 4, "--no-load-rng"]
        run(gloo_pool, world_size, dataset, folder, *flags, *stop)
    np.testing.assert_allclose(losses(folder), losses(one_rank), rtol=1e-12)
    expected = tensors(one_rank / "iter_0000008")
    actual = tensors(folder / "iter_0000008")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-6, atol=1e-10, msg=name)


def provider_of_old(pre_process=True, post_process=True):
    """A script's model provider that knows nothing of virtual stages."""
    from megatron.core.config.transformer_config import TransformerConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = TransformerConfig(
        num_layers=5, hidden_size=16, num_attention_heads=2, pipeline_model_parallel_size=2, params_dtype=torch.float64,
        virtual_pipeline_model_parallel_size=2, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    return GPTModel(config, spec, 32, 8, pre_process=pre_process, post_process=post_process)


def library_loop(rank, world_size):
    """Chunks from a provider, one step of the library's own call; names, losses, gradients."""
    from types import SimpleNamespace

    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training.start.parallelize import build_model

    parallel_state.initialize_model_parallel(1, 2, 2)
    flags = {"pipeline_model_parallel_layout": None, "num_layers_per_virtual_pipeline_stage": None}
    flags |= {"num_virtual_stages_per_pipeline_rank": 2, "sequence_parallel": False}
    cfg = SimpleNamespace(pipeline_model_parallel_size=2, **flags)
    task = SimpleNamespace(cfg=SimpleNamespace(model=cfg, transforms=()), model_provider=provider_of_old)
    chunks = build_model(task, torch.device("cpu"))
    tokens = torch.arange(3 * 2 * 8).view(3, 2, 8) % 32

    def forward_step(iterator, model):
        ids = next(iterator)
        output = model(ids, torch.arange(8).expand(2, 8), labels=ids.flip(1))
        return output, lambda losses: (losses.mean(), {"lm loss": losses.mean()})

    results = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(tokens), iter(tokens)], model=chunks, num_microbatches=3,
        seq_length=8, micro_batch_size=2,
    )  # fmt: skip
    names = [name for chunk in chunks for name, _ in chunk.named_parameters()]
    have_gradients = all(parameter.grad is not None for chunk in chunks for parameter in chunk.parameters())
    return names, [result["lm loss"].item() for result in results], have_gradients


def test_custom_program_runs_interleaved_chunks(gloo_pool):
    """The provider takes no stage; losses come out on the last rank, one per micro-batch."""
    (first, no_losses, first_complete), (second, actual, second_complete) = gloo_pool.run(library_loop, 2)
    assert first_complete and second_complete and no_losses == [] and [1 < loss < 10 for loss in actual] == [True] * 3
    layers = sorted({int(name.split(".")[2]) for name in first + second if name.startswith("decoder.layers")})
    assert layers == [0, 1, 2, 3, 4] and not set(first) & set(second)
