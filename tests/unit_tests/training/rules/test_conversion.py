"""Flags of weights from and to Hugging Face that contradict each other."""

import pytest

from tests.unit_tests.training.rules.test_run_all import problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--load-hf a --pretrained-checkpoint b", "--load-hf a: contradicts --pretrained-checkpoint"),
        ("--load-hf a --use-checkpoint-args --load b", "--load-hf a: contradicts --use-checkpoint-args"),
        ("--load-hf a --spec b c", "--load-hf a: contradicts --spec"),
        ("--load-hf a --moe-use-upcycling", "--load-hf a: contradicts --moe-use-upcycling"),
        ("--save a --save-hf-interval 4", "--save-hf-interval 4: is not a multiple of --save-interval"),
        ("--save a --save-interval 3 --save-hf-interval 4", "--save-hf-interval 4: is not a multiple of"),
    ],
)
def test_contradictions_are_named(text, problem):
    assert any(each.startswith(problem) for each in map(str, problems(text, 1))), problems(text, 1)


@pytest.mark.parametrize("text", ["--load-hf a --load b", "--save a --save-interval 2 --save-hf-interval 4",
                                  "--save-hf-interval 4"])  # fmt: skip
def test_what_goes_together_is_accepted(text):
    assert problems(text, 1) == []
