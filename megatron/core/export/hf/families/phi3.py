"""Phi-3 and Phi-4 (``Phi3ForCausalLM``): LLaMA with one matrix for queries, keys and values, one for both halves."""

from megatron.core.export.hf.attention_settings import Rope, Window, groups
from megatron.core.export.hf.families import llama
from megatron.core.export.hf.family import Family
from megatron.core.export.hf.layouts import QueryKeyValue
from megatron.core.export.hf.settings import Ignored, Same

FAMILY = Family(
    "phi3", "Phi3ForCausalLM",
    config=(
        *llama.SIZES, llama.FFN, llama.HEAD_SIZE, groups(), *llama.rms_norm(1e-5), llama.tied(False),
        llama.SILU_GATED, llama.NO_BIASES, Window(), Rope(share=1.0, kinds=("default",)),
        Same("attention_dropout", "attention_dropout", default=0.0),
        Same("hidden_dropout", "resid_pdrop", default=0.0), Same("hidden_dropout", "embd_pdrop", default=0.0),
        Ignored(("original_max_position_embeddings",)),
    ),
    weights={
        **llama.AROUND, **llama.ATTENTION,
        "decoder.layers.*.self_attention.linear_qkv": QueryKeyValue("model.layers.*.self_attn.qkv_proj"),
        "decoder.layers.*.mlp.linear_fc1": "model.layers.*.mlp.gate_up_proj",
        "decoder.layers.*.mlp.linear_fc2": "model.layers.*.mlp.down_proj",
    },
)  # fmt: skip
