"""Size and form of the network, its vocabulary, initial values and seeds."""

import math

from tests.test_utils.flag_effects.rows import (
    LAYERS,
    changes,
    close,
    finished,
    gives,
    keeps,
    modules,
    row,
    says,
    shape,
    stops,
)

QKV = LAYERS + "0.self_attention.linear_qkv"
SINK = LAYERS + "0.self_attention.core_attention.softmax_offset"
FC1, FC2 = LAYERS + "0.mlp.linear_fc1", LAYERS + "0.mlp.linear_fc2"
PRE_NORM, POST_NORM = LAYERS + "0.pre_mlp_layernorm.weight", LAYERS + "0.post_mlp_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
GQA = "--group-query-attention"
BF16 = "--bf16"


def times(factor, chosen=lambda name: True):
    """Initial matrices of the chosen names are ``factor`` times the base run's; other weights are the same."""

    def are_times(base, run):
        finished(base, run)
        for name, weight in run.initial.items():
            expected = base.initial[name] * (factor if chosen(name) and weight.dim() > 1 else 1.0)
            assert close(weight, expected), name

    return are_times


def xavier_bounds(base, run):
    """Entries fill the interval that Glorot and Bengio give for both sizes of a matrix."""
    finished(run)
    for name in (FC1 + ".weight", QKV + ".weight"):
        weight = run.initial[name]
        bound = math.sqrt(6 / sum(weight.flatten(0, -2).shape))
        assert 0.95 * bound < float(weight.abs().max()) <= bound * (1 + 1e-6), name


def nothing_is_drawn(base, run):
    finished(run)
    assert all(not weight.any() for weight in run.initial.values() if weight.dim() > 1)


def clamped(base, run):
    """No gradient passes where the clamp holds: with a clamp of 0 the gate is never positive, the linear half 0."""
    finished(base, run)
    assert run.gradients[0][FC2 + ".weight"].abs().max() < 1e-9 < base.gradients[0][FC2 + ".weight"].abs().max()


def offset_is_added(base, run):
    """silu(g) * (u + 1) = silu(g) * u + silu(g): the gradient of the gate no longer needs the linear half."""
    finished(base, run)
    gate = [item.gradients[0][FC1 + ".weight"].chunk(2)[0].abs().max() for item in (base, run)]
    assert gate[1] > 5 * gate[0]


def dropped_share(rate):
    """Outputs of dropout are zero with this probability; evaluation drops nothing."""

    def drops(base, run):
        finished(run)
        assert run.modules.get("Dropout") == 5, run.modules
        assert close(run.zeros["Dropout"], rate, 0.1), run.zeros

    return drops


