"""Tiny models of the package ``transformers``, with the equivalent local flags and weight names.

A family is a row of data. A table in the format of ``export/hf`` maps its tensors and the layout of queries, keys
and values: the exporter's table for a family that can be converted, a table of this file for any other. Weights and
gradients use the same (linear) rearrangement, so a comparison needs one map only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.hf import conversion
from megatron.export.hf.families import deepseek as deepseek_tables
from megatron.export.hf.families import (
    falcon,
    gated_delta,
    glm,
    gpt,
    granite,
    kimi_linear,
    llama,
    mamba2,
    mixtures,
    nemotron_h,
    olmo_hybrid,
    opt,
    phi,
    squared_relu,
    starcoder,
)
from megatron.export.hf.family import Family as Table
from megatron.export.hf.family import complete
from megatron.export.hf.layouts import BlockParts, Weights

VOCAB, LENGTH = 53, 24
LAYERS, HIDDEN, HEADS = 2, 32, 4

ATTENTION, MLP = "decoder.layers.*.self_attention", "decoder.layers.*.mlp"
LAYER = "model.layers.*"
LLAMA = llama.WEIGHTS
PERSIMMON: Weights = {
    **LLAMA, f"{ATTENTION}.linear_qkv": f"{LAYER}.self_attn.query_key_value",
    f"{ATTENTION}.q_layernorm": f"{LAYER}.self_attn.q_layernorm",
    f"{ATTENTION}.k_layernorm": f"{LAYER}.self_attn.k_layernorm",
    f"{ATTENTION}.linear_proj": f"{LAYER}.self_attn.dense", f"{MLP}.linear_fc1": f"{LAYER}.mlp.dense_h_to_4h",
    f"{MLP}.linear_fc2": f"{LAYER}.mlp.dense_4h_to_h", "decoder.final_layernorm": "model.final_layernorm",
}  # fmt: skip
EXPERTS_IN_MEMORY: Weights = {
    f"{MLP}.experts.linear_fc1.weight": f"{LAYER}.mlp.experts.gate_up_proj",
    f"{MLP}.experts.linear_fc2.weight": f"{LAYER}.mlp.experts.down_proj",
}
"""One tensor of all experts, which files hold one by one."""
MIXTURE: Weights = {**LLAMA, **llama.EXPERTS, **EXPERTS_IN_MEMORY}
QWEN2_MIXTURE: Weights = {**mixtures.QWEN2_MOE.weights, **EXPERTS_IN_MEMORY}
DEEPSEEK: Weights = {**mixtures.DEEPSEEK_V3.weights, **EXPERTS_IN_MEMORY}
DEEPSEEK_V2: Weights = {**deepseek_tables.DEEPSEEK_V2.weights, **EXPERTS_IN_MEMORY}
GLM4_MIXTURE: Weights = {**glm.GLM4_MOE.weights, **EXPERTS_IN_MEMORY}
QWEN3_NEXT: Weights = {**gated_delta.QWEN3_NEXT.weights, **EXPERTS_IN_MEMORY}
GRANITE_4: Weights = {
    **granite.GRANITE_4.weights,
    f"{MLP}.router": f"{LAYER}.block_sparse_moe.router",
    f"{MLP}.experts.linear_fc1.weight": f"{LAYER}.block_sparse_moe.experts.gate_up_proj",
    f"{MLP}.experts.linear_fc2.weight": f"{LAYER}.block_sparse_moe.experts.down_proj",
}
NEMOTRON: Weights = {
    **nemotron_h.names(LAYER), "embedding.word_embeddings": "model.embeddings", "output_layer": "lm_head",
    "decoder.final_layernorm": "model.norm_f",
    f"{MLP}.experts.linear_fc1.weight": f"{LAYER}.mixer.experts.up_proj",
    f"{MLP}.experts.linear_fc2.weight": f"{LAYER}.mixer.experts.down_proj",
}  # fmt: skip
KIMI: Weights = {  # as in memory
    **mixtures.DEEPSEEK_V3.weights, **EXPERTS_IN_MEMORY,
    **kimi_linear.delta_weights(f"{LAYER}.self_attn", f"{LAYER}.self_attn.forget_gate"),
    f"{ATTENTION}.conv1d": BlockParts(
        [f"{LAYER}.self_attn.conv1d"], [(0, 1, 2)], lambda config: kimi_linear.rows(config)[:3]),
}  # fmt: skip
OLMO_HYBRID: Weights = {  # as in memory
    **olmo_hybrid.OLMO_HYBRID.weights,
    **olmo_hybrid.mixer(BlockParts([f"{LAYER}.linear_attn.conv1d"], [(0, 1, 2)], lambda c: gated_delta.rows(c)[:3])),
}  # fmt: skip
NEOX: Weights = {**gpt.GPT_NEOX.weights, "output_layer": "lm_head"}  # as in memory
GPT2, FUSED, GPT_OSS = (each.weights for each in (gpt.GPT2, llama.PHI3, mixtures.GPT_OSS))
GEMMA = OLMO = llama.POST_NORMS


@dataclass(frozen=True, eq=False)
class Family:
    """One model: its class in ``transformers``, settings there, flags here."""

    architecture: str
    weights: Mapping
    settings: dict
    flags: str


def flags_of(model: Family) -> list[str]:
    """The whole command line."""
    layers = "" if "--hybrid-layer-pattern" in model.flags else f"--num-layers {LAYERS}"
    sizes = f"{layers} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {LENGTH}"
    rest = "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 1"
    return f"{sizes} {rest} --hidden-dropout 0 --attention-dropout 0 {model.flags}".split()


def build(model: Family) -> torch.nn.Module:
    """The foreign model in float32; norms, biases and buffers of routers are random too, so that each of them
    matters."""
    import transformers

    common = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "max_position_embeddings": 64, "initializer_range": 0.2, "attn_implementation": "eager",
        "experts_implementation": "eager",
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    kinds = [f"{model.architecture}TextConfig", f"{model.architecture}Config"]
    config_class = next(getattr(transformers, name) for name in kinds if hasattr(transformers, name))
    config = config_class(**{**common, **model.settings})
    names = [f"{model.architecture}ForCausalLM", f"{model.architecture}LMHeadModel"]
    model_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    torch.manual_seed(7)
    foreign = model_class(config).float().eval()
    with torch.no_grad():
        for name, value in foreign.state_dict().items():
            if value.dim() == 1 or name.endswith("_bias"):
                value.add_(torch.randn(value.shape) * 0.2)
    return foreign


@cache
def _plan(model: Family, more: str) -> dict[str, conversion.Placement]:
    """Local name of each tensor -> its placement in the HF tensors."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.stored_settings import config_to_dict

    cfg = validate_args(parse_args([*flags_of(model), *more.split()], needs_data=False), 1)
    blocks = 2 if model.architecture in ("Bamba", "GraniteMoeHybrid") else 1
    table = Table("", "", (), model.weights, layers_per_block=blocks)
    result = conversion.placements(table, complete({**config_to_dict(cfg.flat), "vocab_size": VOCAB}))
    return {placement.name: placement for placement in result}


