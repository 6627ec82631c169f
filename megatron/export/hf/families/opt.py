"""OPT (``opt``): learned positions from row 2 of their table, ReLU, norms before branches."""

from megatron.export.hf.attention_settings import equal_heads
from megatron.export.hf.families import gpt, llama
from megatron.export.hf.family import Family
from megatron.export.hf.layouts import QueryKeyValue
from megatron.export.hf.settings import Computed, Fixed, FixedKeys, Ignored, Same, Table, get, refuse

LAYER = "model.decoder.layers.*"


def _load_width(config: Table) -> dict[str, object]:
    if (width := get(config, ("word_embed_proj_dim",), config["hidden_size"])) != config["hidden_size"]:
        raise refuse("word_embed_proj_dim", width, "which cannot be represented: only hidden_size can")
    return {}


OPT = Family(
    "opt", "OPTForCausalLM", models="OPT 125M, 1.3B to 66B",
    limits=("projected embeddings and norms after branches (OPT 350M)",),
    config=(
        *llama.SIZES, Same("ffn_hidden_size", "ffn_dim"), equal_heads("num_attention_heads", "hidden_size"),
        llama.tied(True), gpt.activation("activation_function", "relu", relu=True),
        Same("hidden_dropout", "dropout", default=0.1), Same("attention_dropout", "attention_dropout", default=0.0),
        Same("add_bias_linear", "enable_bias", default=True),
        Computed(("word_embed_proj_dim",), (), _load_width, lambda t: {"word_embed_proj_dim": t["hidden_size"]}),
        Fixed({"position_embedding_type": "learned_absolute", "learned_position_offset": 2,
              "normalization": "LayerNorm", "norm_epsilon": 1e-5}),
        FixedKeys({"do_layer_norm_before": True, "layer_norm_elementwise_affine": True,
                   "_remove_final_layer_norm": False}),
        Ignored(("init_std", "layerdrop", "activation_dropout", "prefix")), llama.NO_PADDING,
    ),
    weights={
        "embedding.word_embeddings": "model.decoder.embed_tokens",
        "embedding.position_embeddings": "model.decoder.embed_positions",
        "decoder.layers.*.input_layernorm": f"{LAYER}.self_attn_layer_norm",
        "decoder.layers.*.self_attention.linear_qkv": QueryKeyValue(
            *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")
        ),
        "decoder.layers.*.self_attention.linear_proj": f"{LAYER}.self_attn.out_proj",
        "decoder.layers.*.pre_mlp_layernorm": f"{LAYER}.final_layer_norm",
        "decoder.layers.*.mlp.linear_fc1": f"{LAYER}.fc1",
        "decoder.layers.*.mlp.linear_fc2": f"{LAYER}.fc2",
        "decoder.final_layernorm": "model.decoder.final_layer_norm",
        "output_layer": "lm_head",
    },
)  # fmt: skip
