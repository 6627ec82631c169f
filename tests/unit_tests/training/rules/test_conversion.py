"""Flags of weights from and to Hugging Face that contradict each other."""

import pytest

from tests.unit_tests.training.rules.test_run_all import problems

EXPORT = "--save a --save-interval 2 --save-hf-interval 4"
LATENT = (
    f"{EXPORT} --multi-latent-attention --kv-lora-rank 8 --swiglu --disable-bias-linear --normalization RMSNorm"
    " --position-embedding-type rope --untie-embeddings-and-output-weights --num-experts 4"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--load-hf a --pretrained-checkpoint b", "--load-hf a: contradicts --pretrained-checkpoint"),
        ("--load-hf a --use-checkpoint-args --load b", "--load-hf a: contradicts --use-checkpoint-args"),
        ("--load-hf a --spec b c", "--load-hf a: contradicts --spec"),
        ("--load-hf a --moe-use-upcycling", "--load-hf a: contradicts --moe-use-upcycling"),
        ("--save a --save-hf-interval 4", "--save-hf-interval 4: is not a multiple of --save-interval"),
        ("--save a --save-interval 3 --save-hf-interval 4", "--save-hf-interval 4: is not a multiple of"),
        (
            f"{EXPORT} --num-layers 4 --spec tests.test_utils.gated_recurrence mixed_layers",
            "--save-hf-interval 4: is not supported with the layers of --spec; remove it",
        ),
    ],
)
def test_contradictions_are_named(text, problem):
    assert any(item.startswith(problem) for item in map(str, problems(text, 1))), problems(text, 1)


@pytest.mark.parametrize("text", ["--load-hf tests --load b", "--save a --save-interval 2 --save-hf-interval 4",
                                  "--save-hf-interval 4", "--qk-l2-norm --save a --save-interval 2",
                                  f"{EXPORT} --spec local", f"{EXPORT} --num-layers 4",
                                  f"{LATENT} --qk-layernorm --norm-epsilon 1e-6"])  # fmt: skip
def test_consistent_export_flags_are_accepted(text):
    assert problems(text, 1) == []


@pytest.mark.parametrize(("text", "nearest", "reasons"), [
    (LATENT, "deepseek_v3", ["norm_epsilon is 1e-05, the family has 1e-06 alone", "qk_layernorm is False"]),
    (f"{EXPORT} --qk-l2-norm --add-qkv-bias", "gpt2", ["qk_l2_norm is True", "add_qkv_bias is True"]),
    (f"{EXPORT} --bert-no-binary-head --swiglu", "bert", ["not a value of hidden_act", "swiglu"]),
])  # fmt: skip
def test_a_model_without_a_family_is_rejected_at_the_start_with_all_reasons(text, nearest, reasons):
    (problem,) = map(str, problems(text, 1, model_family="bert" if nearest == "bert" else "gpt"))
    assert problem.startswith("--save-hf-interval 4: no Hugging Face family has a model of these settings. not ")
    messages = next(part for part in problem.split(". not ") if part.startswith(f"{nearest}: "))
    assert all(reason in messages for reason in reasons), problem
