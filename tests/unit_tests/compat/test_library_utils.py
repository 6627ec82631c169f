"""Small functions under Megatron-LM's names, compared with plain torch or with the library's results."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.compat import layer_offsets, library_utils, modules, rotary
from megatron.compat.group_collection import ProcessGroupCollection
from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

SIZES = {"num_layers": 8, "hidden_size": 16, "num_attention_heads": 2}


def test_recomputation_repeats_draws_from_the_tracker():
    model_parallel_cuda_manual_seed(3)
    weight = torch.randn(4, 4, requires_grad=True)

    def layer(x):
        with get_cuda_rng_tracker().fork():
            return F.dropout(x @ weight, 0.5) + F.dropout(x, 0.5)

    gradients = []
    for run in (lambda x: layer(x), lambda x: library_utils.checkpoint(layer, False, x)):
        model_parallel_cuda_manual_seed(3)
        x = torch.ones(2, 4, requires_grad=True)
        weight.grad = None
        run(x).sum().backward()
        gradients.append((x.grad.clone(), weight.grad.clone(), torch.rand(1).item()))
    assert all(torch.equal(mine, gradient) for mine, gradient in zip(gradients[0][:2], gradients[1][:2]))
    assert gradients[0][2] == gradients[1][2]


@pytest.mark.parametrize("interleaved, percent", [(False, 1.0), (True, 1.0), (False, 0.5)])
def test_rotary_angles_turn_pairs_of_channels(interleaved, percent):
    """The product of a query and a key depends on their distance only; the first position is not turned."""
    config = TransformerConfig(**SIZES, rotary_interleaved=interleaved)
    table = rotary.RotaryEmbedding(8, percent, interleaved, None, 100)(6)
    query, key = torch.randn(1, 1, 1, 8).expand(6, 1, 1, 8), torch.randn(1, 1, 1, 8).expand(6, 1, 1, 8)
    q, k = (rotary.apply_rotary_pos_emb(item, table, config) for item in (query, key))
    torch.testing.assert_close(q[0], query[0])
    products = torch.einsum("sbhd,tbhd->st", q, k)
    for distance in range(5):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    first, other = (0, 1) if interleaved else (0, int(8 * percent) // 2)
    angle = torch.tensor(1.0)
    expected = query[1, 0, 0, first] * angle.cos() - query[1, 0, 0, other] * angle.sin()
    torch.testing.assert_close(q[1, 0, 0, first], expected)
    packed = rotary.apply_rotary_pos_emb(query[:, 0], table, config, cu_seqlens=torch.tensor([0, 2, 6]))
    torch.testing.assert_close(packed, torch.cat((q[:2, 0], q[:4, 0])))
    documents = {"cu_seqlens": torch.tensor([0, 2, 6]), "mscale": 1.5}
    scaled = rotary.apply_rotary_pos_emb(query[:, 0], table, config, **documents)
    rotated = int(8 * percent)
    torch.testing.assert_close(scaled[..., :rotated], 1.5 * packed[..., :rotated])
    torch.testing.assert_close(scaled[..., rotated:], packed[..., rotated:])
    stretched = rotary.RotaryEmbedding(8, percent, interleaved, 2.0, 100)(11)
    torch.testing.assert_close(stretched[::2], table)


def test_tokens_are_rolled_within_documents():
    tokens = torch.arange(1, 7)[None]
    rolled, total = modules.roll_tensor(tokens)
    assert rolled.tolist() == [[2, 3, 4, 5, 6, 0]] and total == 20
    documents = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 2, 6]))
    assert modules.roll_tensor(tokens, packed_seq_params=documents)[0].tolist() == [[2, 0, 4, 5, 6, 0]]


def test_layers_of_stages_are_counted_where_the_configuration_tells_them():
    full = TransformerConfig(**SIZES)
    assert layer_offsets.get_num_layers_to_build(full) == 8 and layer_offsets.get_transformer_layer_offset(full) == 0
    layout = TransformerConfig(**SIZES, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ettt|ttttt,L")
    assert [layer_offsets.get_num_layers_to_build(layout, pp_rank=rank) for rank in (0, 1)] == [3, 5]
    assert [layer_offsets.get_transformer_layer_offset(layout, pp_rank=rank) for rank in (0, 1)] == [0, 3]
    chunks = TransformerConfig(
        **SIZES, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tt|ttt|tt,L",
    )  # fmt: skip
    offsets = [layer_offsets.get_transformer_layer_offset(chunks, vp, rank) for rank in (0, 1) for vp in (0, 1)]
    assert offsets == [0, 3, 1, 6]
    with pytest.raises(UserError, match="cannot compute layer offsets, because stages are balanced by the"):
        layer_offsets.get_num_layers_to_build(TransformerConfig(**SIZES, pipeline_model_parallel_size=2))


def _collected(rank, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    some = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    assert some.dp is None and some.tp is groups.tp and not hasattr(some, "xp")
    first = library_utils.is_pp_first_stage(groups.pp), library_utils.is_pp_last_stage(groups.tp)
    with pytest.raises(ValueError, match="required_pgs: unknown groups data"):
        ProcessGroupCollection.use_mpu_process_groups(["data"])
    sizes = library_utils.get_pg_size(groups.tp), library_utils.get_pg_rank(groups.tp), groups.dp_cp.size()
    return sizes, first


def test_groups_are_collected_by_megatron_lms_names(gloo_pool):
    result = gloo_pool.run(_collected, 4)
    assert [item[0] for item in result] == [(2, 0, 2), (2, 1, 2), (2, 0, 2), (2, 1, 2)]
    assert [item[1] for item in result] == [(True, False), (True, True)] * 2


def test_small_functions():
    wrapped = library_utils.WrappedTensor(torch.ones(1))
    assert wrapped.unwrap().item() == 1
    with pytest.raises(RuntimeError, match="unwrapped before"):
        wrapped.unwrap()
    filled = library_utils.scaled_init_method_normal(1.0, 8)(torch.empty(10_000))
    assert filled.std().item() == pytest.approx(0.25, rel=0.05) and library_utils.get_pg_size() == 1
    assert library_utils.is_vp_last_stage(1, 2) and not library_utils.is_vp_first_stage(1, 2)
    assert library_utils.is_vp_last_stage(None, None) and library_utils.nvtx_decorator()(math.sqrt)(4) == 2
    x = torch.randn(3, 4)
    torch.testing.assert_close(modules.squared_relu(x), x.clamp(min=0) ** 2)
    with library_utils.get_fp8_context(None):
        assert not library_utils.is_float8tensor(x)
    with pytest.raises(UserError, match="set_experimental_flag"):
        library_utils.set_experimental_flag(True)


def test_a_norm_is_that_of_the_configuration():
    norm = modules.WrappedTorchNorm(TransformerConfig(**SIZES, normalization="RMSNorm"), 16)
    x = torch.randn(2, 16)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), eps=1e-5))


def test_muon_optimizer_updates_matrices_by_muon():
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    optimizer = get_megatron_muon_optimizer(
        OptimizerConfig(optimizer="dist_muon", lr=0.1), [model], config_overrides=None, use_gloo_process_groups=False,
        layer_wise_distributed_optimizer=True, pg_collection=None,
    )  # fmt: skip
    state = optimizer.state_dict()
    assert {*state["momentum_buffer"]} == {"0.weight", "1.weight"} and {*state["exp_avg"]} == {"0.bias", "1.bias"}
