"""Model transforms from outside of the package: a toy adapter on any linear layer trains with the base frozen."""

import pytest
import torch

from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.report.memory import estimate_memory
from tests.test_utils.gpt_runs import train
from tests.test_utils.layouts import FEW_STEPS, VOCAB_SIZE, Layout, configure

FAMILY = "tests.test_utils.toy_adapter.family"
GAINS = "--gain-modules linear_qkv linear_proj linear_fc1 linear_fc2 --attention-dropout 0.1 --hidden-dropout 0.1"
VOCABULARY = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]
TP2, PP2 = (f"--{axis}-model-parallel-size 2" for axis in ("tensor", "pipeline"))
LAYOUTS = {
    "TP 2 x PP 2": (f"{TP2} {PP2} --micro-batch-size 2", 4),
    "TP 2 + SP": (f"{TP2} --sequence-parallel --micro-batch-size 4", 2),
    "TP 2, shared key and value head": (f"{TP2} --micro-batch-size 4", 2),
    "DP 2, ZeRO-1": ("--use-distributed-optimizer --micro-batch-size 2", 2),
    "FSDP2": ("--use-torch-fsdp2 --micro-batch-size 4", 2),
    "zero bubble": (f"{PP2} --pipeline-schedule zero-bubble --micro-batch-size 1", 2),
    "full recomputation": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --micro-batch-size 8", 1,
    ),
}  # fmt: skip


def row(name):
    heads = " --group-query-attention --num-query-groups 1" if "shared" in name else ""
    return Layout(GAINS + heads, *LAYOUTS[name], steps=FEW_STEPS, family=FAMILY)


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapter_of_a_program_equals_one_rank(matrix, name):
    verdict = matrix.verdict(row(name))
    assert verdict.equal, verdict.first


def inspect(rank, world_size, one):
    """A task of the pool: train a step; (names of trained parameters, elements of gradient buffers, elements of the
    optimizer's state, elements of the model's weights, frozen parameters that have a gradient or have changed)."""
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.trainer import Trainer

    cfg = configure([*one.argv, "--mock-data", *VOCABULARY], world_size, one.precision, one.family)
    groups = initialize_megatron(cfg)
    parts = build_components(cfg, task_class(one.family)(cfg, build_tokenizer(cfg.tokenizer)), groups)
    named = {name: value for chunk in parts.checkpointer.chunks for name, value in chunk.named_parameters()}
    frozen = {name: value.detach().clone() for name, value in named.items() if not value.requires_grad}
    with ExitConditions(cfg) as exits:
        Trainer(cfg, parts, exits).step.run()
    wrong = [
        name
        for name, before in frozen.items()
        if named[name].grad is not None or hasattr(named[name], "main_grad") or not torch.equal(named[name], before)
    ]
    buffers = sum(buffer.grad_data.numel() for chunk in parts.model for buffer in chunk.grad_buffers)
    state = sum(tensor.local.numel() for tensor in parts.optimizer.sharded_tensors().values())
    # ZeRO-1 keeps trained weights in padded buffers, of the same sizes as gradients
    trained = sum(value.numel() for name, value in named.items() if name not in frozen)
    size = sum(value.numel() for value in frozen.values())
    size += buffers if "--use-distributed-optimizer" in one.layout else trained
    return sorted(named.keys() - frozen), buffers, state, size, wrong


@pytest.mark.parametrize("name", ["TP 2 x PP 2", "DP 2, ZeRO-1"])
def test_frozen_base_has_no_gradients_buffers_or_optimizer_state(gloo_pool, name):
    one = row(name)
    results = gloo_pool.run(inspect, one.world_size, one)
    estimate = estimate_memory(configure(one.argv, one.world_size, "fp64", FAMILY), VOCAB_SIZE)
    largest = max(state for _, _, state, _, _ in results)
    for rank, (trained, buffers, _, size, wrong) in enumerate(results):
        memory = estimate[rank * len(estimate) // one.world_size]
        assert not wrong and trained and all(".gain." in name for name in trained)
        assert (memory.weights, memory.gradients, memory.optimizer) == (size * 8, buffers * 8, largest * 8)


def test_checkpoints_hold_the_adapter_and_continue_in_another_layout(gloo_pool, tmp_path):
    def run(folder, layout, *flags):
        argv = ["--mock-data", *GAINS.split(), "--train-iters", "4", *layout.split(), "--save", str(folder)]
        ranks = 4 if layout else 1
        assert gloo_pool.run(train, ranks, [*argv, *map(str, flags)], True, FAMILY) == [0] * ranks
        return CheckpointReader(folder / "iter_0000004")

    complete = run(tmp_path / "complete", "")
    run(tmp_path / "parts", "", "--save-interval", 2)
    resumed = run(tmp_path / "other", f"{TP2} {PP2}", "--load", tmp_path / "parts", "--ckpt-step", 2)
    names = {name for name in complete.names if not name.startswith("rng.")}
    weights = [name for name in names if name.startswith("model.")]
    assert len(weights) == 2 * 4 and all(".gain." in name for name in names)
    assert names == {name for name in resumed.names if not name.startswith("rng.")}
    for name in names:
        torch.testing.assert_close(resumed.read(name), complete.read(name), rtol=1e-9, atol=1e-12)