def to_ours(tensors: Mapping[str, torch.Tensor], model: Family, more: str = "") -> dict[str, torch.Tensor]:
    """Return the available weights (or gradients) of the foreign model under the names of ``GPTModel``: [out, in], for
    experts [e, out, in]. ``more``: additional local flags."""
    retained = {name: LazyTensor.of(tensor.detach()) for name, tensor in tensors.items()}
    plan = [each for each in _plan(model, more).values() if each.parts[0].name in retained]
    result = conversion.to_local(plan, retained)
    values = {each.name: result[f"model.{each.name}"].read() for each in plan}
    return {name: _flat(name, value) for name, value in values.items()}


def _flat(name: str, value: torch.Tensor) -> torch.Tensor:
    """``value`` without the dimensions that groups of heads, and gates, have here."""
    first, retained = int(".experts." in name), 2 if name.endswith("weight") and "norm" not in name else 1
    retained += "conv1d" in name
    return value.flatten(first, max(value.ndim - retained, first))


ROPE = "--position-embedding-type rope"
RMS = f"{ROPE} --normalization RMSNorm --disable-bias-linear --norm-epsilon 1e-3"
SWIGLU = f"{RMS} --swiglu --ffn-hidden-size 48"
UNTIED = "--untie-embeddings-and-output-weights"
GROUPS = "--group-query-attention --num-query-groups"
LAYERNORM = f"{ROPE} --norm-epsilon 1e-3 --ffn-hidden-size 48"
GATED = {"intermediate_size": 48, "rms_norm_eps": 1e-3, "tie_word_embeddings": False, "num_key_value_heads": HEADS}

