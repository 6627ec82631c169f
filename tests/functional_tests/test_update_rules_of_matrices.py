"""A rule that owns matrices (``tests/test_utils/orthogonal_rule.py``) works in every layout without a line in the
library: its steps equal those of one rank, next to AdamW for the other parameters."""

import dataclasses

import pytest
import torch

from megatron.core.config.errors import UserError
from tests.test_utils.layout_table import FSDP, GATHER, PP2, SP, TP2, VPP, ZERO
from tests.test_utils.layouts import MORE_STEPS, Layout, read_reference
from tests.test_utils.orthogonal_rule import Orthogonalized

WRAP = "tests.test_utils.orthogonal_rule:with_matrices"
DENSE = (
    "--num-layers 2 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
    " --group-query-attention --num-query-groups 2 --hidden-dropout 0 --attention-dropout 0 --clip-grad 0.5"
)
EXPERTS = f"{DENSE} --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-load-balancing-type none"
EP2, MBS2 = "--expert-model-parallel-size 2", "--micro-batch-size 2"
ETP1, ETP2 = "--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 2"
LAYOUTS = {
    "zero2-gather": Layout(DENSE, f"{MBS2} {GATHER}", 2),
    "zero4-instances": Layout(DENSE, f"{MBS2} {ZERO} --num-distributed-optimizer-instances 2", 4),
    "tp2-sp-zero2": Layout(DENSE, f"{TP2} {SP} {GATHER}", 4),
    "fsdp2": Layout(DENSE, f"{MBS2} {FSDP}", 2),
    "fsdp2-tp2": Layout(DENSE, f"{TP2} {FSDP}", 4),
    "pp2-vpp-zero2": Layout(DENSE.replace("--num-layers 2", "--num-layers 4"), f"{PP2} {VPP} {GATHER}", 4),
    "experts-ep2-zero2": Layout(EXPERTS, f"{MBS2} {EP2} {ETP1} {GATHER}", 4),
    "experts-tp2-sp-etp2-zero2": Layout(EXPERTS, f"{TP2} {SP} {ETP2} {GATHER}", 4),
    "experts-ep2-fsdp2": Layout(EXPERTS, f"{MBS2} {EP2} {FSDP}", 4),
    "experts-fsdp8-more-ranks-than-rows": Layout(EXPERTS, f"--micro-batch-size 1 {FSDP}", 8),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(matrix, name):
    verdict = matrix.verdict(dataclasses.replace(LAYOUTS[name], steps=MORE_STEPS, wrap=WRAP))
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


def test_the_rule_changes_the_numbers(matrix):
    """Otherwise the rows above would prove nothing."""
    row = dataclasses.replace(LAYOUTS["zero2-gather"], steps=MORE_STEPS)
    native, adam = (read_reference(matrix.reference_of(item)) for item in (dataclasses.replace(row, wrap=WRAP), row))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert not torch.allclose(native[-1].tensors["weight"][name], adam[-1].tensors["weight"][name], rtol=1e-3)


def undeclared(rank, world_size):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel_state.initialize_model_parallel()
    model = torch.nn.Linear(16, 24, bias=False)
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    try:
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [ddp], update_rule=lambda name, parameter: Orthogonalized)
    except UserError as error:
        return str(error)
    return None


def test_a_rule_that_is_not_declared_before_shards_are_cut_is_rejected(gloo_pool):
    for message in gloo_pool.run(undeclared, 2):
        assert message is not None and "Orthogonalized: updates full matrices, but shards cut weight" in message
