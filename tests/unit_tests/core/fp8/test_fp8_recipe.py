"""Recipes put linear layers of transformer layers into fp8, by global number, and nothing else."""

import pytest
import torch

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fp8.experts import ExpertGemms
from megatron.core.fp8.gemms import BlockwiseGemms, Fp8Gemms, PerTensorGemms
from megatron.core.fp8.recipe import fp8_gemms, fp8_stacks, scale_tensors
from megatron.core.fusions.fp8_cast import E4M3, E5M2
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from tests.test_utils.layouts import MODEL, configure

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def build(**settings):
    values = {"num_layers": 3, "hidden_size": 128, "num_attention_heads": 2, "bf16": False, "fp8": "hybrid"}
    config = TransformerConfig(**values | settings)
    spec = get_gpt_decoder_block_spec(config, False)
    mtp = get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None
    return GPTModel(config, spec, 32, 16, mtp_block_spec=mtp, share_embeddings_and_output_weights=False)


def places(model):
    """Names of the layers in fp8."""
    return {
        name for name, module in model.named_modules()
        if isinstance(getattr(getattr(module, "traits", None), "gemms", None), Fp8Gemms)
    }  # fmt: skip


def linears(*layers):
    return {f"decoder.layers.{layer}.{name}" for layer in layers for name in LINEARS}


@pytest.mark.parametrize(
    "recipe, kind", [("delayed", PerTensorGemms), ("tensorwise", PerTensorGemms), ("blockwise", BlockwiseGemms)]
)
@pytest.mark.parametrize("fp8, gradients", [("hybrid", E5M2), ("e4m3", E4M3)])
def test_linear_layers_of_all_layers_are_in_fp8(recipe, kind, fp8, gradients):
    model = build(fp8_recipe=recipe, fp8=fp8)
    assert places(model) == linears(0, 1, 2)
    for gemms in fp8_gemms(model):
        assert type(gemms) is kind and gemms.gradient_format == gradients and gemms.keeps_weights
        assert gemms.fast_output == (recipe != "blockwise") and gemms.weight_gradients
        assert (getattr(gemms, "history", None) is not None) == (recipe == "delayed")


def test_without_fp8_no_layer_has_fp8_gemms():
    assert places(build(fp8=None)) == set() and fp8_stacks(build(fp8=None)) == {}


@pytest.mark.parametrize("start, end, kept", [(1, 1, {1}), (0, 2, {0}), (2, 0, {2}), (0, 0, {0, 1, 2}), (3, 0, set())])
def test_first_and_last_layers_keep_the_dtype_of_the_model(start, end, kept):
    model = build(fp8_recipe="tensorwise", first_last_layers_bf16=True, num_layers_at_start_in_bf16=start,
                  num_layers_at_end_in_bf16=end)  # fmt: skip
    assert places(model) == linears(*kept)


def test_experts_routers_output_layer_and_further_prediction_stay():
    model = build(num_moe_experts=4, moe_layer_freq=[0, 1, 1], moe_shared_expert_intermediate_size=32, mtp_num_layers=1,
                  moe_ffn_hidden_size=32)  # fmt: skip
    attention = {f"decoder.layers.{layer}.{name}" for layer in range(3) for name in LINEARS[:2]}
    shared = {f"decoder.layers.{layer}.mlp.shared_experts.linear_fc{i}" for layer in (1, 2) for i in (1, 2)}
    assert places(model) == attention | shared | {f"decoder.layers.0.{name}" for name in LINEARS[2:]}


@pytest.mark.parametrize("recipe, width, in_fp8", [
    ("tensorwise", 6144, True), ("delayed", 6144, True), ("tensorwise", 6128, False), ("blockwise", 6144, False),
])  # fmt: skip
def test_wide_experts_are_in_fp8_with_one_scale_per_matrix(recipe, width, in_fp8, caplog):
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": width, "moe_layer_freq": [0, 1, 1]}
    with caplog.at_level("INFO"):
        model = build(**experts, fp8_recipe=recipe)
    kinds = [type(gemms) is ExpertGemms for gemms in fp8_gemms(model)]
    assert sum(kinds) == (4 if in_fp8 else 0) and len(kinds) == 3 * 2 + 2 + sum(kinds)
    assert ("experts compute in the model's dtype" in caplog.text) == (not in_fp8)
    stored = {name for name in scale_tensors([model]) if ".experts." in name}
    assert len(stored) == (2 * 2 * 2 * 2 if recipe == "delayed" else 0), "layers, GEMMs, matrices, histories"


def test_latent_attention_is_in_fp8():
    model = build(multi_latent_attention=True, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=16, v_head_dim=16,
                  qk_pos_emb_head_dim=16, rope_type="rope")  # fmt: skip
    latents = ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
    names = {f"self_attention.linear_{part}" for part in latents} | {*LINEARS[2:]}
    assert places(model) == {f"decoder.layers.{layer}.{name}" for layer in range(3) for name in names}


def test_no_weight_gradients_in_fp8():
    assert not any(gemms.weight_gradients for gemms in fp8_gemms(build(fp8_wgrad=False)))


def test_scales_of_a_checkpoint_have_global_names():
    tensors = scale_tensors([build(fp8_amax_history_len=5)])
    shapes = {"history": (5,), "factor": (1,)}
    expected = {
        f"fp8.{layer}.{matrix}.{kind}": shape
        for layer in linears(0, 1, 2) for matrix in ("input", "gradient") for kind, shape in shapes.items()
    }  # fmt: skip
    assert {name: tensor.global_shape for name, tensor in tensors.items()} == expected
    assert all(name == tensor.name and tensor.local.shape == tensor.global_shape for name, tensor in tensors.items())
    assert scale_tensors([build(fp8_recipe="tensorwise")]) == {}


def stage(rank, world_size, argv):
    """A task of the pool: the fp8 layers of each model chunk of this pipeline stage, and the stored scales."""
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    cfg = configure(argv, world_size, "fp32")
    parts = build_components(cfg, with_synthetic_data(GPTTask, 61)(cfg), initialize_megatron(cfg))
    chunks = parts.checkpointer.chunks
    return [sorted(places(chunk)) for chunk in chunks], sorted(scale_tensors(chunks))


FLAGS = [*MODEL, "--fp8-format", "hybrid", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]


def test_numbers_and_names_are_global_on_pipeline_stages(gloo_pool):
    split = [*FLAGS, "--num-layers-per-virtual-pipeline-stage", "1"]
    saved = ["--fp8-recipe", "tensorwise", "--first-last-layers-bf16", "--num-layers-at-end-in-bf16", "2"]
    (first, _), (second, _) = gloo_pool.run(stage, 2, split + saved)
    assert first == [[], []] and second == [sorted(linears(1)), []]
    (first, names), (second, rest) = gloo_pool.run(stage, 2, split)
    assert (first, second) == ([sorted(linears(0)), sorted(linears(2))], [sorted(linears(1)), sorted(linears(3))])
    assert not set(names) & set(rest) and len(names) == len(rest) == 2 * 4 * 2 * 2


def test_state_has_the_memory_of_live_scales():
    model = build()
    tensors = scale_tensors([model])
    (stack,) = fp8_stacks(model).values()
    next(iter(tensors.values())).local.fill_(3.0)
    assert stack.history.state(torch.device("cpu"))["history"][0].tolist() == [3.0]
