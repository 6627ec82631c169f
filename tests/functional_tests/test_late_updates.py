"""Forward passes of every family wait for the updates of the weights that they read, however late these are."""

import contextlib
import logging
from unittest import mock

import pytest
import torch

from tests.test_utils.layout_table import TABLE, row
from tests.test_utils.layouts import VOCAB_SIZE, configure
from tests.test_utils.lazy_streams import LazyStream

OFFLOAD = ["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"]
STEPS = 3
ROWS = [
    "dp2", "zero2-gather", "tp2-sp-llama", "tp2-sp-halves-gather", "pp2-vpp-untied", "zero2-pp2-gather",
    "pp2-zero-bubble", "recompute-uniform", "ep2-zero", "ep2-halves", "mla-zero2-gather", "mtp-pp2-vpp-zero2-gather",
    "gemma-2-tp2-sp", "bf16-cp2-zero2", "bert-pp2-vpp", "t5-pp2-relative", "t5-zero2",
]  # fmt: skip
"""Layouts and families of which modules read weights in different ways."""


@contextlib.contextmanager
def late_streams(waits):
    """Streams that work as late as possible; without ``waits`` modules do not wait for their weights."""
    updates = "megatron.core.distributed.weight_updates"
    with (
        mock.patch(f"{updates}.SideStream", LazyStream),
        mock.patch("megatron.core.optimizer.host_state.SideStream", LazyStream),
        contextlib.nullcontext() if waits else mock.patch(f"{updates}.WeightUpdates.wait_for", lambda *_: None),
    ):
        yield


def train(rank, world_size, row, offload, waits=True):
    """Train without a look at the weights between the steps; return losses, norms and weights of this rank, and whether
    updates overlap."""
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.trainer import Trainer
    from megatron.training.verify.layout_trace import weight_shards, with_synthetic_data

    logging.getLogger("megatron").setLevel(logging.WARNING)
    cfg = configure([*row.argv, *(OFFLOAD if offload else [])], world_size, row.precision, row.family)
    task = with_synthetic_data(task_class(row.family), VOCAB_SIZE)(cfg)
    with late_streams(waits) if offload else contextlib.nullcontext():
        parts = build_components(cfg, task, initialize_megatron(cfg))
        result = {}
        with ExitConditions(cfg) as exits:
            trainer = Trainer(cfg, parts, exits)
            for step in range(STEPS):
                metrics = trainer.step.run()
                values = {**metrics.losses, **metrics.statistics, "norm": metrics.grad_norm}
                result |= {f"{name} {step}": torch.as_tensor(value).clone() for name, value in values.items()}
        result |= {shard.name: shard.local.detach().clone() for shard in weight_shards(parts)}
        return {name: value.double().numpy() for name, value in result.items()}, parts.optimizer._updates.overlaps


def differences(pool, row, waits=True):
    """Return the values that differ with offload on any rank, and whether updates overlap."""
    plain = pool.run(train, row.world_size, row, False)
    late = pool.run(train, row.world_size, row, True, waits)
    names = set()
    for (one, _), (other, _) in zip(plain, late):
        assert one.keys() == other.keys()
        names |= {name for name in one if one[name].tobytes() != other[name].tobytes()}
    return sorted(names), all(overlaps for _, overlaps in late)


@pytest.mark.parametrize("name", ROWS)
def test_forward_waits_for_late_updates(gloo_pool, name):
    names, overlaps = differences(gloo_pool, row(name))
    assert not names
    assert overlaps == ("--overlap-param-gather" in row(name).layout or "--use-distributed" not in row(name).layout)


@pytest.mark.parametrize("name", ["tp2-sp-llama", "zero2-gather", "ep2-halves", "t5-pp2-relative"])
def test_a_forward_pass_without_waits_is_found(gloo_pool, name):
    assert "lm loss 2" in differences(gloo_pool, row(name), waits=False)[0]


def test_every_family_has_a_row():
    assert {row(name).family for name in ROWS} == {row(name).family for name in TABLE}
