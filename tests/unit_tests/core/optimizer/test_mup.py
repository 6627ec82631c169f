"""muP: initial values, rates, epsilon and multipliers of a model at several widths against table 8 of the paper."""

import math

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer, get_mup_config_overrides
from megatron.core.optimizer.param_groups import get_standard_config_overrides
from tests.test_utils.layouts import MODEL, configure
from tests.unit_tests.core.models.test_gpt_model import VOCAB, make_model

BASE, STD, LR, EPS, LAYERS = 64, 0.02, 1e-2, 1e-6, 2
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
EMBEDDINGS = ("embedding.position_embeddings.weight", *VOCABULARY)
WRITERS = ("linear_proj.weight", "linear_fc2.weight")


def built(width, **settings):
    sizes = {"hidden_size": width, "ffn_hidden_size": 4 * width, "num_attention_heads": 4, "num_layers": LAYERS}
    mup = {"use_mup": True, "mup_base_hidden_size": BASE, "init_method_std": STD}
    return make_model(**sizes, **mup, share_embeddings_and_output_weights=False, **settings)


def table_row(name, parameter):
    """Row of table 8: matrices between two dims that grow, between a fixed and a growing dim, or vectors."""
    if parameter.ndim == 1:
        return "vector"
    return "input or output" if name in EMBEDDINGS else "hidden"


def standard_deviation(name, parameter, width):
    """sigma^2 of hidden matrices falls with 1 / width; GPT-2's factor for matrices that write into the stream."""
    if table_row(name, parameter) == "input or output":
        return STD
    depth = 1 / math.sqrt(2 * LAYERS) if name.endswith(WRITERS) else 1
    return STD * depth / math.sqrt(width / BASE)


@pytest.mark.parametrize("width", [32, 64, 256])
def test_initial_values_follow_the_width(width):
    for name, parameter in built(width).named_parameters():
        if table_row(name, parameter) != "vector":
            error = 5 / math.sqrt(parameter.numel())  # five standard errors of the estimate
            expected = standard_deviation(name, parameter, width)
            values = parameter[:VOCAB] if name in VOCABULARY else parameter
            assert float(values.std()) == pytest.approx(expected, rel=error), name


RATES = {  # optimizer -> row of table 8 -> (factor of the rate, factor of epsilon or None), as functions of m
    "adam": {"hidden": lambda m: (1 / m, 1 / m), "input or output": lambda m: (1, None), "vector": lambda m: (1, None)},
    "lion": {"hidden": lambda m: (1 / m, None), "input or output": lambda m: (1, None), "vector": lambda m: (1, None)},
    "sgd": {"hidden": lambda m: (1, None), "input or output": lambda m: (m, None), "vector": lambda m: (m, None)},
}


@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("decoupled", [None, 3e-3])
@pytest.mark.parametrize("width", [32, 256])
def test_rates_and_epsilon_follow_the_table(optimizer, decoupled, width):
    config = OptimizerConfig(optimizer=optimizer, lr=LR, min_lr=LR / 10, adam_eps=EPS, decoupled_lr=decoupled)
    overrides = {**get_standard_config_overrides(config), **get_mup_config_overrides(config, width / BASE, optimizer)}
    groups = get_megatron_optimizer(config, [built(width)], config_overrides=overrides).param_groups
    names = [name for group in groups for name in group["names"]]
    assert len(names) == len(set(names)) > 20
    for group in groups:
        for name, parameter in zip(group["names"], group["params"]):
            rate, eps = RATES[optimizer][table_row(name, parameter)](width / BASE)
            peak, low = LR * rate, LR / 10 * rate
            if decoupled and name in VOCABULARY:
                peak, low = decoupled, LR / 10
            assert (LR if group["max_lr"] is None else group["max_lr"]) == pytest.approx(peak), name
            assert (LR / 10 if group["min_lr"] is None else group["min_lr"]) == pytest.approx(low), name
            assert group.get("eps") == (None if eps is None else pytest.approx(EPS * eps)), name
            assert group["wd_mult"] == (parameter.ndim > 1)


def test_matrices_of_muon_keep_their_rate():
    config = OptimizerConfig(optimizer="muon", lr=LR, min_lr=0.0, muon_scale_mode="unit_rms_norm")
    overrides = get_mup_config_overrides(config, 4.0, "muon")
    groups = get_megatron_optimizer(config, [built(256)], config_overrides=overrides).param_groups
    assert all(group["max_lr"] is None and "eps" not in group for group in groups)


