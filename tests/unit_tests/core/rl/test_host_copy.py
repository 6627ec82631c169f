"""Weights and optimizer state move to the host and back with the same bits, and their memory is released."""

import pytest

from megatron.core.config.errors import UserError
from megatron.core.rl.host_copy import HostCopy
from tests.test_utils.layouts import VOCAB_SIZE, configure
from tests.unit_tests.training.test_live_weights import BASE, TP2

LAYOUTS = {
    "one rank": ("", 1), "tp2": (TP2, 2), "zero": ("--use-distributed-optimizer --overlap-grad-reduce", 2),
    "fsdp": ("--use-torch-fsdp2 --no-gradient-accumulation-fusion"
    " --untie-embeddings-and-output-weights", 2),
}  # fmt: skip


def trained(rank, world_size, flags, offloads):
    """Return the losses of four steps; before the third one everything is on the host for a while."""
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.trainer import Trainer
    from megatron.training.verify.layout_trace import with_synthetic_data

    cfg = configure([*BASE.split(), "--train-iters", "9", *flags.split()], world_size, "bf16")
    groups = initialize_megatron(cfg)
    parts = build_components(cfg, with_synthetic_data(task_class("gpt"), VOCAB_SIZE)(cfg), groups)
    found = []
    with ExitConditions(cfg) as exits:
        trainer = Trainer(cfg, parts, exits)
        for step in range(4):
            if step == 2 and offloads:
                copy = HostCopy(parts.model, parts.optimizer)
                released = [copy.offload(weights=False), copy.reload(), copy.offload()]
                assert 0 < released[0] < released[2] and copy.is_offloaded
                assert not any(local(p).untyped_storage().nbytes() for chunk in parts.model for p in chunk.parameters())
                with pytest.raises(UserError, match="call reload first"):
                    copy.offload()
                copy.reload()
                with pytest.raises(UserError, match="call offload first"):
                    copy.reload()
            metrics = trainer.train_step()
            found.append((float(metrics.losses["lm loss"]), float(metrics.grad_norm)))
    return found


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_continues_with_the_same_bits(gloo_pool, layout):
    flags, world_size = LAYOUTS[layout]
    assert gloo_pool.run(trained, world_size, flags, True) == gloo_pool.run(trained, world_size, flags, False)
