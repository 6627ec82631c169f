"""Command R (``cohere``): parallel branches with one norm without bias, neighboring channels rotated, scaled logits."""

from megatron.export.hf.attention_settings import Rope, groups
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Computed, Fixed, FixedKeys, Same, Table, get


def _load_scale(config: Table) -> dict[str, object]:
    return {"logits_scaling": 1 / get(config, ("logit_scale",), 0.0625)}


def _save_scale(settings: Table) -> dict[str, object]:
    # 15 digits: 1 / (1 / x) may differ from x in the last bit
    return {"logit_scale": float(f"{1 / settings['logits_scaling']:.15g}")}


COHERE = Family(
    "cohere", "CohereForCausalLM", models="Command R, Aya 23",
    limits=("normed queries and keys (Command R+)",),
    config=(
        *llama.SIZES, llama.FFN, llama.HEAD_SIZE, groups(), *llama.DROPOUT, llama.tied(True), llama.SILU_GATED,
        llama.NO_BIASES, Rope(500000.0), Same("norm_epsilon", "layer_norm_eps", default=1e-5),
        Computed(("logit_scale",), ("logits_scaling",), _load_scale, _save_scale), llama.NO_PADDING,
        Fixed({"normalization": "LayerNorm", "norm_bias": False, "rotary_interleaved": True,
              "use_parallel_residual": True, "share_parallel_norm": True}),
        FixedKeys({"attention_bias": False, "use_qk_norm": False}),
    ),
    weights=llama.WEIGHTS,
    unused=(r".*\.rotary_emb\.inv_freq",),
)  # fmt: skip