ROWS = [
    row("--num-layers 3", gives(modules("TransformerLayer"), 3)),
    row("--spec tests.test_utils.gated_recurrence mixed_layers", gives(modules("GatedRecurrence"), 1)),
    row("--encoder-num-layers 3", gives(modules("TransformerLayer"), 3), drop="--num-layers"),
    row("--hidden-size 64", gives(shape(FC1 + ".weight"), (256, 64)), gives(shape(EMBEDDING), (64, 64))),
    row("--num-attention-heads 2", gives(shape(QKV + ".weight"), (2, 48, 32)), changes("losses")),
    row("--group-query-attention", gives(shape(QKV + ".weight"), (1, 48, 32))),
    row("--num-query-groups 2", gives(shape(QKV + ".weight"), (2, 32, 32)), base=GQA),
    row("--ffn-hidden-size 48", gives(shape(FC1 + ".weight"), (48, 32)), gives(shape(FC2 + ".weight"), (32, 48))),
    row("--kv-channels 16", gives(shape(QKV + ".weight"), (4, 48, 32))),
    row("--normalization RMSNorm", gives(modules("RMSNorm"), 5), gives(shape("decoder.final_layernorm.bias"), None)),
    row("--norm-epsilon 0.1", changes("losses", "gradients"), keeps("initial")),
    row("--apply-layernorm-1p", gives(lambda run: float(run.initial["decoder.final_layernorm.weight"].sum()), 0.0)),
    row("--apply-residual-connection-post-layernorm", changes("gradients"), keeps("initial")),
    row("--disable-bias-linear", gives(shape(FC1 + ".bias"), None), gives(shape(QKV + ".bias"), None)),
    row("--add-qkv-bias", gives(shape(QKV + ".bias"), (4, 24)), gives(shape(FC1 + ".bias"), None),
        base="--disable-bias-linear"),
    row("--swiglu", gives(shape(FC1 + ".weight"), (2, 64, 32))),
    row("--quick-geglu", gives(shape(FC1 + ".weight"), (2, 128, 32))),
    row("--geglu", gives(shape(FC1 + ".weight"), (2, 128, 32))),
    row("--exact-gelu", changes("gradients"), base="--geglu --init-method-std 0.5"),
    row("--relu", changes("losses", "gradients"), keeps("initial")),
    row("--disable-norm-bias", gives(shape("decoder.final_layernorm.bias"), None), gives(shape(PRE_NORM), (32,))),
    row("--norm-placement sandwich", gives(shape(POST_NORM), (32,)), gives(shape(PRE_NORM), (32,))),
    row("--norm-placement post", gives(shape(POST_NORM), (32,)), gives(shape(PRE_NORM), None)),
    row("--use-parallel-residual", changes("gradients"), keeps("initial")),
    row("--share-parallel-norm", gives(shape(PRE_NORM), None), changes("gradients"), base="--use-parallel-residual"),
    row("--learned-position-offset 3", gives(shape("embedding.position_embeddings.weight"), (19, 32))),
    row("--output-layer-bias", gives(shape("output_layer.bias"), (64,)), changes("gradients")),
    row("--embed-layernorm", changes("gradients"), keeps("initial")),
    row("--apply-embedding-scaling", changes("losses"), keeps("initial")),
    row("--embedding-multiplier 100", changes("losses"), keeps("initial")),
    row("--residual-multiplier 100", changes("losses"), keeps("initial")),
    row("--logits-scaling 1e6", gives(lambda run: float(run.losses[0]), math.log(64), 1e-3), keeps("initial"),
        base="--embedding-init-method-std 1"),
    row("--final-logit-softcapping 1e-3", gives(lambda run: float(run.losses[0]), math.log(64), 1e-3), keeps("initial"),
        base="--embedding-init-method-std 1"),
    row("--softmax-type learnable", gives(shape(SINK), (4,)), changes("losses")),
    row("--softmax-type off-by-one", gives(shape(SINK), None), changes("losses"), keeps("initial")),
    row("--mtp-num-layers 2", gives(modules("TransformerLayer"), 4),
        gives(shape("mtp.layers.1.eh_proj.weight"), (32, 64)), changes("gradients")),
    row("--mtp-use-repeated-layer", gives(modules("TransformerLayer"), 3), changes("gradients"),
        gives(shape("mtp.layers.0.eh_proj.weight"), (32, 64)), gives(shape("mtp.layers.1.eh_proj.weight"), None),
        base="--mtp-num-layers 2"),
    row("--mtp-loss-scaling-factor 0.5", changes("gradients"), keeps("initial"), base="--mtp-num-layers 1"),
    row("--squared-relu", changes("losses"), keeps("initial")),
    row("--activation-func-clamp-value 1e-20", clamped, base="--swiglu"),
    row("--glu-linear-offset 1", offset_is_added, base="--swiglu"),
    row("--hidden-dropout 0.5", dropped_share(0.5), changes("losses"), keeps("initial")),
    row("--hidden-dropout 0.6", gives(modules("Dropout"), 5), keeps("evaluations"), base="--eval-iters 1 --skip-train"),
    row("--fp32-residual-connection", gives(lambda run: run.formats["TransformerLayer"], {"float32"}), base=BF16),
    row("--no-bias-gelu-fusion", changes("gradients"), keeps("initial")),  # erf instead of the tanh approximation
    row("--no-bias-swiglu-fusion", gives(lambda run: "gated_triton" in run.kernels, False), keeps("weights"),
        base="--swiglu", pretend="kernels"),
    row("--no-bias-dropout-fusion", gives(lambda run: "_drop_in_kernel" in run.kernels, False), keeps("weights"),
        base="--hidden-dropout 0.1", pretend="kernels"),
    row("--no-persist-layer-norm", gives(lambda run: "normalize_triton" in run.kernels, False), keeps("weights"),
        pretend="kernels"),
    row("--max-position-embeddings 24", gives(shape("embedding.position_embeddings.weight"), (24, 32))),
    row("--make-vocab-size-divisible-by 48", gives(lambda run: run.stored[EMBEDDING], (96, 32)), keeps("initial")),
    row("--no-pad-vocab-size", gives(lambda run: run.stored[EMBEDDING], (65, 32)), keeps("initial"),
        base="--vocab-size 65"),
    row("--vocab-size 70", gives(shape(EMBEDDING), (70, 32))),
    row("--untie-embeddings-and-output-weights", gives(shape("output_layer.weight"), (64, 32))),
    row("--seed 99", changes("tokens", "initial"), keeps("stored")),
    row("--init-method-std 0.1", times(5.0)),
    row("--use-mup", changes("losses"), keeps("initial"), base="--init-method-std 0.5"),  # scores
    row("--mup-base-hidden-size 8", times(0.5, lambda name: name.startswith("decoder.layers.")), base="--use-mup"),
    row("--mup-embedding-mult 100", changes("losses"), keeps("initial"), base="--use-mup"),
    row("--mup-output-mult 1e-6", gives(lambda run: float(run.losses[0]), math.log(64), 1e-3), keeps("initial"),
        base="--use-mup --embedding-init-method-std 1"),
    row("--mup-base-head-dim 64", changes("losses"), keeps("initial"), base="--use-mup --init-method-std 0.5"),
    row("--mup-attn-scale-power 0.5", changes("losses"), keeps("initial"), base="--use-mup --init-method-std 0.5"),
    row("--embedding-init-method-std 0.1", times(5.0, lambda name: name.startswith("embedding."))),
    row("--init-method-xavier-uniform", xavier_bounds),
    row("--no-initialization", nothing_is_drawn),
    row("--transformer-impl transformer_engine", says("using local layers with its parameter names"), keeps("losses")),
    row("--no-position-embedding", stops("--position-embedding-type none", code=2)),
]  # fmt: skip
