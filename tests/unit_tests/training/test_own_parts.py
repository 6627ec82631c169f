"""A user's own data set and hooks: wrong ones end in one message before the first iteration."""

import numpy as np
import pytest

from megatron.core.config.errors import UserError
from megatron.training.data.samples import check_first_sample
from megatron.training.hooks import Hook
from megatron.training.hooks.base import check_methods
from tests.test_utils.gpt_runs import MODEL_FLAGS

LENGTH = 4
EXPECTED = {
    "tokens": np.zeros(LENGTH, np.int64), "labels": np.zeros(LENGTH, np.int64),
    "loss_mask": np.zeros(LENGTH, np.float32), "position_ids": np.arange(LENGTH), "cu_seqlens": np.array([0, 4]),
}  # fmt: skip
GOOD = {key: value for key, value in EXPECTED.items() if key != "cu_seqlens"}


@pytest.mark.parametrize("change, said", [
    ({"tokens": None, "labels": None}, r"lacks tokens, labels \(it has loss_mask, position_ids, text\)"),
    ({"tokens": np.zeros(LENGTH + 1, np.int64)}, r"has tokens of shape \[5\] instead of \[4\]"),
    ({"tokens": np.zeros(LENGTH)}, "has tokens of type float64"),
    ({"labels": "text"}, r"has labels of shape \[\] instead of \[4\]"),
    ({"position_ids": [[1], [2, 3]]}, "has a position_ids that is no array"),
])  # fmt: skip
def test_a_wrong_first_sample_is_described(change, said):
    sample = {key: value for key, value in {**GOOD, **change}.items() if value is not None} | {"text": "x"}
    with pytest.raises(UserError, match=rf"^mine: the first sample .*{said}.*; expected: tokens \[4\] int64, labels"):
        check_first_sample([sample], EXPECTED, "mine")


@pytest.mark.parametrize("sample", [GOOD, {**GOOD, "loss_mask": np.ones(LENGTH, bool), "more": "text"},
                                    {key: value.tolist() for key, value in GOOD.items()}])  # fmt: skip
def test_samples_with_all_keys_pass(sample):
    check_first_sample([sample], EXPECTED, "mine")
    check_first_sample([], EXPECTED, "empty")
    check_first_sample(None, EXPECTED, "none")


def test_a_sample_that_is_no_dictionary_is_named():
    with pytest.raises(UserError, match="^mine: a sample is a list; return a dictionary of tokens"):
        check_first_sample([[1, 2]], EXPECTED, "mine")


class Repeated:
    """A map-style data set of equal samples."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.sample


def run_with(rank, world_size, kind):
    """Exit code and stderr of a run with its own data set or hook."""
    import contextlib
    import io

    from megatron.training.arguments import parse_args
    from megatron.training.run import run
    from megatron.training.tasks.gpt import GPTTask

    class OwnData(GPTTask):
        def train_valid_test_datasets_provider(self, num_samples):
            good = self.random_sample(np.random.default_rng(0))
            return Repeated({"text": "x"} if kind == "data" else good), Repeated(good), Repeated(good)

    class Misspelt(Hook):
        def on_iteration(self, state):
            """Never called."""

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        cfg = parse_args([*MODEL_FLAGS, "--train-iters", "3"], needs_data=False)
        code = run(cfg, OwnData, [Misspelt()] if kind == "hook" else [])
    return code, errors.getvalue()


@pytest.mark.parametrize("kind, said", [
    ("data", "OwnData.train_valid_test_datasets_provider, train data: the first sample lacks tokens, labels"),
    ("hook", "Misspelt.on_iteration: is never called; "),
])  # fmt: skip
def test_a_run_ends_with_one_message(gloo_pool, kind, said):
    ((code, errors),) = gloo_pool.run(run_with, 1, kind)
    assert code == 2 and said in errors and len(errors.splitlines()) == 1


def test_run_with_custom_data_trains(gloo_pool):
    assert gloo_pool.run(run_with, 1, "none") == [(0, "")]


def test_every_method_of_hooks_is_accepted():
    class Complete(Hook):
        on_color = 3

        def on_step(self, state, metrics):
            """Called."""

    check_methods([Complete(), Hook()])
