"""Code models of BigCode: StarCoder and SantaCoder (``gpt_bigcode``), StarCoder2 (``starcoder2``)."""

from megatron.export.hf.attention_settings import Rope, Window, derived_head_size, groups, one_group
from megatron.export.hf.families import gpt, llama
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import QueryKeyValue, Weights
from megatron.export.hf.settings import Choice, Fixed, FixedKeys, Ignored, Same

LAYER = "transformer.h.*"


GPT_BIGCODE = Family(
    "gpt_bigcode", "GPTBigCodeForCausalLM", models="StarCoder, SantaCoder",
    config=(
        *gpt.SIZES, one_group("multi_query", "n_head"), derived_head_size("n_head", "n_embd"),
        Choice("activation_function", gpt.GELU, default="gelu_pytorch_tanh"),
        FixedKeys({"scale_attn_weights": True, "add_cross_attention": False}),
        Ignored(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads", "n_ctx",
                 "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
                 "summary_first_dropout", "inference_runner", "validate_runner_input", "pre_allocate_kv_cache",
                 "max_sequence_length", "max_batch_size")),
    ),
    weights={
        **gpt.GPT2.weights,
        "decoder.layers.*.self_attention.linear_qkv": QueryKeyValue(f"{LAYER}.attn.c_attn"),
        "decoder.layers.*.self_attention.linear_proj": f"{LAYER}.attn.c_proj",
        "decoder.layers.*.mlp.linear_fc1": f"{LAYER}.mlp.c_fc",
        "decoder.layers.*.mlp.linear_fc2": f"{LAYER}.mlp.c_proj",
    },
    unused=gpt.GPT2.unused,
    base="transformer.",
)  # fmt: skip
"""GPT-2 with one head of keys and values and matrices [out, in]."""

PLAIN_MLP: Weights = {
    "decoder.layers.*.mlp.linear_fc1": "model.layers.*.mlp.c_fc",
    "decoder.layers.*.mlp.linear_fc2": "model.layers.*.mlp.c_proj",
}
STARCODER2 = Family(
    "starcoder2", "Starcoder2ForCausalLM", models="StarCoder2",
    config=(
        *llama.SIZES, llama.FFN, llama.HEAD_SIZE, groups(2), llama.tied(True), Rope(), Window(),
        Same("norm_epsilon", "norm_epsilon", default=1e-5),
        Choice("hidden_act", gpt.GELU, default="gelu_pytorch_tanh"),
        Same("attention_dropout", "attention_dropout", default=0.0),
        Same("hidden_dropout", "residual_dropout", default=0.0),
        Same("hidden_dropout", "embedding_dropout", default=0.0),
        Fixed({"normalization": "LayerNorm", "add_bias_linear": True}),
        # without biases the activation here is always the exact GELU; the flags are ignored
        FixedKeys({"use_bias": True, "norm_type": "layer_norm", "mlp_type": "default", "scale_attn_weights": True}),
        Ignored(("activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32",
                 "scale_attention_softmax_in_fp32")),
    ),
    weights={**llama.WEIGHTS, **PLAIN_MLP},
)  # fmt: skip
"""LayerNorm, biases everywhere, no gate, and a sliding window in all layers."""