DELTA = {
    "num_key_value_heads": 2, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
DELTA_FLAGS = (
    f"{GROUPS} 2 --kv-channels 16 --qk-layernorm --apply-layernorm-1p --rotary-percent 0.25 --attention-output-gate "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 6"
)


OLMO_DELTA = {
    "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4,
}  # fmt: skip
OLMO_FLAGS = (
    f"{GROUPS} 2 --qk-layernorm --qk-layernorm-across-heads --norm-placement mixed --linear-norm-epsilon 1e-5 "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 4 --linear-allow-neg-eigval"
)
BAMBA_SIZES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.25,
}
GRANITE_FLAGS = "--embedding-multiplier 3 --logits-scaling 4 --residual-multiplier 0.22 --softmax-scale 0.25"
MAMBA_SIZES = "--mamba-state-dim 6 --mamba-num-heads 8 --mamba-head-dim 4 --mamba-num-groups 2"


def rope(base=10000.0, kind="default", **more):
    """``rope_parameters`` of a configuration."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **more}}


def llama(flags="", **settings):
    return Family("Llama", LLAMA, {**GATED, **rope(), **settings}, f"{SWIGLU} {UNTIED} {flags}")


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GPT2_SIZES = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "layer_norm_epsilon": 1e-3}
GPT2_SETTINGS = {**GPT2_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LN = {"intermediate_size": 48, "num_key_value_heads": HEADS, "tie_word_embeddings": False}
SLIDING = {"sliding_window": 6}
GLM_SETTINGS = {**GATED, "head_dim": 8, "attention_bias": True, "num_key_value_heads": 2,
                **rope(partial_rotary_factor=0.5)}  # fmt: skip
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk"
MOE = {**GATED, **rope(), "moe_intermediate_size": 24, "num_experts": 8}
"""8 experts of width 24."""


def gemma(architecture, weights, flags="", **settings):
    """Heads of 12 channels, two of keys and values, tied embeddings that are scaled, norms that store weights - 1."""
    settings = {**GATED, **rope(), "head_dim": 12, "num_key_value_heads": 2, "tie_word_embeddings": True, **settings}
    shape = f"--geglu --ffn-hidden-size 48 --kv-channels 12 {GROUPS} 2 --apply-layernorm-1p --apply-embedding-scaling"
    return Family(architecture, weights, settings, f"{RMS} {shape} {flags}")


def neox(parallel, flags=""):
    """GPT-NeoX with sequential or parallel branches."""
    return Family(
        "GPTNeoX", NEOX,
        {"intermediate_size": 48, "layer_norm_eps": 1e-3, "use_parallel_residual": parallel, "hidden_act": "gelu",
         "tie_word_embeddings": False, **rope(partial_rotary_factor=0.25)},
        f"{LAYERNORM} {UNTIED} --rotary-percent 0.25 --no-bias-gelu-fusion {flags}",
    )  # fmt: skip


CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20, **SLIDING}
GEMMA2 = "--norm-placement sandwich --softmax-scale 0.22360679774997896 --window-size 5,0 --window-attn-skip-freq"
CAPS = "--attn-logit-softcapping 2 --final-logit-softcapping 3"
GEMMA3_ROTATIONS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "rms_norm_eps": 1e-6}
LATENT_FLAGS = (
    f"{ROPE} --normalization RMSNorm --disable-bias-linear --norm-epsilon 1e-6 --swiglu --ffn-hidden-size 48 {UNTIED}"
    " --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 10"
    " --qk-layernorm"
)


def deepseek(attention, yarn=False, topk=4, groups=(4, 2), **settings):
    """DeepSeek-V3 of 8 experts in groups[0] groups; each token chooses ``topk`` experts of groups[1] groups; a dense
    layer first. The norms of its latents have a separate epsilon, 1e-6."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9}
    positions = rope(kind="yarn", **scaling) if yarn else rope()
    experts = {"n_routed_experts": 8, "n_group": groups[0], "topk_group": groups[1], "num_experts_per_tok": topk,
               "n_shared_experts": 2}  # fmt: skip
    return Family(
        "DeepseekV3", DEEPSEEK,
        {**GATED, **positions, **LATENT, **experts, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
         "routed_scaling_factor": 2.5, **settings},
        f"{LATENT_FLAGS} {attention} {EXPERTS} {topk} --moe-layer-freq [0,1]"
        f" --moe-router-score-function sigmoid --moe-router-num-groups {groups[0]} --moe-router-group-topk {groups[1]}"
        " --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5"
        " --moe-shared-expert-intermediate-size 48",
    )  # fmt: skip


STRETCHED = {"factor": 40.0, "original_max_position_embeddings": 16}


