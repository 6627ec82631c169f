"""Masks, windows, norms, dropout and specs."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.kernels.torch_sdpa import TorchAttention
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.masks import document_mask, hidden_pairs
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.tiles import Visibility, full_tile
from megatron.core.attention.window import layer_window
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.common.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.random.dropout import Dropout, DropoutCoordinates, NoDropout, make_dropout
from megatron.core.random.philox import DropoutStream
from megatron.core.sharding.placement import Normal, XavierUniform
from megatron.core.transformer.branch import accepts_context
from megatron.core.transformer.initial_values import embedding_init, output_weight_init, weight_init
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import L2Norm, build_norm
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.transformer_layer import TransformerLayer, layer_branches
from tests.test_utils.reference_attention import reference_attention

DOUBLE = torch.float64


def make_config(**overrides):
    sizes = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "params_dtype": DOUBLE}
    return TransformerConfig(**{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, **overrides})


@pytest.mark.parametrize("queries, keys", [(6, 6), (2, 6)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (2, 0), (1, 2), (-1, 1), (2, -1)])
def test_masks_equal_their_definition(queries, keys, causal, window):
    mask = hidden_pairs(full_tile(queries, keys, Visibility(causal, window)))
    left, right = window or (-1, -1)
    for q in range(queries):
        for k in range(keys):
            distance = k - (q + keys - queries)
            hidden = (causal and distance > 0) or (right >= 0 and distance > right) or (left >= 0 and -distance > left)
            assert (False if mask is None else bool(mask[q, k])) == hidden


def test_documents_see_only_themselves():
    documents = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 2, 4, 5, 8], dtype=torch.int32))
    mask = document_mask(documents, 2, 4, 4)
    assert (~mask[0, 0]).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert (~mask[1, 0]).int().tolist() == [[1, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]


def test_queries_of_another_sequence_see_the_real_keys_of_their_row():
    documents = PackedSeqParams.of_keys(torch.tensor([3, 2]), 2, 3)
    assert documents.all_bounds() == ((0, 2, 2, 4, 4), (0, 3, 3, 5, 6))
    mask = document_mask(documents, 2, 2, 3)
    assert (~mask[:, 0]).int().tolist() == [[[1, 1, 1], [1, 1, 1]], [[1, 1, 0], [1, 1, 0]]]


@pytest.mark.parametrize("skip, layers", [(None, [1, 2, 3, 4]), (2, [1, 3]), (3, [1, 2, 4]), ([1, 0, 0, 1], [1, 4])])
def test_layers_with_a_window(skip, layers):
    assert [n for n in range(1, 5) if layer_window((7, 0), skip, n)] == layers
    assert layer_window(None, skip, 1) is None and layer_window((-1, -1), None, 1) is None


@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("window", [None, (3, 0), (2, 2), (100, 0)])
def test_fused_and_unfused_cores_agree(mask_type, window):
    config = make_config(num_query_groups=2, window_size=window)
    query, key, value = torch.randn(9, 2, 4, 6, dtype=DOUBLE), *torch.randn(2, 9, 2, 2, 6, dtype=DOUBLE)
    fused = CoreAttention(config, 1, mask_type, groups=SINGLE_PROCESS)
    assert isinstance(fused.kernel, TorchAttention)
    unfused = reference_attention(config, 1, mask_type)(query, key, value)
    torch.testing.assert_close(fused(query, key, value), unfused)


def test_the_core_is_chosen_once_by_configuration():
    def kernel_of(**settings):
        return CoreAttention(make_config(**settings), 1, groups=SINGLE_PROCESS).kernel

    assert isinstance(kernel_of(attention_backend="auto"), TorchAttention)
    assert isinstance(kernel_of(attention_backend="unfused"), UnfusedAttention)
    assert isinstance(kernel_of(attention_dropout=0.1), UnfusedAttention)
    with pytest.raises(ValueError, match="context_parallel_size"):
        CoreAttention(make_config(context_parallel_size=2), 1, groups=SINGLE_PROCESS)


def test_layer_scaling_keeps_float16_scores_finite_and_changes_no_result():
    config = make_config(apply_query_key_layer_scaling=True)
    q, k, v = torch.randn(3, 5, 1, 4, 6, dtype=DOUBLE)
    torch.testing.assert_close(reference_attention(config, 7)(q, k, v), reference_attention(make_config(), 7)(q, k, v))
    large = torch.full((4, 1, 4, 6), 200.0, dtype=torch.float16)
    assert reference_attention(config, 48)(large, large, large).isfinite().all()


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_zero_centred_norms_start_and_act_as_plain_ones(kind):
    plain = build_norm(make_config(normalization=kind), 24, 1e-5, groups=SINGLE_PROCESS)
    centred = build_norm(make_config(normalization=kind, apply_layernorm_1p=True), 24, 1e-5, groups=SINGLE_PROCESS)
    x = torch.randn(3, 24, dtype=DOUBLE)
    assert centred.weight.eq(0).all() and plain.weight.eq(1).all()
    with torch.no_grad():
        plain.weight.add_(torch.arange(24) / 24)
        centred.weight.add_(torch.arange(24) / 24)
    torch.testing.assert_close(centred(x), plain(x))


def test_l2_norm_gives_unit_mean_squares():
    normed = L2Norm(make_config(), 8, 1e-9)(torch.randn(3, 8, dtype=DOUBLE))
    assert normed.pow(2).mean(-1).allclose(torch.ones(3, dtype=DOUBLE))


def coordinates(samples, positions):
    return DropoutCoordinates(DropoutStream(1), torch.tensor(samples), torch.tensor(positions))


def test_dropout_of_a_slice_is_the_slice_of_dropout():
    dropout = Dropout(0.5, "layer", 1, "x")
    x = torch.randn(6, 3, 21, dtype=DOUBLE)
    full = dropout(x, coordinates([3, 4, 5], list(range(6))))
    part = dropout(x[[4, 1]][:, [2]], coordinates([5], [4, 1]))
    assert torch.equal(part, full[[4, 1]][:, [2]])
    assert torch.equal(full[full != 0], 2 * x[full != 0]) and 0.3 < (full == 0).double().mean() < 0.7


def test_dropout_backward_uses_the_mask_of_forward():
    x = torch.randn(4, 2, 16, dtype=DOUBLE, requires_grad=True)
    output = Dropout(0.25, "x")(x, coordinates([0, 1], list(range(4))))
    output.sum().backward()
    assert torch.equal(x.grad != 0, output != 0) and x.grad.max().item() == pytest.approx(4 / 3)


def test_a_rate_of_zero_or_evaluation_is_the_identity_and_missing_coordinates_are_named():
    x = torch.randn(2, 2, 4)
    assert isinstance(make_dropout(0.0, "x"), NoDropout) and make_dropout(0.0, "x")(x, None) is x
    dropout = make_dropout(0.1, "x")
    with pytest.raises(ValueError, match="coordinates"):
        dropout(x, None)
    assert dropout.eval()(x, None) is x


def test_specs_pass_parameters_and_submodules():
    class Made:
        def __init__(self, *args, **kwargs):
            self.passed = args, kwargs

    spec = ModuleSpec(Made, {"a": 1}, submodules="s")
    for built in (build_module(spec, 2, b=3), spec(2, b=3)):
        assert built.passed == ((2,), {"a": 1, "b": 3, "submodules": "s"})
    assert build_module(Made, 2, b=3).passed == ((2,), {"b": 3})

    def grouped(*args, groups):
        return groups

    assert build_module(ModuleSpec(grouped, params={"groups": SINGLE_PROCESS})) is SINGLE_PROCESS


def test_specs_name_modules_as_in_megatron_lm():
    spec = ModuleSpec(module=("torch.nn", "Linear"), params={"bias": False})
    assert get_module(spec) is torch.nn.Linear and get_module(torch.nn.Linear) is torch.nn.Linear
    built = build_module(spec, 3, out_features=5)
    assert type(built) is torch.nn.Linear and built.weight.shape == (5, 3) and built.bias is None
    with pytest.raises(UserError, match="NoSuchClass"):
        build_module(ModuleSpec(module=("torch.nn", "NoSuchClass")))


def test_a_function_fills_its_slot():
    """Megatron-LM's slots of bias, dropout and addition hold functions."""

    def function(x):
        return x + 1

    for spec in (function, ModuleSpec(function), ModuleSpec(module=(__name__, "_increment"))):
        assert build_module(spec, 2)(2) == 3


