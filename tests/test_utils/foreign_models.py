"""Tiny models of the package ``transformers`` beside the flags that say the same here, and how their weights are named.

A family is a row of data: where its tensors are, and how queries, keys and values lie in them. Weights and gradients
go through the same (linear) rearrangement, so a comparison needs one map only.

Legend: g groups of query heads, p query heads of a group, d channels of a head, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

VOCAB, LENGTH = 53, 24
LAYERS, HIDDEN, HEADS = 2, 32, 4


@dataclass(frozen=True)
class Names:
    """Where a family keeps what ``GPTModel`` has; the defaults are LLaMA's."""

    embedding: str = "model.embed_tokens"
    positions: str | None = None
    layer: str = "model.layers"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_by_head: bool = False
    """One tensor that holds query, key and value of the first head, then of the second; else all queries first."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    proj: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    post_norms: tuple[str, str] = ("-", "-")
    """Norms behind attention and behind the feed-forward network."""
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    fc2: str = "mlp.down_proj"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    conv1d: bool = False
    """Matrices are stored [in, out] (GPT-2)."""
    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    experts_interleaved: bool = False
    """Experts' matrices are stored [expert, in, out], gate and linear half in turn (GPT-OSS)."""
    shared: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_fc2: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    latent: tuple[tuple[str, str], ...] = (
        ("linear_q_proj", "self_attn.q_proj"), ("linear_q_down_proj", "self_attn.q_a_proj"),
        ("q_layernorm", "self_attn.q_a_layernorm"), ("linear_q_up_proj", "self_attn.q_b_proj"),
        ("linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa"), ("kv_layernorm", "self_attn.kv_a_layernorm"),
        ("linear_kv_up_proj", "self_attn.kv_b_proj"),
    )  # fmt: skip
    sinks: str = "self_attn.sinks"


