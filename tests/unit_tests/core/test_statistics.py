"""What is logged of a step's sums: distributions by their ends, percentile and entropy; means; nothing private."""

import math

import pytest
import torch

from megatron.core.statistics import StepStatistics, invalid_values, summaries, total_losses

DOUBLE = torch.float64


def test_a_distribution_is_reported_by_its_ends_percentile_and_entropy():
    loads = torch.arange(40, 0, -1, dtype=DOUBLE)
    share = loads / loads.sum()
    result = summaries({"layer 4": {"tokens_per_expert": loads, "_levels": loads, "dropped": torch.tensor([7.0])}})
    assert result.pop("layer 4/tokens_per_expert entropy").item() == pytest.approx(
        -(share * share.log()).sum().item() / math.log(40)
    )
    assert {name.split("/")[1]: value.item() for name, value in result.items()} == {
        "tokens_per_expert min": 1, "tokens_per_expert p95": 38, "tokens_per_expert max": 40, "dropped": 7,
    }  # fmt: skip


@pytest.mark.parametrize("loads, entropy", [([5, 5, 5, 5], 1.0), ([0, 9, 0, 0], 0.0), ([3, 0, 3, 0], 0.5), ([4], 0.0)])
def test_entropy_is_1_for_equal_loads_and_0_for_one_expert(loads, entropy):
    result = summaries({"layer 1": {"tokens_per_expert": torch.tensor(loads, dtype=DOUBLE)}})
    assert result["layer 1/tokens_per_expert entropy"].item() == pytest.approx(entropy)


def test_losses_are_means_of_each_layer_and_sums_over_all():
    totals = {f"layer {n}": {"z_loss": torch.tensor([6.0 * n, 4.0], dtype=DOUBLE)} for n in (1, 2)}
    assert {name: value.item() for name, value in summaries(totals).items()} == {
        "layer 1/z_loss": 1.5, "layer 2/z_loss": 3.0,
    }  # fmt: skip
    assert total_losses(totals)["z_loss"].tolist() == [18.0, 8.0]


def test_nonfinite_values_are_named_by_module():
    totals = {f"layer {n}": {"nonfinite_router_logit": torch.tensor([n - 1.0])} for n in (1, 2)}
    result = invalid_values(totals)
    assert result["a router logit of layer 1"].tolist() == [0.0, 1.0]
    assert result["a router logit of layer 2"].isnan().tolist() == [True, False] and not summaries(totals)


def test_sums_start_at_zero_after_they_are_taken():
    statistics = StepStatistics("layer 1", counts=2, rest=1)
    assert statistics.take(torch.device("cpu")).tolist() == [0, 0, 0]
    statistics.add("rest", torch.tensor(2))
    statistics.add("counts", torch.tensor([[1.0], [3.0]]))
    statistics.add("counts", torch.tensor([1, 1]))
    assert statistics.take(torch.device("cpu")).tolist() == [2, 4, 2]
    assert statistics.take(torch.device("cpu")).tolist() == [0, 0, 0]