def _increment(x):
    return x + 1


def test_a_copy_of_a_layer_computes_with_its_weights():
    config = make_config(attention_dropout=0.0, init_method_std=1.0)
    layer = build_module(get_gpt_layer_local_spec(), config, layer_number=1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    twin, x = copy.deepcopy(layer), torch.randn(5, 2, 24, dtype=DOUBLE)
    assert torch.equal(twin(x), layer(x)) and torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    for parameter in twin.parameters():
        torch.nn.init.zeros_(parameter)
    assert torch.equal(twin(x), x) and not torch.equal(layer(x), x)


def test_branches_of_one_name_are_rejected():
    (attention, mlp), config = get_gpt_layer_local_spec().submodules.branches, make_config()
    with pytest.raises(ValueError, match="parameters are called by these names, one each"):
        TransformerLayer(config, [mlp, attention, mlp], groups=SINGLE_PROCESS)
    other = replace(mlp, name="mlp_before", norm_name="", site="")
    layer = TransformerLayer(config, [other, attention, mlp], groups=SINGLE_PROCESS)
    assert [name for name, _ in layer.named_children()] == [
        "pre_mlp_before_layernorm", "mlp_before", "mlp_before_dropout", "input_layernorm", "self_attention",
        "attention_dropout", "pre_mlp_layernorm", "mlp", "mlp_dropout",
    ]  # fmt: skip


def test_two_branches_do_not_share_a_norm_or_a_dropout_mask_by_accident():
    (attention, mlp), config = get_gpt_layer_local_spec().submodules.branches, make_config()
    for other in (replace(mlp, name="other"), replace(mlp, name="other", norm_name="other_norm")):
        with pytest.raises(UserError, match="given to two modules"):
            TransformerLayer(config, [attention, mlp, other], groups=SINGLE_PROCESS)


class Doubled(torch.nn.Module):
    """Without a context, unlike what it replaces."""

    def forward(self, x):
        return 2 * x


def test_the_modules_of_a_built_layer_can_be_replaced():
    layer = build_module(get_gpt_layer_local_spec(), make_config(), layer_number=1)
    x = torch.randn(5, 2, 24, dtype=DOUBLE)
    layer.pre_mlp_layernorm = layer.mlp = Doubled()
    attended = x + layer.self_attention(layer.input_layernorm(x))
    torch.testing.assert_close(layer(x), attended + 2 * (2 * attended))


class OfOlderArguments(torch.nn.Module):
    def __init__(self, config, groups):
        super().__init__()

    def forward(self, hidden_states, attention_mask=None, rotary_pos_emb=None):
        return hidden_states


def test_a_mixer_to_which_no_one_would_give_its_rotations_is_rejected():
    (attention, _), config = get_gpt_layer_local_spec().submodules.branches, make_config()
    with pytest.raises(UserError, match=r"OfOlderArguments.forward takes attention_mask, .* ctx.attention_mask"):
        TransformerLayer(config, [replace(attention, mixer=OfOlderArguments)], groups=SINGLE_PROCESS)


def test_module_with_custom_forward_does_not_overlap():
    """Two-batch overlap runs only the segments."""

    class Scaled(MLP):
        def forward(self, hidden_states, ctx):
            return 2 * super().forward(hidden_states, ctx)

    class ScaledLayer(TransformerLayer):
        def forward(self, hidden_states, ctx):
            return 2 * super().forward(hidden_states, ctx)

    class Named(MLP):
        pass

    slots, config = get_gpt_layer_local_spec().submodules, make_config()

    def overlaps(layer, mlp):
        local = replace(slots, mlp=ModuleSpec(mlp, submodules=slots.mlp.submodules))
        return layer(config, local, groups=SINGLE_PROCESS).overlaps

    assert overlaps(TransformerLayer, MLP) and overlaps(TransformerLayer, Named)
    assert not overlaps(TransformerLayer, Scaled) and not overlaps(ScaledLayer, MLP)


def test_only_layers_that_run_nothing_but_their_branches_are_cut():
    class Inherits(TransformerLayer):
        pass

    class AddsSomething(TransformerLayer):
        def forward(self, hidden_states, ctx):
            return 2 * super().forward(hidden_states, ctx)

    class BuildsItself(TransformerLayer):
        def __init__(self, config, submodules, layer_number=1, *, groups=None):
            super().__init__(config, submodules, layer_number, groups=groups)

    slots = get_gpt_layer_local_spec().submodules
    for kind in (TransformerLayer, Inherits):
        assert [layer_branch.name for layer_branch in layer_branches(ModuleSpec(kind, submodules=slots))] == [
            "self_attention",
            "mlp",
        ]
    for kind in (AddsSomething, BuildsItself, torch.nn.Linear, lambda config: None):
        assert layer_branches(ModuleSpec(kind, submodules=slots)) is None
    assert [
        layer_branch.name
        for layer_branch in layer_branches(ModuleSpec(TransformerLayer, submodules=slots.branches[:1] * 3))
    ] == ["self_attention"] * 3


@pytest.mark.parametrize(
    "fields, reading, writing, embedding",
    [
        ({}, Normal(0.02), Normal(0.01), Normal(0.02)),
        ({"init_method_std": 0.1}, Normal(0.1), Normal(0.05), Normal(0.1)),
        ({"embedding_init_method_std": 0.3}, Normal(0.02), Normal(0.01), Normal(0.3)),
        ({"init_method_xavier_uniform": True}, XavierUniform(), XavierUniform(), XavierUniform()),
        (
            {"init_method_xavier_uniform": True, "embedding_init_method_std": 0.3},
            XavierUniform(), XavierUniform(), Normal(0.3),
        ),
    ],
)  # fmt: skip
def test_initial_values_follow_from_the_configuration(fields, reading, writing, embedding):
    """Two layers: what writes into the residual stream has a standard deviation of half of that."""
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **fields)
    assert (weight_init(config), output_weight_init(config), embedding_init(config)) == (reading, writing, embedding)


def test_mixer_receives_arguments_of_its_signature():
    assert accepts_context(lambda x, ctx: x) and accepts_context(lambda x, *rest: x)
    assert not accepts_context(lambda x: x)


def test_word_embeddings_are_padded_to_128_rows():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    embedding = LanguageModelEmbedding(config, 100, 4, learned_positions=False, groups=SINGLE_PROCESS)
    assert embedding.word_embeddings.weight.shape == (128, 8)