LLAMA = Names()
PLAIN_MLP = replace(LLAMA, fc1=("mlp.up_proj",))
STARCODER2 = replace(LLAMA, fc1=("mlp.c_fc",), fc2="mlp.c_proj")
FUSED = replace(LLAMA, qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",))
GLM = replace(LLAMA, fc1=("mlp.gate_up_proj",))
PERSIMMON = replace(
    LLAMA, qkv=("self_attn.query_key_value",), qkv_by_head=True, q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm", proj="self_attn.dense", fc1=("mlp.dense_h_to_4h",), fc2="mlp.dense_4h_to_h",
    final_norm="model.final_layernorm",
)  # fmt: skip
NEOX = Names(
    embedding="gpt_neox.embed_in", layer="gpt_neox.layers", qkv=("attention.query_key_value",), qkv_by_head=True,
    proj="attention.dense", fc1=("mlp.dense_h_to_4h",), fc2="mlp.dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
)  # fmt: skip
GPT2 = Names(
    embedding="transformer.wte", positions="transformer.wpe", layer="transformer.h", attention_norm="ln_1",
    qkv=("attn.c_attn",), proj="attn.c_proj", mlp_norm="ln_2", fc1=("mlp.c_fc",), fc2="mlp.c_proj",
    final_norm="transformer.ln_f", conv1d=True,
)  # fmt: skip
BIGCODE = replace(GPT2, conv1d=False)
OLMO = replace(
    LLAMA, attention_norm="-", mlp_norm="-", post_norms=("post_attention_layernorm", "post_feedforward_layernorm")
)
GEMMA = replace(OLMO, attention_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm")
GPT_OSS = replace(LLAMA, router="mlp.router", experts_interleaved=True)
QWEN2_MOE = replace(
    LLAMA, shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), shared_fc2="mlp.shared_expert.down_proj"
)


@dataclass(frozen=True)
class Family:
    """One model: its class in ``transformers``, settings there, flags here."""

    architecture: str
    names: Names
    settings: dict
    flags: str


def flags_of(model: Family) -> list[str]:
    """The whole command line."""
    sizes = f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {LENGTH}"
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


def _qkv(parts: list[torch.Tensor], names: Names, groups: int, channels: int) -> torch.Tensor:
    """[g * (p + 2) * d, …] as ``linear_qkv`` holds it."""
    rest = parts[0].shape[1:]
    if names.qkv_by_head:  # as many groups as heads: the same order
        return parts[0]
    if len(parts) == 1:
        width = groups * channels
        parts = list(parts[0].split([parts[0].shape[0] - 2 * width, width, width]))
    return torch.cat([part.reshape(groups, -1, *rest) for part in parts], 1).flatten(0, 1)


def to_ours(tensors: dict[str, torch.Tensor], names: Names, groups: int, channels: int) -> dict[str, torch.Tensor]:
    """Weights (or gradients) of the foreign model under the names, and in the arrangement, of ``GPTModel``."""
    found: dict[str, torch.Tensor] = {}

    def take(ours: str, *theirs: str, arrange=lambda parts: torch.cat(parts)) -> None:
        for kind in ("weight", "bias"):
            parts = [tensors.get(f"{name}.{kind}") for name in theirs]
            if all(part is not None for part in parts):
                if names.conv1d and kind == "weight" and theirs[0].startswith(names.layer) and parts[0].dim() == 2:
                    parts = [part.T for part in parts]
                found[f"{ours}.{kind}"] = arrange(parts)

    def take_experts(here: str, there: str) -> None:
        for ours, theirs in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
            for kind, key in (("weight", f"{there}.{theirs}"), ("bias", f"{there}.{theirs}_bias")):
                if (value := tensors.get(key)) is not None:
                    if names.experts_interleaved:
                        value = value.transpose(1, 2) if kind == "weight" else value
                        value = torch.cat((value[:, ::2], value[:, 1::2]), 1) if ours == "linear_fc1" else value
                    found[f"{here}.{ours}.{kind}"] = value

    take("embedding.word_embeddings", names.embedding)
    if names.positions:
        take("embedding.position_embeddings", names.positions)
    for i in range(LAYERS):
        here, there = f"decoder.layers.{i}", f"{names.layer}.{i}"
        take(f"{here}.input_layernorm", f"{there}.{names.attention_norm}")
        if f"{there}.{names.latent[-1][1]}.weight" in tensors:
            for ours, theirs in names.latent:
                take(f"{here}.self_attention.{ours}", f"{there}.{theirs}")
        else:
            take(
                f"{here}.self_attention.linear_qkv", *(f"{there}.{name}" for name in names.qkv),
                arrange=lambda parts: _qkv(parts, names, groups, channels),
            )  # fmt: skip
        take(f"{here}.self_attention.q_layernorm", f"{there}.{names.q_norm}")
        take(f"{here}.self_attention.k_layernorm", f"{there}.{names.k_norm}")
        take(f"{here}.self_attention.linear_proj", f"{there}.{names.proj}")
        take(f"{here}.pre_mlp_layernorm", f"{there}.{names.mlp_norm}")
        for branch, theirs in zip(("self_attention", "mlp"), names.post_norms):
            take(f"{here}.post_{branch}_layernorm", f"{there}.{theirs}")
        take(f"{here}.mlp.linear_fc1", *(f"{there}.{name}" for name in names.fc1))
        take(f"{here}.mlp.linear_fc2", f"{there}.{names.fc2}")
        take(f"{here}.mlp.router", f"{there}.{names.router}")
        take_experts(f"{here}.mlp.experts", f"{there}.{names.experts}")
        take(f"{here}.mlp.shared_experts.linear_fc1", *(f"{there}.{name}" for name in names.shared))
        take(f"{here}.mlp.shared_experts.linear_fc2", f"{there}.{names.shared_fc2}")
        for ours, theirs in (
            ("mlp.router.expert_bias", names.selection_bias),
            ("mlp.shared_experts.gate_weight", f"{names.shared_gate}.weight"),
            ("self_attention.core_attention.softmax_offset", names.sinks),
        ):
            if (value := tensors.get(f"{there}.{theirs}")) is not None:
                found[f"{here}.{ours}"] = value
    take("decoder.final_layernorm", names.final_norm)
    take("output_layer", names.head)
    return found


ROPE = "--position-embedding-type rope"
RMS = f"{ROPE} --normalization RMSNorm --disable-bias-linear --norm-epsilon 1e-3"
SWIGLU = f"{RMS} --swiglu --ffn-hidden-size 48"
UNTIED = "--untie-embeddings-and-output-weights"
GROUPS = "--group-query-attention --num-query-groups"
LAYERNORM = f"{ROPE} --norm-epsilon 1e-3 --ffn-hidden-size 48"
GATED = {"intermediate_size": 48, "rms_norm_eps": 1e-3, "tie_word_embeddings": False, "num_key_value_heads": HEADS}


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
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk"
MOE = {**GATED, **rope(), "moe_intermediate_size": 24, "num_experts": 8}
"""8 experts of width 24."""


def gemma(architecture, names, flags="", **settings):
    """Heads of 12 channels, two of keys and values, tied embeddings that are scaled, norms that store weights - 1."""
    settings = {**GATED, **rope(), "head_dim": 12, "num_key_value_heads": 2, "tie_word_embeddings": True, **settings}
    shape = f"--geglu --ffn-hidden-size 48 --kv-channels 12 {GROUPS} 2 --apply-layernorm-1p --apply-embedding-scaling"
    return Family(architecture, names, settings, f"{RMS} {shape} {flags}")


CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20, **SLIDING}
GEMMA2 = "--norm-placement sandwich --softmax-scale 0.22360679774997896 --window-size 5,0 --window-attn-skip-freq"
CAPS = "--attn-logit-softcapping 2 --final-logit-softcapping 3"
GEMMA3_ROTATIONS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def deepseek(attention, yarn=False, **settings):
    """DeepSeek-V3 of 8 experts in 4 groups, of which 2 groups and 4 experts are chosen; a dense layer first. The norms
    of its latents have an epsilon of their own, 1e-6."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9}
    positions = rope(kind="yarn", **scaling) if yarn else rope()
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "rms_norm_eps": 1e-6}
    experts = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 2}
    return Family(
        "DeepseekV3", LLAMA,
        {**GATED, **positions, **latent, **experts, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
         "routed_scaling_factor": 2.5, **settings},
        f"--normalization RMSNorm --disable-bias-linear --norm-epsilon 1e-6 --swiglu --ffn-hidden-size 48 {UNTIED}"
        f" --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 10"
        f" --qk-layernorm --position-embedding-type rope {attention} {EXPERTS} 4 --moe-layer-freq [0,1]"
        " --moe-router-score-function sigmoid --moe-router-num-groups 4 --moe-router-group-topk 2"
        " --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5"
        " --moe-shared-expert-intermediate-size 48",
    )  # fmt: skip


STRETCHED = {"factor": 40.0, "original_max_position_embeddings": 16}


def dense_deepseek(flags, yarn=None, **settings):
    """DeepSeek-V3 whose layers are all dense; ``yarn``: weights of the temperature."""
    positions = rope() if yarn is None else rope(kind="yarn", **STRETCHED, **yarn)
    latent = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "rms_norm_eps": 1e-6}
    return Family(
        "DeepseekV3", LLAMA,
        {**GATED, **positions, **latent, "q_lora_rank": 16, "first_k_dense_replace": LAYERS, **settings},
        f"{ROPE} --normalization RMSNorm --disable-bias-linear --norm-epsilon 1e-6 --swiglu --ffn-hidden-size 48"
        f" {UNTIED} --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
        f" --qk-layernorm {flags}",
    )  # fmt: skip


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
    "gpt2": Family("GPT2", GPT2, GPT2_SETTINGS, "--norm-epsilon 1e-3"),
    "gpt2-exact-gelu": Family(
        "GPT2", GPT2, {**GPT2_SETTINGS, "activation_function": "gelu"}, "--norm-epsilon 1e-3 --no-bias-gelu-fusion"
    ),
    "gpt2-narrow-ffn": Family("GPT2", GPT2, {**GPT2_SETTINGS, "n_inner": 40},
                              "--norm-epsilon 1e-3 --ffn-hidden-size 40"),
    "gpt2-untied": Family("GPT2", GPT2, {**GPT2_SETTINGS, "tie_word_embeddings": False},
                          f"--norm-epsilon 1e-3 {UNTIED}"),
    "gpt-bigcode": Family("GPTBigCode", BIGCODE, GPT2_SETTINGS, f"--norm-epsilon 1e-3 {GROUPS} 1"),
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
    "phi4-partial-rotary": Family(
        "Phi3", FUSED, {**GATED, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                     "partial_rotary_factor": 0.75}},
        f"{SWIGLU} {UNTIED} --rotary-percent 0.75",
    ),
    "glm-interleaved": Family(
        "Glm", GLM, {**GATED, "head_dim": 8, "attention_bias": True, "num_key_value_heads": 2,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        f"{SWIGLU} {UNTIED} --add-qkv-bias --rotary-percent 0.5 --rotary-interleaved {GROUPS} 2",
    ),
    "glm4-sandwich": Family(
        "Glm4", replace(GLM, post_norms=("post_self_attn_layernorm", "post_mlp_layernorm")),
        {**GATED, "head_dim": 8, "attention_bias": True, "num_key_value_heads": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        f"{SWIGLU} {UNTIED} --add-qkv-bias --rotary-percent 0.5 --rotary-interleaved --norm-placement sandwich"
        f" {GROUPS} 2",
    ),
    "helium": Family("Helium", LLAMA, {**GATED, **rope(), "head_dim": 8},
                     f"{SWIGLU} {UNTIED} --rotary-interleaved"),
    "ernie4.5": Family("Ernie4_5", LLAMA, {**GATED, **rope(), "head_dim": 8, "use_bias": False},
                       f"{SWIGLU} {UNTIED} --rotary-interleaved"),
    "seed-oss": Family(
        "SeedOss", LLAMA, {**GATED, **rope(), "head_dim": 8, "attention_bias": True, "attention_out_bias": False,
                           "residual_dropout": 0.0},
        f"{SWIGLU} {UNTIED} --add-qkv-bias",
    ),
    "arcee": Family("Arcee", PLAIN_MLP, {**GATED, **rope()},
                    f"{RMS} --squared-relu --ffn-hidden-size 48 {UNTIED}"),
    "nemotron": Family(
        "Nemotron", PLAIN_MLP,
        {**LN, "norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                     "partial_rotary_factor": 0.5}},
        f"{LAYERNORM} {UNTIED} --disable-bias-linear --squared-relu --apply-layernorm-1p --rotary-percent 0.5",
    ),
    "starcoder2": Family(
        "Starcoder2", STARCODER2, {**LN, **rope(), "norm_epsilon": 1e-3, "num_key_value_heads": 2, "use_bias": True,
                                   "residual_dropout": 0.0, "embedding_dropout": 0.0, **SLIDING},
        f"{LAYERNORM} {UNTIED} {GROUPS} 2 --window-size 5,0",
    ),
    "stablelm": Family(
        "StableLm", LLAMA,
        {**LN, "layer_norm_eps": 1e-3, "use_qkv_bias": True, "hidden_dropout": 0.0,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        f"{LAYERNORM} {UNTIED} --disable-bias-linear --add-qkv-bias --swiglu --rotary-percent 0.25",
    ),
    "gpt-neox": Family(
        "GPTNeoX", NEOX,
        {"intermediate_size": 48, "layer_norm_eps": 1e-3, "use_parallel_residual": False, "hidden_act": "gelu",
         "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        f"{LAYERNORM} {UNTIED} --rotary-percent 0.25 --no-bias-gelu-fusion",
    ),
    "gpt-neox-parallel": Family(
        "GPTNeoX", NEOX,
        {"intermediate_size": 48, "layer_norm_eps": 1e-3, "use_parallel_residual": True, "hidden_act": "gelu",
         "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        f"{LAYERNORM} {UNTIED} --rotary-percent 0.25 --no-bias-gelu-fusion --use-parallel-residual",
    ),
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
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        f"{ROPE} --ffn-hidden-size 48 {UNTIED} --qk-layernorm --squared-relu --rotary-percent 0.5",
    ),
    "granite": Family(
        "Granite", LLAMA,
        {**GATED, **rope(), "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
         "attention_multiplier": 8**-0.5},
        f"{SWIGLU} {UNTIED}",
    ),
}  # fmt: skip
MIXTURES = {
    "mixtral": Family(
        "Mixtral", LLAMA, {**GATED, **rope(1e6), "num_key_value_heads": 2, "num_local_experts": 4},
        f"{SWIGLU} {UNTIED} {GROUPS} 2 --rotary-base 1000000 --num-experts 4 --moe-router-topk 2",
    ),
    "qwen2-moe": Family(
        "Qwen2Moe", QWEN2_MOE, {**MOE, "shared_expert_intermediate_size": 40, "num_experts_per_tok": 3},
        f"{SWIGLU} {UNTIED} --add-qkv-bias {EXPERTS} 3 --moe-router-pre-softmax"
        " --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
    ),
    "qwen3-moe": Family(
        "Qwen3Moe", LLAMA, {**MOE, "head_dim": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
        f"{SWIGLU} {UNTIED} --qk-layernorm {EXPERTS} 3",
    ),
    "qwen3-moe-unnormalized": Family(
        "Qwen3Moe", LLAMA, {**MOE, "head_dim": 8, "num_experts_per_tok": 1, "mlp_only_layers": [0]},
        f"{SWIGLU} {UNTIED} --qk-layernorm {EXPERTS} 1 --moe-router-pre-softmax --moe-layer-freq [0,1]",
    ),
    "deepseek-v3": deepseek(
        "--q-lora-rank 24 --rope-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
        " --mscale 0.7 --mscale-all-dim 0.9", yarn=True, q_lora_rank=24,
    ),
    "deepseek-v3-without-query-latent": deepseek("--rope-type rope", q_lora_rank=None),
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
