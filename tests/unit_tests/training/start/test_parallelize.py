"""Log lines about the choices of a run."""

import logging

import pytest
import torch

from megatron.training.start.parallelize import report_choices


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs compute in fp8")
@pytest.mark.parametrize("fp8, count", [("hybrid", 1), (None, 0)])
def test_fp8_on_a_cpu_is_reported_once(caplog, fp8, count):
    with caplog.at_level(logging.INFO):
        report_choices([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], fp8)
    assert caplog.text.count("--fp8-format hybrid: emulated on the CPU") == count
