"""The optimizer, learning rates, weight decay and number formats."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.reference.muon import update_weight
from tests.test_utils.flag_effects.rows import (
    accepts,
    changes,
    close,
    finished,
    gives,
    keeps,
    keeps_to_rounding,
    row,
    stops,
)

EMBEDDING = "embedding.word_embeddings.weight"
BF16 = "--bf16"


def _decays(name):
    return name.endswith("weight") and "layernorm" not in name


def _clipped(gradients, clip):
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
    factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
    return {name: each.double() * factor for name, each in gradients.items()}


def adamw(lr=1e-2, decay=0.01, clip=1.0, beta1=0.9, beta2=0.999, eps=1e-5):
    """Weights follow from the gradients by AdamW (Loshchilov and Hutter 2019) with these settings."""

    def follows(_, run):
        finished(run)
        weights = {name: each.double() for name, each in run.initial.items()}
        first, second = ({name: torch.zeros_like(each) for name, each in weights.items()} for _ in range(2))
        for step, gradients in enumerate(run.gradients, start=1):
            for name, each in _clipped(gradients, clip).items():
                first[name] = beta1 * first[name] + (1 - beta1) * each
                second[name] = beta2 * second[name] + (1 - beta2) * each**2
                root = (second[name] / (1 - beta2**step)).sqrt() + eps
                weights[name] *= 1 - lr * decay * _decays(name)
                weights[name] -= lr * first[name] / (1 - beta1**step) / root
        assert_close(run.weights, weights)

    return follows


def sgd(momentum=0.9, lr=1e-2, clip=1.0):
    """Weights follow from the gradients by SGD with momentum."""

    def follows(_, run):
        finished(run)
        weights = {name: each.double() for name, each in run.initial.items()}
        moving = {name: torch.zeros_like(each) for name, each in weights.items()}
        for gradients in run.gradients:
            for name, each in _clipped(gradients, clip).items():
                moving[name] = momentum * moving[name] + each
                weights[name] -= lr * moving[name]
        assert_close(run.weights, weights)

    return follows


def clipped(threshold, query=0.5, key=0.5):
    """Rows of queries and keys are the base run's times powers of eta; the smallest eta of a layer is threshold / S."""

    def are(base, run):
        finished(base, run)
        for layer in (0, 1):
            name = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
            ratio = (run.weights[name] / base.weights[name]).double().unflatten(1, (3, -1))  # four heads, no groups
            etas = ratio[:, 0] ** (1 / query)
            eta = etas.mean((1, 2))
            assert eta.min() < 0.9
            for actual in (etas, ratio[:, 1] ** (1 / key)):
                torch.testing.assert_close(actual, eta.view(-1, 1, 1).expand_as(actual), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(ratio[:, 2], torch.ones_like(ratio[:, 2]))
            (largest,) = base.statistic(f"layer {layer + 1}/max_attention_logit")
            assert float(eta.min()) == pytest.approx(threshold / float(largest), rel=1e-3)

    return are


def logits_are_logged(base, run):
    finished(base, run)
    name = "layer 2/max_attention_logit"
    assert "statistics" not in base.records[0] and "statistics" in run.records[0]
    assert all(0 < float(each) < 10 for each in run.statistic(name))


def lion(lr=1e-2, decay=0.01, clip=1.0, beta1=0.95, beta2=0.98, among=("",)):
    """Weights follow from the gradients by Lion (Chen et al. 2023); ``among``: parts of the names to compare."""

    def follows(_, run):
        finished(run)
        weights = {name: each.double() for name, each in run.initial.items()}
        moving = {name: torch.zeros_like(each) for name, each in weights.items()}
        for gradients in run.gradients:
            for name, each in _clipped(gradients, clip).items():
                direction = (beta1 * moving[name] + (1 - beta1) * each).sign()
                weights[name] -= lr * (direction + decay * _decays(name) * weights[name])
                moving[name] = beta2 * moving[name] + (1 - beta2) * each
        assert_close({name: each for name, each in run.weights.items() if any(map(name.__contains__, among))}, weights)

    return follows


def adaptive(**settings):
    return muon(**{"optimizer": "adaptive_muon", "muon_extra_scale_factor": 0.02, **settings})


def muon(decay=0.01, lr=1e-2, clip=1.0, **settings):
    """The projections of the MLP follow from the gradients by Muon (``tests/reference``) with these settings."""
    c = SimpleNamespace(**MUON_DEFAULTS | settings)

    def follows(_, run):
        finished(run)
        names = [name for name in run.initial if name.endswith(("linear_qkv.weight", "linear_fc1.weight"))]
        weights = {name: run.initial[name].double().flatten(0, -2) for name in names}
        moments = {name: (torch.zeros_like(each), torch.zeros_like(each)) for name, each in weights.items()}
        for gradients in run.gradients:
            clipped = _clipped(gradients, clip)
            for name in names:
                update_weight(name, weights[name], clipped[name].flatten(0, -2), *moments[name], c, lr, decay)
        assert_close({name: run.weights[name].flatten(0, -2) for name in names}, weights, 2e-5)

    return follows


def assert_close(actual, expected, tolerance=2e-6):
    for name, each in actual.items():
        difference = float((each.double() - expected[name]).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference}"


def norms_are(decay):
    """The norms of queries and keys are in the group with this weight decay."""

    def are(_, run):
        finished(run)
        result = {wd for (_, wd), names in run.rates[0].items() for name in names if "q_layernorm.weight" in name}
        assert result == {decay}, result

    return are


def rates_of_embedding(*rates):
    """The embedding has these learning rates per update; other parameters keep the base run's rates."""

    def are(base, run):
        finished(run)
        result = [next(lr for (lr, _), names in each.items() if any(EMBEDDING in name for name in names))
                 for each in run.rates]  # fmt: skip
        remaining = [next(lr for (lr, _), names in each.items() if any("mlp" in name for name in names))
                  for each in run.rates]  # fmt: skip
        assert close(result, list(rates)) and close(remaining, base.learning_rates)

    return are


def decays(*values):
    """Weight decay of matrices per update, as the optimizer had it and as recorded."""

    def are(_, run):
        finished(run)
        result = [max(decay for _, decay in each) for each in run.rates]
        assert close(result, list(values)), result
        assert close(run.column("weight_decay"), list(values)), run.column("weight_decay")

    return are


def rates(*values):
    """Learning rates per iteration, as recorded and as the optimizer had them."""

    def are(_, run):
        finished(run)
        assert close(run.learning_rates, list(values)), run.learning_rates
        assert close([max(lr for lr, _ in each) for each in run.rates], list(values))

    return are


def scales(*values):
    return gives(lambda run: run.column("loss_scale"), list(values))


def formats(kind):
    return lambda run: {str(each.dtype).removeprefix("torch.") for each in run.moments[kind].values()}


def kept(name):
    return lambda run: set() if not run.kept else {each.element_size() for each in run.kept.values()}


def offloads(low, high):
    """Offloads more than ``low`` times the base run's elements, or of at least one, and at most ``high`` times."""

    def are(base, run):
        finished(run)
        before, after = (sum(int(each) for each in observed.arguments if each.isdigit()) for observed in (base, run))
        assert low * max(before, 1) < after <= high * (before or 10**6), (before, after)

    return are


def more_calls(name):
    def are(base, run):
        finished(run)
        assert 0 < base.called[name] < run.called[name], (base.called, run.called)

    return are


HOST_MEMORY = ("megatron.core.host_memory:HostMemory.zeros",)
LOADS = ("megatron.core.optimizer.host_state:HostState._pairs",)
SGD = "--optimizer sgd --weight-decay 0"
MUON = "--optimizer muon --muon-fp32-matmul-prec highest --muon-coefficient-type simple"
ADAPTIVE = f"{MUON.replace('muon', 'adaptive_muon', 1)} --muon-extra-scale-factor 0.02"
MUON_DEFAULTS = {
    "num_attention_heads": 4, "group_query_attention": False, "swiglu": False, "geglu": False, "quick_geglu": False,
    "muon_momentum": 0.9, "muon_nesterov": False, "muon_no_split_qkv": False, "muon_split_qkv_per_head": False,
    "muon_split_gate_up": False, "muon_scale_mode": "spectral", "muon_extra_scale_factor": 1.0,
    "muon_coefficient_type": "simple", "muon_num_ns_steps": 5, "optimizer": "muon",
    "adaptive_muon_moment2_method": "adamuon", "adaptive_muon_beta2": 0.95, "adaptive_muon_eps": 1e-8,
}  # fmt: skip
CLIP = "--train-iters 1 --log-max-attention-logit"
PRECISE = f"{BF16} --use-precision-aware-optimizer"
FOUR = "--train-iters 4"
LINEAR = "--lr-decay-style linear --train-iters 4"
BY_SAMPLES = "--train-samples 16 --lr-decay-style linear"
WSD = "--lr-decay-style WSD --train-iters 4 --lr-wsd-decay-iters 2 --lr-wsd-decay-style linear"
HALF = "--fp16 --train-iters 4"
COSINE = [0.5 * (math.cos(math.pi * share / 4) + 1) for share in range(4)]

OPTIMIZER = [
    row("--optimizer sgd", sgd(), base="--weight-decay 0"),
    row("--sgd-momentum 0.5", sgd(momentum=0.5), base=SGD),
    row("--optimizer muon", muon(), base="--muon-fp32-matmul-prec highest --muon-coefficient-type simple"),
    row("--adaptive-muon-moment2-method normuon", adaptive(adaptive_muon_moment2_method="normuon"), base=ADAPTIVE),
    row("--adaptive-muon-beta2 0.5", adaptive(adaptive_muon_beta2=0.5), base=ADAPTIVE),
    row("--adaptive-muon-eps 0.1", adaptive(adaptive_muon_eps=0.1), base=ADAPTIVE),
    row("--muon-momentum 0.5", muon(muon_momentum=0.5), base=MUON),
    row("--muon-nesterov", muon(muon_nesterov=True), base=MUON),
    row("--muon-no-split-qkv", muon(muon_no_split_qkv=True), base=MUON),
    row("--muon-split-qkv-per-head", muon(muon_split_qkv_per_head=True), base=MUON),
    row("--muon-split-gate-up", muon(muon_split_gate_up=True, swiglu=True), base=f"{MUON} --swiglu"),
    row("--muon-scale-mode unit_rms_norm", muon(muon_scale_mode="unit_rms_norm"), base=MUON),
    row("--muon-extra-scale-factor 0.2", muon(muon_extra_scale_factor=0.2), base=MUON),
    row("--muon-coefficient-type cans", muon(muon_coefficient_type="cans"), base=MUON),
    row("--muon-num-ns-steps 3", muon(muon_num_ns_steps=3), base=MUON),
    row("--muon-fp32-matmul-prec medium", changes("weights"), keeps_to_rounding("weights", tolerance=0.1), base=MUON),
    row("--muon-use-syrk", stops("--muon-use-syrk: requires --muon-fp32-matmul-prec medium", code=2), base=MUON),
    row("--muon-tp-mode blockwise", stops("--muon-tp-mode blockwise: orthogonalizes each shard separately", code=2),
        base=f"{MUON} --tensor-model-parallel-size 2", ranks=2),
    row("--muon-scalar-optimizer lion", lion(among=("layernorm", "embedding")), base=MUON),
    row("--qk-clip", clipped(0.01), base=f"{CLIP} --qk-clip-threshold 0.01"),
    row("--qk-clip-threshold 0.01", clipped(0.01), base=f"{CLIP} --qk-clip"),
    row("--qk-clip-alpha 0.3", clipped(0.01, -0.2, 0.2), base=f"{CLIP} --qk-clip --qk-clip-threshold 0.01"),
    row("--log-max-attention-logit", logits_are_logged),
    row("--optimizer lion", lion()),
    row("--lion-beta1 0.5", lion(beta1=0.5), base="--optimizer lion"),
    row("--lion-beta2 0.5", lion(beta2=0.5), base="--optimizer lion"),
    row("--weight-decay 0.3", adamw(decay=0.3)),
    row("--clip-grad 0.1", sgd(clip=0.1), base=SGD),
    row("--adam-beta1 0.5", adamw(beta1=0.5)),
    row("--adam-beta2 0.5", adamw(beta2=0.5)),
    row("--adam-eps 0.1", adamw(eps=0.1)),
    row("--lr 3e-2", adamw(lr=3e-2)),
    row("--apply-wd-to-qk-layernorm", norms_are(0.01), base="--qk-layernorm"),
    row("--use-precision-aware-optimizer", accepts, gives(formats("exp_avg"), {"bfloat16"}),
        base=f"{BF16} --exp-avg-dtype bf16"),
    row("--exp-avg-dtype bf16", gives(formats("exp_avg"), {"bfloat16"}), base=PRECISE),
    row("--exp-avg-sq-dtype bf16", gives(formats("exp_avg_sq"), {"bfloat16"}), base=f"{PRECISE} --adam-beta2 0.95"),
    row("--main-params-dtype fp16", stops("--main-params-dtype", code=2), base=PRECISE),
    row("--main-grads-dtype bf16", stops("--grad-reduce-in-bf16", code=2), base=PRECISE),
    row("--no-store-param-remainders", gives(kept("kept"), {4}), keeps("weights"), base=BF16),
    row("--optimizer-cpu-offload", offloads(0, 1), keeps("weights"), base=BF16, count=HOST_MEMORY),
    row("--optimizer-offload-fraction 0.5", offloads(0.2, 0.6), keeps("weights"),
        base=f"{BF16} --optimizer-cpu-offload", count=HOST_MEMORY),
    row("--overlap-cpu-optimizer-d2h-h2d", more_calls("HostState._pairs"), keeps("weights"),
        base=f"{BF16} --optimizer-cpu-offload", count=LOADS),
    row("--decoupled-lr 2e-2", rates_of_embedding(2e-2, 2e-2)),
    row("--decoupled-min-lr 1e-2", rates_of_embedding(2e-2, 1.5e-2),
        base="--lr-decay-style linear --decoupled-lr 2e-2"),
]  # fmt: skip
SCHEDULE = [
    row("--lr-decay-style cosine", rates(*(1e-2 * share for share in COSINE)), base=FOUR),
    row("--min-lr 1e-3", rates(1e-2, 7.75e-3, 5.5e-3, 3.25e-3), base=LINEAR),
    row("--lr-decay-iters 2", rates(1e-2, 5e-3, 0.0, 0.0), base=LINEAR),
    row("--lr-decay-samples 8", rates(1e-2, 5e-3, 0.0, 0.0), base=BY_SAMPLES, drop="--train-iters"),
    row("--lr-wsd-decay-style cosine", rates(1e-2, 1e-2, 5e-3 * (1 + math.cos(math.pi / 4)), 5e-3),
        base=WSD.replace("iters 2", "iters 4").replace("--train-iters 4", "--train-iters 4 --lr-decay-iters 5")),
    row("--lr-wsd-decay-iters 4", rates(1e-2, 7.5e-3, 5e-3, 2.5e-3), base=WSD),
    row("--lr-wsd-decay-samples 16", rates(1e-2, 7.5e-3, 5e-3, 2.5e-3), drop="--train-iters",
        base="--train-samples 16 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-samples 8"),
    row("--lr-warmup-fraction 0.5", rates(0.0, 5e-3, 1e-2, 1e-2), base=FOUR),
    row("--lr-warmup-iters 2", rates(0.0, 5e-3, 1e-2, 1e-2), base=FOUR),
    row("--lr-warmup-samples 8", rates(0.0, 5e-3, 1e-2, 1e-2), base="--train-samples 16", drop="--train-iters"),
    row("--lr-warmup-init 4e-3", rates(4e-3, 7e-3, 1e-2, 1e-2), base=f"{FOUR} --lr-warmup-iters 2"),
    row("--start-weight-decay 0.1", decays(0.1, 0.2, 0.3, 0.4),
        base=f"{FOUR} --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.5"),
    row("--end-weight-decay 0.5", decays(0.1, 0.2, 0.3, 0.4),
        base=f"{FOUR} --weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.1"),
    row("--weight-decay-incr-style cosine", decays(*(0.4 * (1 - share) for share in COSINE)),
        base=f"{FOUR} --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.4"),
]  # fmt: skip
PRECISION = [
    row("--bf16", gives(lambda run: {str(each.dtype) for each in run.initial.values()}, {"torch.bfloat16"})),
    row("--fp16", gives(lambda run: {str(each.dtype) for each in run.initial.values()}, {"torch.float16"})),
    row("--loss-scale 64", scales(64.0, 64.0, 64.0, 64.0), base=HALF),
    row("--initial-loss-scale 128", scales(128.0, 128.0, 128.0, 128.0), base=HALF),
    row("--loss-scale-window 2", scales(128.0, 256.0, 256.0, 512.0), base=f"{HALF} --initial-loss-scale 128"),
    row("--min-loss-scale 2147483648", scales(2.0**32, 2.0**31, 2.0**31, 2.0**31), base=HALF),
    row("--hysteresis 1", scales(2.0**31, 2.0**30, 2.0**29, 2.0**28), base=HALF),
    row("--accumulate-allreduce-grads-in-fp32", stops("--grad-reduce-in-bf16", code=2),
        base=f"{BF16} --grad-reduce-in-bf16"),
    row("--grad-reduce-in-bf16", gives(lambda run: {kind for _, kind in run.buckets}, {"bfloat16"}), base=BF16),
    row("--batch-invariant-mode", gives(lambda run: run.called["batch_invariant_attention"], 8),
        count=("megatron.core.attention.context_parallel.forms:batch_invariant_attention",)),
    row("--deterministic-mode", gives(lambda run: run.called["use_deterministic_algorithms"], 1),
        count=("torch:use_deterministic_algorithms",)),
]  # fmt: skip
ROWS = [*OPTIMIZER, *SCHEDULE, *PRECISION]
