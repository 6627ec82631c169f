"""GPT-NeoX and Pythia (``GPTNeoXForCausalLM``): query, key and value of a head stand together, as ours do."""

from megatron.core.export.hf.attention_settings import Rope, equal_heads
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.families.gpt2 import GELU
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.settings import Choice, Ignored, Ours, Same, Theirs

FAMILY = Family(
    "gpt_neox", "GPTNeoXForCausalLM",
    config=(
        *llama.SIZES, llama.FFN, Same("norm_epsilon", "layer_norm_eps", default=1e-5),
        equal_heads("hidden_size", "num_attention_heads"), llama.tied(False),
        Choice("hidden_act", GELU, default="gelu"),
        Rope(base_key="rotary_emb_base", share=0.25, share_key="rotary_pct"),
        Ours({"normalization": "LayerNorm", "add_bias_linear": True}),
        Same("use_parallel_residual", "use_parallel_residual", default=True), Theirs({"attention_bias": True}),
        Same("attention_dropout", "attention_dropout", default=0.0),
        Same("hidden_dropout", "hidden_dropout", default=0.0),
        Ignored(("classifier_dropout", "is_decoder")),
    ),
    weights={
        "embedding.word_embeddings": "gpt_neox.embed_in",
        "decoder.layers.*.input_layernorm": "gpt_neox.layers.*.input_layernorm",
        "decoder.layers.*.self_attention.linear_qkv": "gpt_neox.layers.*.attention.query_key_value",
        "decoder.layers.*.self_attention.linear_proj": "gpt_neox.layers.*.attention.dense",
        "decoder.layers.*.pre_mlp_layernorm": "gpt_neox.layers.*.post_attention_layernorm",
        "decoder.layers.*.mlp.linear_fc1": "gpt_neox.layers.*.mlp.dense_h_to_4h",
        "decoder.layers.*.mlp.linear_fc2": "gpt_neox.layers.*.mlp.dense_4h_to_h",
        "decoder.final_layernorm": "gpt_neox.final_layer_norm",
        "output_layer": "embed_out",
    },
    unused=(r".*\.attention\.(masked_)?bias", r".*\.rotary_emb\.inv_freq"),
    base="gpt_neox.",
)  # fmt: skip
