"""Functions around models that programs import: what they compute, and parallel attributes of parameters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.compat import model_functions
from megatron.compat.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core import parallel_state, tensor_parallel
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec


def make_model(**fields):
    sizes = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "swiglu": True,
        "use_cpu_initialization": True,
    }
    return GPTModel(TransformerConfig(**sizes, **fields), get_gpt_layer_local_spec(), 64, 16)


def _attributes(rank, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = make_model(tensor_model_parallel_size=2)
    result = {}
    for name, param in model.named_parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
        result[name] = param.tensor_model_parallel, param.partition_dim, param.partition_stride
    same = model_functions.check_param_hashes_across_dp_replicas([model])
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    return result, same, model_functions.check_param_hashes_across_dp_replicas([model])


def test_parallel_attributes_follow_from_the_declaration(gloo_pool):
    for found, same, different in gloo_pool.run(_attributes, 2):
        layer = "decoder.layers.0."
        assert found["embedding.word_embeddings.weight"] == (True, 0, 1)
        assert (
            found[layer + "self_attention.linear_qkv.weight"] == found[layer + "mlp.linear_fc1.weight"] == (True, 0, 1)
        )
        assert found[layer + "mlp.linear_fc2.weight"] == (True, 1, 1)
        assert found[layer + "mlp.linear_fc2.bias"] == found["decoder.final_layernorm.weight"] == (False, -1, 1)
        assert same and not different


def test_attributes_that_a_program_set_stay():
    param = nn.Parameter(torch.zeros(2))
    param.tensor_model_parallel = True
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    assert (param.tensor_model_parallel, param.partition_dim, param.partition_stride) == (True, -1, 1)


def test_float16_module_computes_in_its_format_and_returns_fp32():
    model = make_model(hidden_dropout=0.0, attention_dropout=0.0)
    names = list(model.state_dict())
    wrapped = model_functions.Float16Module(SimpleNamespace(bf16=True, fp16=False), model)
    assert list(wrapped.state_dict()) == names and {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}
    tokens = torch.arange(16).view(2, 8)
    logits = wrapped(tokens, torch.arange(8).expand(2, -1))
    assert logits.dtype == torch.float32 and torch.equal(logits, model(tokens, torch.arange(8).expand(2, -1)).float())
    with pytest.raises(ValueError, match="neither fp16 nor bf16"):
        model_functions.Float16Module(SimpleNamespace(bf16=False, fp16=False), model)


def test_rotation_and_residual_addition():
    x, angles = torch.randn(3, 1, 2, 6, dtype=torch.float64), torch.rand(3, 1, 1, 2, dtype=torch.float64)
    rotated = _apply_rotary_pos_emb_bshd(x, torch.cat((angles, angles), -1))
    pairs = torch.view_as_complex(torch.stack((x[..., :2], x[..., 2:4]), -1)) * torch.polar(
        torch.ones_like(angles), angles
    )
    torch.testing.assert_close(rotated, torch.cat((pairs.real, pairs.imag, x[..., 4:]), -1))
    add = model_functions.get_bias_dropout_add(False)
    torch.testing.assert_close(add((x, x), x, 0.5), 3 * x)
    torch.testing.assert_close(add((x, None), x, 0.5), 2 * x)


def test_star_imports_provide_the_names_that_megatron_imports():
    for module in ("core.transformer.attention", "core.transformer.transformer_block"):
        space = {}
        exec(f"from megatron.{module} import *", space)
        assert {"Optional", "Tensor", "Union", "Tuple", "PackedSeqParams", "BaseInferenceContext"} <= space.keys()
        assert {"SelfAttention", "TransformerBlock"} & space.keys()


def test_windows_of_layers_follow_megatron_lms_rule():
    from megatron.core.transformer.utils import is_layer_window_attention

    cases = [(None, 2, [0, 0, 0]), ((4, 0), None, [1, 1, 1]), ((4, 0), 2, [1, 0, 1]), ((4, 0), [0, 1, 1], [0, 1, 1])]
    for window, skipped, expected in cases:
        assert [is_layer_window_attention(window, skipped, number) for number in (1, 2, 3)] == expected
