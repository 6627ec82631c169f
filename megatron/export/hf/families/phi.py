"""Phi 1 to 2 (``phi``): parallel branches with one norm, a part of the channels rotated, biases also in the output."""

from megatron.export.hf.attention_settings import Rope, groups
from megatron.export.hf.families import gpt, llama
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Choice, Fixed, Same

PHI = Family(
    "phi", "PhiForCausalLM", models="Phi 1, 1.5, 2",
    config=(
        *llama.SIZES, llama.FFN, llama.HEAD_SIZE, groups(), llama.tied(False), Rope(share=0.5),
        Choice("hidden_act", gpt.GELU, default="gelu_new"), Same("norm_epsilon", "layer_norm_eps", default=1e-5),
        Same("qk_layernorm", "qk_layernorm", default=False),
        Same("attention_dropout", "attention_dropout", default=0.0),
        Same("hidden_dropout", "resid_pdrop", default=0.0), Same("hidden_dropout", "embd_pdrop", default=0.0),
        Fixed({"normalization": "LayerNorm", "add_bias_linear": True, "output_layer_bias": True,
              "use_parallel_residual": True, "share_parallel_norm": True}),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION,
        "decoder.final_layernorm": "model.final_layernorm",
        "decoder.layers.*.self_attention.linear_proj": "model.layers.*.self_attn.dense",
        "decoder.layers.*.self_attention.q_layernorm": "model.layers.*.self_attn.q_layernorm",
        "decoder.layers.*.self_attention.k_layernorm": "model.layers.*.self_attn.k_layernorm",
        "decoder.layers.*.mlp.linear_fc1": "model.layers.*.mlp.fc1",
        "decoder.layers.*.mlp.linear_fc2": "model.layers.*.mlp.fc2",
    },
    unused=(r".*\.rotary_emb\.inv_freq",),
)  # fmt: skip