def test_base_width_changes_nothing():
    assert get_mup_config_overrides(OptimizerConfig(lr=LR), 1.0) == {}


@pytest.mark.parametrize("written, kind", [("SGD", "sgd"), ("Adam", "adam")])
def test_scripts_pass_the_multiplier_of_the_configuration_and_any_case_of_letters(written, kind):
    config = OptimizerConfig(lr=LR, adam_eps=EPS)
    multiplier = built(256).config.mup_width_mult
    assert multiplier == 256 / BASE
    (rates,), (expected,) = (get_mup_config_overrides(config, multiplier, name).values() for name in (written, kind))
    assert rates == expected and rates["max_lr"] == pytest.approx(LR * (4 if kind == "sgd" else 1 / 4))


@pytest.mark.parametrize("width, power, base_head", [(32, 1.0, None), (256, 1.0, 16.0), (256, 0.5, None)])
def test_multipliers_of_scores_embeddings_and_logits(width, power, base_head):
    model = built(width, mup_attn_scale_power=power, mup_base_head_dim=base_head, mup_embedding_mult=3.0).eval()
    plain = built(width).eval()
    plain.load_state_dict(model.state_dict())
    channels = width // 4
    scale = (base_head or 1.0) ** 0.5 / channels**power
    assert model.decoder.layers[0].self_attention.core_attention.scale == pytest.approx(scale)
    ids = torch.arange(6).view(1, 6)
    embedded = [one.embedding(ids, ids) for one in (model, plain)]
    torch.testing.assert_close(embedded[0], 3 * embedded[1])
    hidden = torch.randn(6, 1, width, dtype=embedded[0].dtype)
    expected = hidden.transpose(0, 1) @ model.output_layer.weight.T * (BASE / width)
    logits = model.outputs(hidden, None)
    torch.testing.assert_close(logits[..., :VOCAB], expected[..., :VOCAB])


def test_explicit_multiplier_of_logits_replaces_the_automatic_one():
    model, hidden = built(256, mup_output_mult=0.5).eval(), torch.randn(6, 1, 256)
    expected = hidden.to(model.output_layer.weight.dtype).transpose(0, 1) @ model.output_layer.weight.T / 2
    logits = model.outputs(hidden.to(expected.dtype), None)
    torch.testing.assert_close(logits[..., :VOCAB], expected[..., :VOCAB])


def test_adam_uses_the_epsilon_of_each_group():
    """Against torch's Adam with one group per epsilon."""
    torch.manual_seed(0)
    start = [torch.randn(8, 8, dtype=torch.float64) for _ in range(3)]
    model, expected = (
        torch.nn.ParameterDict({f"layer{index}": torch.nn.Parameter(x.clone()) for index, x in enumerate(start)})
        for _ in range(2)
    )
    config = OptimizerConfig(lr=LR, weight_decay=0.0, adam_eps=1e-3, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [model], config_overrides={ParamKey(name="layer1"): {"eps": 0.1}})
    eps = {"layer0": 1e-3, "layer1": 0.1, "layer2": 1e-3}
    reference = torch.optim.Adam(
        [{"params": [expected[name]], "eps": value} for name, value in eps.items()], lr=LR,
        betas=(config.adam_beta1, config.adam_beta2),
    )  # fmt: skip
    for group in optimizer.param_groups:
        group.update(lr=LR, weight_decay=0.0)
    for _ in range(3):
        for name in eps:
            model[name].grad = torch.randn_like(model[name]) * 0.1
            expected[name].grad = model[name].grad.clone()
        assert optimizer.step()[0]
        reference.step()
    for name in eps:
        torch.testing.assert_close(model[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--mup-base-hidden-size 16", "--mup-base-hidden-size 16: has no effect without --use-mup; add --use-mup"),
        ("--mup-output-mult 2", "--mup-output-mult 2.0: has no effect without --use-mup"),
        ("--use-mup --init-method-xavier-uniform", "--use-mup: is not supported with --init-method-xavier-uniform"),
        ("--use-mup --optimizer muon", "--use-mup: is undefined for --optimizer muon with --muon-scale-mode spectral"),
        ("--use-mup --mup-base-hidden-size 0", "--mup-base-hidden-size 0"),
    ],
)
def test_flags_without_meaning_are_rejected(flags, message):
    with pytest.raises(ValueError, match=message):
        configure([*MODEL, "--micro-batch-size", "1", *flags.split()], 1, "fp32")
