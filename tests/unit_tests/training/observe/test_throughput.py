"""Honest throughput: dense peaks, no number for unknown devices, an error for impossible ones."""

import logging

import pytest

from megatron.training.observe.throughput import (
    PEAKS,
    Throughput,
    ThroughputError,
    device_name,
    max_resident_bytes,
    memory_bytes,
    mfu,
    peak_tflops,
    resident_bytes,
)

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("CPU", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A1000", None),
    ],
)
def test_peaks_are_the_dense_ones(name, tflops):
    assert peak_tflops(name) == tflops


def test_fp8_peaks_are_twice_bf16_within_rounding():
    for _, bf16, fp8 in PEAKS:
        assert fp8 is None or fp8 == pytest.approx(2 * bf16, rel=0.02)
    assert peak_tflops(H100, "fp8") == 1978.9 and peak_tflops("NVIDIA A100-SXM4-80GB", "fp8") is None


def test_mfu_is_a_share_of_the_peak():
    assert mfu(494.7, H100) == pytest.approx(0.5)
    assert mfu(494.7, H100, "fp8") == pytest.approx(0.25, rel=1e-3)
    assert mfu(989.4, H100) == 1.0


def test_mfu_above_one_is_an_error():
    with pytest.raises(
        ThroughputError, match=r"1319.2 TFLOP/s per device is 133% of the dense bf16 peak of NVIDIA H100"
    ):
        mfu(1319.2, H100)


def test_mfu_of_an_unknown_device_is_not_guessed():
    assert mfu(123.0, "CPU") is None
    rate = Throughput(2, "CPU").rate(flops=2e12, num_tokens=1000, elapsed=0.5)
    assert rate["tflops_per_device"] == 2.0 and rate["mfu"] is None


def test_rates_per_device_and_in_all():
    rate = Throughput(4, "NVIDIA H200").rate(flops=4 * 395.76e12 * 2, num_tokens=8000, elapsed=2.0)
    assert rate["tflops_per_device"] == pytest.approx(395.76) and rate["mfu"] == pytest.approx(0.4)
    assert rate["tokens_per_second"] == 4000


def test_impossible_rates_are_logged_as_an_error_once_and_not_reported(caplog):
    throughput = Throughput(1, "NVIDIA H200")
    with caplog.at_level(logging.ERROR):
        rates = [throughput.rate(flops=5e15, num_tokens=1, elapsed=1.0) for _ in range(3)]
    assert all(rate["mfu"] is None for rate in rates) and len(caplog.records) == 1


def test_no_time_and_no_flops_give_no_number():
    rate = Throughput(1, H100).rate(1e12, 10, 0.0)
    assert rate == {"tokens_per_second": 0, "tflops_per_device": None, "mfu": None}
    rate = Throughput(1, H100).rate(0.0, 10, 1.0)
    assert rate == {"tokens_per_second": 10, "tflops_per_device": None, "mfu": None}


def test_memory_of_a_cpu_process_is_its_resident_set():
    sizes = memory_bytes("cpu")
    assert set(sizes) == {"mem-resident-bytes", "mem-max-resident-bytes"}
    assert 2**20 < sizes["mem-resident-bytes"] <= 1.05 * sizes["mem-max-resident-bytes"] < 2**45
    assert resident_bytes() > 0 and max_resident_bytes() > 0
    assert isinstance(device_name(), str)