def dense_deepseek(flags, yarn=None, **settings):
    """DeepSeek-V3 whose layers are all dense; ``yarn``: weights of the temperature."""
    positions = rope() if yarn is None else rope(kind="yarn", **STRETCHED, **yarn)
    latent = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "rms_norm_eps": 1e-6}
    return Family(
        "DeepseekV3", DEEPSEEK,
        {**GATED, **positions, **latent, "q_lora_rank": 16, "first_k_dense_replace": LAYERS, **settings},
        f"{ROPE} --normalization RMSNorm --disable-bias-linear --norm-epsilon 1e-6 --swiglu --ffn-hidden-size 48"
        f" {UNTIED} --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
        f" --qk-layernorm {flags}",
    )  # fmt: skip


PARALLEL = {"intermediate_size": 48, "layer_norm_eps": 1e-3}
ONE_NORM = "--use-parallel-residual --share-parallel-norm"
FALCON_SETTINGS = {"ffn_hidden_size": 48, "layer_norm_epsilon": 1e-3}
STRETCH = "--rotary-scaling-factor 40 --yarn-original-max-position-embeddings 16"
MODELS = {
    "deepseek-v3-dense": dense_deepseek(
        f"--q-lora-rank 16 {STRETCH} --mscale-all-dim 1", {"mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "deepseek-v3-dense-other-temperature": dense_deepseek(
        f"--q-lora-rank 16 {STRETCH} --mscale 0.7 --mscale-all-dim 0.5", {"mscale": 0.7, "mscale_all_dim": 0.5}
    ),
    "deepseek-v3-dense-plain-rotation": dense_deepseek("--q-lora-rank 16 --rope-type rope"),
    "deepseek-v3-dense-queries-of-the-stream": dense_deepseek(
        "--rotary-base 500", q_lora_rank=None, **rope(500.0)
    ),
    "opt": Family("OPT", opt.OPT.weights, {"ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.0},
                  "--relu --ffn-hidden-size 48 --learned-position-offset 2"),
    "phi": Family("Phi", phi.PHI.weights, {**PARALLEL, **rope(partial_rotary_factor=0.5)},
                  f"{LAYERNORM} {UNTIED} {ONE_NORM} --rotary-percent 0.5 --output-layer-bias"),
    "cohere": Family("Cohere", LLAMA, {**PARALLEL, **rope(), "num_key_value_heads": 2},
                     f"{LAYERNORM} --swiglu {ONE_NORM} --disable-norm-bias --disable-bias-linear --rotary-interleaved"
                     f" --logits-scaling 16 {GROUPS} 2"),
    "falcon-7b": Family("Falcon", falcon.FALCON.weights, {**FALCON_SETTINGS, **rope(300.0)},
                        f"{LAYERNORM} {ONE_NORM} --disable-bias-linear --rotary-base 300 {GROUPS} 1"),
    "falcon-40b": Family(
        "Falcon", {**falcon.FALCON.weights, **falcon.TWO_NORMS},
        {**FALCON_SETTINGS, **rope(), "new_decoder_architecture": True, "num_kv_heads": 2},
        f"{LAYERNORM} --use-parallel-residual --disable-bias-linear {GROUPS} 2",
    ),
    "gpt2": Family("GPT2", GPT2, GPT2_SETTINGS, "--norm-epsilon 1e-3"),
    "gpt2-exact-gelu": Family(
        "GPT2", GPT2, {**GPT2_SETTINGS, "activation_function": "gelu"}, "--norm-epsilon 1e-3 --no-bias-gelu-fusion"
    ),
    "gpt2-narrow-ffn": Family("GPT2", GPT2, {**GPT2_SETTINGS, "n_inner": 40},
                              "--norm-epsilon 1e-3 --ffn-hidden-size 40"),
    "gpt2-untied": Family("GPT2", GPT2, {**GPT2_SETTINGS, "tie_word_embeddings": False},
                          f"--norm-epsilon 1e-3 {UNTIED}"),
    "gpt-bigcode": Family("GPTBigCode", starcoder.GPT_BIGCODE.weights, GPT2_SETTINGS,
                          f"--norm-epsilon 1e-3 {GROUPS} 1"),
    "llama": llama(),
    "llama-tied": Family("Llama", LLAMA, {**GATED, **rope(), "tie_word_embeddings": True}, SWIGLU),
    "llama-groups": llama(f"{GROUPS} 2", num_key_value_heads=2),
    "llama-one-group": llama(f"{GROUPS} 1", num_key_value_heads=1),
    "llama-wide-heads": llama("--kv-channels 12", head_dim=12),
    "llama-biases": Family(
        "Llama", LLAMA, {**GATED, **rope(), "attention_bias": True, "mlp_bias": True},
        f"{ROPE} --normalization RMSNorm --norm-epsilon 1e-3 --swiglu --ffn-hidden-size 48 {UNTIED}",
    ),
    "llama-base": llama("--rotary-base 500000", **rope(500000.0)),
    "llama-linear-scaling": llama("--rotary-seq-len-interpolation-factor 4", **rope(kind="linear", factor=4.0)),
    "llama3-scaling": llama("--use-rope-scaling --rotary-base 500000",
                            **rope(500000.0, kind="llama3", factor=8.0, **LLAMA3)),
    "llama3.2-scaling": llama("--use-rope-scaling --rope-scaling-factor 32",
                              **rope(kind="llama3", factor=32.0, **LLAMA3)),
    "llama-yarn": Family(
        "Llama", LLAMA, {**GATED, **rope(kind="yarn", factor=4.0, original_max_position_embeddings=16)},
        f"{SWIGLU} {UNTIED} --position-embedding-type yarn --rotary-scaling-factor 4"
        " --yarn-original-max-position-embeddings 16",
    ),
    "mistral": Family("Mistral", LLAMA, {**GATED, **rope(), **SLIDING},
                      f"{SWIGLU} {UNTIED} --window-size 5,0"),
    "mistral-wide-heads": Family("Mistral", LLAMA, {**GATED, **rope(), "sliding_window": None, "head_dim": 16},
                                 f"{SWIGLU} {UNTIED} --kv-channels 16"),
    "qwen2": Family("Qwen2", LLAMA, {**GATED, **rope(), "num_key_value_heads": 2},
                    f"{SWIGLU} {UNTIED} --add-qkv-bias {GROUPS} 2"),
    "qwen2-tied": Family("Qwen2", LLAMA, {**GATED, **rope(1e6), "tie_word_embeddings": True},
                         f"{SWIGLU} --add-qkv-bias --rotary-base 1000000"),
    "qwen2-some-windows": Family(
        "Qwen2", LLAMA, {**GATED, **rope(), **SLIDING, "use_sliding_window": True, "max_window_layers": 1},
        f"{SWIGLU} {UNTIED} --add-qkv-bias --window-size 5,0 --window-attn-skip-freq [0,1]",
    ),
    "qwen3": Family("Qwen3", LLAMA, {**GATED, **rope(), "head_dim": 8}, f"{SWIGLU} {UNTIED} --qk-layernorm"),
    "qwen3-wide-heads-groups": Family(
        "Qwen3", LLAMA, {**GATED, **rope(), "head_dim": 20, "num_key_value_heads": 2},
        f"{SWIGLU} {UNTIED} --qk-layernorm --kv-channels 20 {GROUPS} 2",
    ),
    "phi3": Family("Phi3", FUSED, {**GATED, **rope(), "resid_pdrop": 0.0, "num_key_value_heads": 2},
                   f"{SWIGLU} {UNTIED} {GROUPS} 2"),
    "phi4-partial-rotary": Family("Phi3", FUSED, {**GATED, **rope(partial_rotary_factor=0.75)},
                                  f"{SWIGLU} {UNTIED} --rotary-percent 0.75"),
    "glm-interleaved": Family(
        "Glm", glm.GLM.weights, GLM_SETTINGS,
        f"{SWIGLU} {UNTIED} --add-qkv-bias --rotary-percent 0.5 --rotary-interleaved {GROUPS} 2",
    ),
    "glm4-sandwich": Family(
        "Glm4", glm.GLM4.weights, GLM_SETTINGS,
        f"{SWIGLU} {UNTIED} --add-qkv-bias --rotary-percent 0.5 --rotary-interleaved --norm-placement sandwich"
        f" {GROUPS} 2",
    ),
    "helium": Family("Helium", LLAMA, {**GATED, **rope(), "head_dim": 8},
                     f"{SWIGLU} {UNTIED} --rotary-interleaved"),
    "ernie4.5": Family("Ernie4_5", LLAMA, {**GATED, **rope(), "head_dim": 8, "use_bias": False},
                       f"{SWIGLU} {UNTIED} --rotary-interleaved"),
    "seed-oss": Family(
        "SeedOss", LLAMA, {**GATED, **rope(), "head_dim": 8, "attention_bias": True, "attention_out_bias": False,
                           "residual_dropout": 0.0, "attention_dropout": 0.0},
        f"{SWIGLU} {UNTIED} --add-qkv-bias",
    ),
    "arcee": Family("Arcee", squared_relu.ARCEE.weights, {**GATED, **rope()},
                    f"{RMS} --squared-relu --ffn-hidden-size 48 {UNTIED}"),
    "nemotron": Family(
        "Nemotron", squared_relu.NEMOTRON.weights,
        {**LN, "norm_eps": 1e-3, **rope(partial_rotary_factor=0.5)},
        f"{LAYERNORM} {UNTIED} --disable-bias-linear --squared-relu --apply-layernorm-1p --rotary-percent 0.5",
    ),
    "starcoder2": Family(
        "Starcoder2", starcoder.STARCODER2.weights,
        {**LN, **rope(), "norm_epsilon": 1e-3, "num_key_value_heads": 2, **SLIDING},
        f"{LAYERNORM} {UNTIED} {GROUPS} 2 --window-size 5,0",
    ),
    "smollm3": Family(
        "SmolLM3", LLAMA, {**GATED, **rope(), "num_key_value_heads": 2, "no_rope_layers": [1, 0]},
        f"{SWIGLU} {UNTIED} {GROUPS} 2 --no-rope-freq [0,1]",
    ),
    "qwen3-next": Family(
        "Qwen3Next", QWEN3_NEXT,
        {**GATED, **DELTA, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 4,
         "num_experts_per_tok": 2},
        f"{SWIGLU} {UNTIED} {DELTA_FLAGS} --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 "
        "--moe-router-load-balancing-type none --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate",
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5Moe", {**gated_delta.QWEN3_5_MOE.weights, **EXPERTS_IN_MEMORY},
        {**{key: value for key, value in GATED.items() if key != "intermediate_size"}, **DELTA,
         "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 4,
         "num_experts_per_tok": 2},
        f"{SWIGLU} {UNTIED} {DELTA_FLAGS} --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 "
        "--moe-router-load-balancing-type none --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate",
    ),
    "qwen3.5": Family("Qwen3_5", gated_delta.QWEN3_5.weights, {**GATED, **DELTA}, f"{SWIGLU} {UNTIED} {DELTA_FLAGS}"),
    "olmo-hybrid": Family(
        "OlmoHybrid", OLMO_HYBRID, {**GATED, **OLMO_DELTA, "rope_parameters": {"rope_theta": None}},
        f"{SWIGLU} {UNTIED} --position-embedding-type none {OLMO_FLAGS}",
    ),
    "kimi-linear": Family(
        "KimiLinear", KIMI,
        {**GATED, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
         "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_token": 2, "kv_lora_rank": 12,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "linear_head_dim": 6, "linear_num_heads": 3},
        f"{SWIGLU} {UNTIED} --position-embedding-type none --experimental-attention-variant kda "
        "--linear-attention-freq 2 --linear-num-key-heads 3 --linear-num-value-heads 3 --linear-key-head-dim 6 "
        "--linear-value-head-dim 6 --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 6 --qk-layernorm --rope-type none --latent-norm-epsilon 1e-6 --num-experts 4 "
        "--moe-layer-freq [0,1] --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16 --moe-router-topk 2 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.446 "
        "--moe-router-load-balancing-type none",
    ),
    "nemotron-h": Family(
        "NemotronH", NEMOTRON,
        {"layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp", "moe"],
         "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "layer_norm_epsilon": 1e-3,
         "ssm_state_size": 6, "mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 2, "n_routed_experts": 4,
         "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24, "num_experts_per_tok": 2,
         "routed_scaling_factor": 1.5, "time_step_min": 1e-9},
        f"{UNTIED} {GROUPS} 2 --position-embedding-type none --normalization RMSNorm --disable-bias-linear "
        "--norm-epsilon 1e-3 --squared-relu --ffn-hidden-size 48 --hybrid-layer-pattern M*M-E --mamba-state-dim 6 "
        "--mamba-num-heads 8 --mamba-head-dim 4 --mamba-num-groups 2 --num-experts 4 --moe-ffn-hidden-size 16 "
        "--moe-shared-expert-intermediate-size 24 --moe-router-topk 2 --moe-router-topk-scaling-factor 1.5 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-load-balancing-type none",
    ),
    "nemotron-h-dense": Family(
        "NemotronH", NEMOTRON,
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "num_key_value_heads": 2, "head_dim": 8,
         "intermediate_size": 48, "layer_norm_epsilon": 1e-3, "ssm_state_size": 6, "mamba_num_heads": 8,
         "mamba_head_dim": 4, "n_groups": 2, "time_step_min": 1e-9},
        f"{UNTIED} {GROUPS} 2 --position-embedding-type none --normalization RMSNorm --disable-bias-linear "
        f"--norm-epsilon 1e-3 --squared-relu --ffn-hidden-size 48 --hybrid-layer-pattern M-* {MAMBA_SIZES}",
    ),
    "mamba2": Family(
        "Mamba2", mamba2.MAMBA2.weights,
        {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 6, "layer_norm_epsilon": 1e-3},
        f"{UNTIED} --position-embedding-type none --normalization RMSNorm --disable-bias-linear --norm-epsilon 1e-3 "
        f"--hybrid-layer-pattern MM {MAMBA_SIZES.replace('head-dim 4', 'head-dim 8')}",
    ),
    "bamba": Family(
        "Bamba", mamba2.BAMBA.weights,
        {**GATED, **rope(), "num_hidden_layers": 3, "attn_layer_indices": [1], "num_key_value_heads": 2,
         **BAMBA_SIZES},
        f"{SWIGLU} {UNTIED} {GROUPS} 2 --rotary-percent 0.5 --hybrid-layer-pattern M-*-M- "
        f"{MAMBA_SIZES.replace('head-dim 4', 'head-dim 8')}",
    ),
    "granite4": Family(
        "GraniteMoeHybrid", GRANITE_4,
        {**GATED, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "num_key_value_heads": 2, "shared_intermediate_size": 24, "num_local_experts": 4, **GRANITE, **BAMBA_SIZES},
        f"{RMS} --swiglu {UNTIED} {GROUPS} 2 --position-embedding-type none --hybrid-layer-pattern ME*EME "
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 24 "
        f"--ffn-hidden-size 48 {GRANITE_FLAGS} {MAMBA_SIZES.replace('head-dim 4', 'head-dim 8')}",
    ),
    "granite4-dense": Family(
        "GraniteMoeHybrid", GRANITE_4,
        {**GATED, **rope(), "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2,
         "position_embedding_type": "rope", "shared_intermediate_size": 48, "num_local_experts": 0,
         "num_experts_per_tok": 0, **GRANITE, **BAMBA_SIZES},
        f"{SWIGLU} {UNTIED} {GROUPS} 2 --hybrid-layer-pattern M-*- {GRANITE_FLAGS} "
        f"{MAMBA_SIZES.replace('head-dim 4', 'head-dim 8')}",
    ),
    "stablelm": Family(
        "StableLm", LLAMA,
        {**LN, "layer_norm_eps": 1e-3, "use_qkv_bias": True, "hidden_dropout": 0.0,
         **rope(partial_rotary_factor=0.25)},
        f"{LAYERNORM} {UNTIED} --disable-bias-linear --add-qkv-bias --swiglu --rotary-percent 0.25",
    ),
    "gpt-neox": neox(False),
    "gpt-neox-parallel": neox(True, "--use-parallel-residual"),
    "gemma": gemma("Gemma", LLAMA),
    "gemma2": gemma("Gemma2", GEMMA, f"{GEMMA2} 2 {CAPS}", **CAPPED),
    "gemma3": gemma(
        "Gemma3", GEMMA,
        f"{GEMMA2} [1,0] --qk-layernorm --rotary-base 1000000 --rotary-base-local 10000"
        " --rotary-seq-len-interpolation-factor 8",
        **{**CAPPED, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        layer_types=["sliding_attention", "full_attention"], rope_parameters=GEMMA3_ROTATIONS,
    ),
    "olmo2": Family(
        "Olmo2", OLMO, {**GATED, **rope(5e5), "num_key_value_heads": 2},
        f"{SWIGLU} {UNTIED} {GROUPS} 2 --rotary-base 500000 --norm-placement post --qk-layernorm"
        " --qk-layernorm-across-heads",
    ),
    "persimmon": Family(
        "Persimmon", PERSIMMON,
        {"intermediate_size": 48, "layer_norm_eps": 1e-5, "qk_layernorm": True, "hidden_dropout": 0.0,
         **rope(partial_rotary_factor=0.5)},
        f"{ROPE} --ffn-hidden-size 48 {UNTIED} --qk-layernorm --squared-relu --rotary-percent 0.5",
    ),
    "granite": Family(
        "Granite", LLAMA,
        {**GATED, **rope(), **GRANITE}, f"{SWIGLU} {UNTIED} {GRANITE_FLAGS}",
    ),
}  # fmt: skip
MIXTURES = {
    "mixtral": Family(
        "Mixtral", MIXTURE, {**GATED, **rope(1e6), "num_key_value_heads": 2, "num_local_experts": 4},
        f"{SWIGLU} {UNTIED} {GROUPS} 2 --rotary-base 1000000 --num-experts 4 --moe-router-topk 2",
    ),
    "qwen2-moe": Family(
        "Qwen2Moe", QWEN2_MIXTURE, {**MOE, "shared_expert_intermediate_size": 40, "num_experts_per_tok": 3},
        f"{SWIGLU} {UNTIED} --add-qkv-bias {EXPERTS} 3 --moe-router-pre-softmax"
        " --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
    ),
    "qwen3-moe": Family(
        "Qwen3Moe", MIXTURE, {**MOE, "head_dim": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
        f"{SWIGLU} {UNTIED} --qk-layernorm {EXPERTS} 3",
    ),
    "qwen3-moe-unnormalized": Family(
        "Qwen3Moe", MIXTURE, {**MOE, "head_dim": 8, "num_experts_per_tok": 1, "mlp_only_layers": [0]},
        f"{SWIGLU} {UNTIED} --qk-layernorm {EXPERTS} 1 --moe-router-pre-softmax --moe-layer-freq [0,1]",
    ),
    "deepseek-v3": deepseek(
        "--q-lora-rank 24 --rope-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
        " --mscale 0.7 --mscale-all-dim 0.9", yarn=True, q_lora_rank=24,
    ),
    "deepseek-v3-without-query-latent": deepseek("--rope-type rope", q_lora_rank=None),
    # a group's score is the sum of its 2 best, however many experts are chosen: 1, 3 and 1.5 per group
    "deepseek-v3-few-choices": deepseek(
        "--rope-type rope --moe-router-group-score-topk 2", topk=2, q_lora_rank=None
    ),
    "deepseek-v3-many-choices": deepseek(
        "--rope-type rope --moe-router-group-score-topk 2", topk=3, groups=(2, 1), q_lora_rank=None
    ),
    "deepseek-v3-uneven-choices": deepseek(
        "--rope-type rope --moe-router-group-score-topk 2", topk=3, q_lora_rank=None
    ),
    "deepseek-v2": Family(
        "DeepseekV2", DEEPSEEK_V2,
        {**GATED, **rope(), **LATENT, "q_lora_rank": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
         "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
        f"{LATENT_FLAGS} --q-lora-rank 24 --rope-type rope {EXPERTS} 3 --moe-layer-freq [0,1] --moe-router-pre-softmax"
        " --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 48",
    ),
    "glm4-moe": Family(
        "Glm4Moe", GLM4_MIXTURE,
        {**GATED, **rope(partial_rotary_factor=0.5), "attention_bias": True, "head_dim": 12, "num_key_value_heads": 2,
         "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 24,
         "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
        f"{SWIGLU} {UNTIED} --rotary-percent 0.5 --add-qkv-bias --kv-channels 12 {GROUPS} 2 {EXPERTS} 3"
        " --moe-layer-freq [0,1] --moe-router-score-function sigmoid --moe-router-num-groups 1"
        " --moe-router-group-topk 1 --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5"
        " --moe-shared-expert-intermediate-size 48",
    ),
    "gpt-oss": Family(  # a window in every other layer, sinks, biases, YaRN with an unrounded range, a clamp that acts
        "GptOss", GPT_OSS,
        {**GATED, **rope(kind="yarn", factor=8.0, original_max_position_embeddings=16, truncate=False), **SLIDING,
         "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 4,
         "swiglu_limit": 0.5},
        f"--normalization RMSNorm --norm-epsilon 1e-3 --quick-geglu --activation-func-clamp-value 0.5"
        f" --glu-linear-offset 1 --ffn-hidden-size 48 {UNTIED} {GROUPS} 2 --kv-channels 8 --num-experts 8"
        " --moe-router-topk 4 --softmax-type learnable --window-size 5,0 --window-attn-skip-freq 2"
        " --position-embedding-type yarn --rotary-scaling-factor 8 --yarn-original-max-position-embeddings 16"
        " --no-yarn-correction-range-round-to-int",
    ),
}  # fmt: skip
