"""Injected errors: how often, where, and whether they return after a restart."""

from types import SimpleNamespace

import pytest
import torch

from megatron.training.checks.error_injection import ErrorInjection


def errors(kind, rate=10, rank=0, first=1, seed=1234, count=2000):
    """Iterations that a rank takes for wrong."""
    settings = SimpleNamespace(error_injection_rate=rate, error_injection_type=kind)
    injection = ErrorInjection(settings, seed, rank, first)
    losses = {"lm loss": torch.tensor([6.0, 3.0])}
    return {step for step in range(first, count) if injection(losses, step)["lm loss"].isnan().any()}


def test_one_in_so_many_iterations_has_an_error():
    result = errors("persistent_error")
    assert 150 < len(result) < 250 and errors("persistent_error", rate=1, count=50) == set(range(1, 50))
    assert result != errors("persistent_error", rank=1) and result != errors("persistent_error", seed=1)


def test_persistent_errors_return_after_a_restart_and_transient_ones_do_not():
    assert errors("persistent_error", first=500) == {step for step in errors("persistent_error") if step >= 500}
    before, after = errors("transient_error"), errors("transient_error", first=500)
    assert before == errors("transient_error") and len(before & after) < 40 < len(after)


@pytest.mark.parametrize("kind", ["transient_error", "persistent_error"])
def test_an_error_is_a_nan_sum_and_keeps_the_count(kind):
    settings = SimpleNamespace(error_injection_rate=1, error_injection_type=kind)
    losses = {"lm loss": torch.tensor([6.0, 3.0]), "aux": torch.tensor([1.0, 2.0])}
    result = ErrorInjection(settings, 1, 0, 1)(losses, 1)
    assert all(pair[0].isnan() and pair[1] == losses[name][1] for name, pair in result.items())
    assert losses["lm loss"].tolist() == [6.0, 3.0]


def test_correct_results_are_logged_only(caplog):
    assert errors("correct_result", rate=1, count=10) == set()
    assert sum("injecting error type correct_result" in record.message for record in caplog.records) == 9
