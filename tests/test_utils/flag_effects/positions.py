"""Positions and attention."""

import json
import math

from tests.test_utils.flag_effects.network import BF16
from tests.test_utils.flag_effects.rows import (
    LAYERS,
    changes,
    close,
    finished,
    gives,
    keeps,
    keeps_to_rounding,
    modules,
    row,
    shape,
)

ROPE = "--position-embedding-type rope"
YARN = (
    "--position-embedding-type yarn --kv-channels 16 --rotary-scaling-factor 4"
    " --yarn-original-max-position-embeddings 4000 --yarn-beta-fast 200"
)
POSITIONS = "embedding.position_embeddings.weight"


def rotary(base=10000, width=8, scale=lambda pair, frequency: frequency, divide=1.0, concentration=1.0):
    """Cosines and sines follow Su et al. 2021, with frequencies that ``scale`` changes."""

    def are_those(_, run):
        finished(run)
        frequencies = [scale(pair, base ** (-2 * pair / width)) for pair in range(width // 2)]
        angles = [[position / divide * frequency for frequency in frequencies] for position in range(8)]
        for actual, function in zip(run.rotary, (math.cos, math.sin)):
            assert close(actual, [[concentration * function(angle) for angle in line] for line in angles], 1e-5)

    return are_those


def llama3(factor):
    """Pairs that turn slowly over 8192 positions turn ``factor`` times slower (Llama 3.1)."""

    def scaled(pair, frequency):
        turns = 8192 * frequency / (2 * math.pi)
        retained = min(max((turns - 1) / 3, 0), 1)
        return frequency * (retained + (1 - retained) / factor)

    return scaled


def yarn(factor=4, original=4000, fast=200, slow=1, rounded=True):
    """Peng et al. 2023: pairs with more than ``fast`` turns in the original context are kept, below ``slow`` slowed."""

    def bound(turns):
        return 16 * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(10000))

    low, high = bound(fast), bound(slow)
    if rounded:
        low, high = math.floor(low), math.ceil(high)

    def scaled(pair, frequency):
        share = min(max((pair - max(low, 0)) / (high - max(low, 0)), 0), 1)
        return frequency * (1 - share + share / factor)

    return scaled


def yarn_tables(mscale=1.0, mscale_all_dim=0.0, factor=4, **remaining):
    temperature = 0.1 * math.log(factor)
    concentration = (1 + mscale * temperature) / (1 + mscale_all_dim * temperature)
    return rotary(width=16, scale=yarn(factor, **remaining), concentration=concentration)


def by_length(effect, **table):
    """A row of --rope-parameters, with doubled braces and quotes: rows are format strings and shell words."""
    text = json.dumps(table).replace(" ", "").replace("{", "{{").replace("}", "}}")
    return row(f"--rope-parameters '{text}'", effect, changes("losses"), base=ROPE)


def longrope(original):
    """Ding et al. 2024: a divisor per pair, for rows of up to ``original`` tokens and for longer ones (8 here)."""
    factors = {"short_factor": [1, 1.5, 2, 3], "long_factor": [1, 4, 8, 16]}
    divisors = factors["long_factor" if original < 8 else "short_factor"]
    effect = rotary(scale=lambda pair, frequency: frequency / divisors[pair], concentration=1.2)
    return by_length(
        effect, rope_type="longrope", original_max_position_embeddings=original, attention_factor=1.2, **factors
    )


def dynamic(original, factor=3):
    """Dynamic NTK: the base grows with the row of 8 tokens beyond ``original``."""
    effect = rotary(base=10000 * (factor * 8 / original - (factor - 1)) ** (8 / 6))
    return by_length(effect, rope_type="dynamic", factor=factor, original_max_position_embeddings=original)


LATENT = "--multi-latent-attention --kv-lora-rank 6"
LATENT_YARN = f"{LATENT} --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 4000 --yarn-beta-fast 200"


def latent(part):
    """The shape of a weight of the first layer's attention."""
    return shape(f"{LAYERS}0.self_attention.{part}.weight")


ATTENTION = "--attention-backend"
DELTA = (
    "--experimental-attention-variant gdn --linear-num-key-heads 2 --linear-num-value-heads 4"
    " --linear-key-head-dim 6 --linear-value-head-dim 5"
)


def delta(part, layer=0):
    """The shape of a weight of a layer's gated delta net: per key head two heads of 6, two values and gates of 5."""
    return shape(f"{LAYERS}{layer}.self_attention.{part}")


MAMBA = "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 5"


def hybrid(part):
    """The shape of a weight of the first layer's Mamba-2: per group 4 heads of 8, a gate each, B and C of 5."""
    return shape(f"{LAYERS}0.mixer.{part}")


ROWS = [
    row("--position-embedding-type rope", gives(shape(POSITIONS), None), rotary()),
    row("--rotary-base 100", rotary(base=100), changes("losses"), base=ROPE),
    row("--rotary-base-local 10000", changes("losses"), keeps("initial", "rotary"),
        base=f"{ROPE} --rotary-base 100 --window-size 20,0 --window-attn-skip-freq 2"),
    row("--no-rope-freq 2", changes("losses"), keeps("initial", "rotary"), base=ROPE),
    row("--rotary-percent 0.5", rotary(width=4), changes("losses"), base=ROPE),
    row("--rotary-seq-len-interpolation-factor 2", rotary(divide=2.0), changes("losses"), base=ROPE),
    row("--use-rope-scaling", rotary(scale=llama3(8), width=16), changes("gradients"), base=ROPE + " --kv-channels 16"),
    row("--rope-scaling-factor 3200", rotary(scale=llama3(3200), width=16), changes("gradients"),
        base=ROPE + " --kv-channels 16 --use-rope-scaling"),
    longrope(original=8), longrope(original=7), dynamic(original=5),
    row("--rotary-interleaved", changes("losses"), keeps("initial", "rotary"), base=ROPE),
    row("--no-rope-fusion", gives(lambda run: {"rotary_triton", "split_rotary_triton"} & run.kernels, set()),
        keeps("weights"), base=ROPE, pretend="kernels"),
    row("--rotary-scaling-factor 8", yarn_tables(factor=8), changes("losses"), base=YARN),
    row("--yarn-original-max-position-embeddings 2000", yarn_tables(original=2000), changes("losses"), base=YARN),
    row("--yarn-beta-fast 20", yarn_tables(fast=20), changes("losses"), base=YARN),
    row("--yarn-beta-slow 20", yarn_tables(slow=20), changes("losses"), base=YARN),
    row("--no-yarn-correction-range-round-to-int", yarn_tables(rounded=False), changes("losses"), base=YARN),
    row("--mscale 2", yarn_tables(mscale=2.0), changes("losses"), base=YARN),
    row("--mscale-all-dim 2", yarn_tables(mscale_all_dim=2.0), changes("losses"), base=YARN),
    row("--attention-backend unfused", gives(modules("UnfusedAttention"), 2), keeps_to_rounding("losses", "gradients")),
    row("--attention-dropout 0.5", gives(lambda run: round(run.zeros.get("WeightDropout", 0), 1), 0.5),
        changes("losses"), keeps("initial"), base="--attention-backend unfused"),
    row("--attention-softmax-in-fp32", changes("gradients"), keeps("initial"), base=f"{BF16} {ATTENTION} unfused"),
    row("--apply-query-key-layer-scaling", changes("gradients"), keeps("initial"),
        base=f"{BF16} {ATTENTION} unfused --num-layers 3 --attention-softmax-in-fp32"),
    row("--multi-latent-attention", gives(latent("linear_kv_down_proj"), (6 + 64, 32)), rotary(width=64),
        gives(latent("linear_qkv"), None), base="--kv-lora-rank 6"),
    row("--q-lora-rank 5", gives(latent("linear_q_up_proj"), (4 * 192, 5)), gives(latent("linear_q_proj"), None),
        base=LATENT),
    row("--kv-lora-rank 7", gives(latent("linear_kv_up_proj"), (4 * 256, 7)), base=LATENT),
    row("--qk-head-dim 9", gives(latent("linear_q_proj"), (4 * 73, 32)), base=LATENT),
    row("--qk-pos-emb-head-dim 16", gives(latent("linear_q_proj"), (4 * 144, 32)), rotary(width=16), base=LATENT),
    row("--v-head-dim 11", gives(latent("linear_proj"), (32, 44)), base=LATENT),
    row("--rope-type none", changes("losses"), keeps("initial"), base=f"{LATENT} --position-embedding-type none"),
    row("--latent-norm-epsilon 1", changes("losses"), keeps("initial"), base=f"{LATENT} --qk-layernorm"),
    row("--rope-type rope", rotary(width=64), changes("losses"), keeps("initial"), base=LATENT_YARN),
    row("--mla-down-proj-fusion", gives(latent("linear_qkv_down_proj"), (5 + 6 + 64, 32)),
        base=f"{LATENT} --q-lora-rank 5"),
    row("--qk-layernorm", gives(shape(LAYERS + "0.self_attention.q_layernorm.weight"), (8,)), changes("losses")),
    row("--qk-layernorm-across-heads", gives(shape(LAYERS + "0.self_attention.q_layernorm.weight"), (32,)),
        changes("losses"), base="--qk-layernorm --normalization RMSNorm"),
    row("--softmax-scale 3", changes("losses"), keeps("initial")),
    row("--attn-logit-softcapping 1e-12", changes("losses"), keeps("initial"), gives(modules("UnfusedAttention"), 2),
        base="--softmax-scale 3"),
    row("--qk-l2-norm", gives(modules("L2Norm"), 4), keeps("initial"), changes("losses")),
    row("--experimental-attention-variant gdn", gives(delta("in_proj.weight"), (2, 36, 32)),
        gives(latent("linear_qkv"), None), base=DELTA.partition("gdn ")[2]),
    row("--experimental-attention-variant kda", gives(delta("f_b_proj.weight"), (2, 6, 5)),
        gives(delta("in_proj.weight"), (2, 18, 32)), base=DELTA.replace("value-heads 4", "value-heads 2")),
    row("--linear-attention-freq 2", gives(delta("in_proj.weight", 1), None),
        gives(delta("conv1d.weight"), (2, 22, 1, 4)), base=DELTA),
    row("--linear-conv-kernel-dim 3", gives(delta("conv1d.weight"), (2, 22, 1, 3)), base=DELTA),
    row("--linear-allow-neg-eigval", changes("losses"), keeps("initial"), base=DELTA),
    row("--linear-norm-epsilon 1", changes("losses"), keeps("initial"), base=DELTA),
    row("--linear-key-head-dim 7", gives(delta("in_proj.weight"), (2, 38, 32)), base=DELTA),
    row("--linear-value-head-dim 3", gives(delta("norm.weight"), (3,)), base=DELTA),
    row("--linear-num-key-heads 4", gives(delta("in_proj.weight"), (4, 24, 32)), base=DELTA),
    row("--linear-num-value-heads 6", gives(delta("A_log"), (6,)), base=DELTA),
    row("--hybrid-layer-pattern M*", gives(hybrid("in_proj.weight"), (2, 78, 32)), gives(latent("linear_qkv"), None),
        gives(shape(f"{LAYERS}1.self_attention.linear_qkv.weight"), (4, 24, 32)), base=MAMBA),
    row("--mamba-num-heads 6", gives(hybrid("A_log"), (6,)), base=f"{MAMBA} --hybrid-layer-pattern M*"),
    row("--mamba-head-dim 16", gives(hybrid("A_log"), (4,)), base="--mamba-num-groups 2 --hybrid-layer-pattern M*"),
    row("--mamba-num-groups 4", gives(hybrid("conv1d.bias"), (4, 26)), base=f"{MAMBA} --hybrid-layer-pattern M*"),
    row("--mamba-state-dim 3", gives(hybrid("conv1d.bias"), (2, 38)), base=f"{MAMBA} --hybrid-layer-pattern M*"),
    row("--attention-output-gate", gives(latent("linear_qkv"), (4, 32, 32)), changes("losses")),
    row("--window-size 4,0", changes("losses"), keeps("initial")),
    row("--window-attn-skip-freq 2", changes("losses"), gives(lambda run: "window 4,0) in layer 1" in run.log, True),
        base="--window-size 4,0"),
]  # fmt: skip
