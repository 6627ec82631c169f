"""GPU kinds and links as data, and the collectives' times on a cluster. Torch-free.

``gpus.tsv`` holds rates of kernels at large shapes, ``links.tsv`` bus bandwidths by message size. A JSON file with the
columns of ``gpus.tsv`` describes a GPU that is not in the table."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from megatron.core.config.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """Rates of one GPU kind: compute in TFLOP/s, memory in TB/s."""

    name: str
    memory_gib: float
    peak: float
    """Dense bf16 peak of the data sheet, the basis of MFU."""
    gemm: float
    wgrad: float
    fp8: float
    attention_forward: float
    """For long sequences; causal masks count half."""
    attention_backward: float
    memory_rate: float
    nvlink: float = 1.0
    """NVLink bandwidth relative to ``links.tsv``."""


@cache
def table(name: str) -> list[list[str]]:
    """Return the cells of a packaged table, without comment lines."""
    text = files("megatron.training.report.plan").joinpath(name).read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]


def gpu_kinds() -> dict[str, Gpu]:
    """Return the packaged GPU kinds by name."""
    return {row[0]: Gpu(row[0], *map(float, row[1:10])) for row in table("gpus.tsv")}


def find_gpu(name: str) -> Gpu:
    """Return a packaged kind, or the GPU of a JSON file. Raises UserError for an unknown name or a malformed file."""
    kinds = gpu_kinds()
    if name in kinds:
        return kinds[name]
    if not name.endswith(".json"):
        raise UserError(f"--gpu {name}: unknown GPU; use one of {', '.join(kinds)}, or a .json file of rates")
    names = {field.name for field in fields(Gpu)} - {"name"}
    try:
        values = json.loads(Path(name).read_text(encoding="utf-8"))
        gpu = Gpu(Path(name).stem, **{key: float(value) for key, value in values.items() if key in names})
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise UserError(f"--gpu {name}: must be a JSON object with {', '.join(sorted(names))}: {error}") from None
    if wrong := [key for key in sorted(names) if not 0 < getattr(gpu, key) < math.inf]:
        raise UserError(f"--gpu {name}: {', '.join(wrong)} must be positive and finite")
    return gpu


def kind_of_device(device: str) -> Gpu | None:
    """Return the kind of a device name such as ``NVIDIA H100 80GB HBM3``; None for kinds without a row."""
    words = device.replace("-", " ").split()
    return next((gpu for name, gpu in gpu_kinds().items() if name in words), None)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs, each GPU with a network card."""

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 8
    nic_scale: float = 1.0
    """Bandwidth of a GPU's network card relative to 400 Gb/s."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    def collective(self, size: float, ranks: int, stride: int, kind: str = "shard") -> float:
        """Return the seconds of a collective of ``size`` bytes in total per rank. The group has ``ranks`` ranks,
        ``stride`` apart. Groups across nodes use a network card per rank of the node, at most the speed of NVLink. In
        an all-to-all the card of a rank carries its messages to other nodes, while NVLink carries the rest."""
        if ranks == 1 or not size:
            return 0.0
        on_node = max(1, min(ranks, self.gpus_per_node // stride))
        speed = _bus_bandwidth("nvlink", "all_reduce" if kind == "all_reduce" else "shard", size) * self.gpu.nvlink
        latency = 10e-6 + 1e-6 * on_node
        if kind == "all_to_all" and on_node < ranks:
            outside = size * (ranks - on_node) / ranks
            card = _bus_bandwidth("nic", "shard", outside) * self.nic_scale
            inside = size * (on_node - 1) / ranks / (speed * 1e9)
            return latency + 15e-6 * math.log2(ranks / on_node) + max(outside / (card * 1e9), inside)
        if on_node < ranks:
            cards = _bus_bandwidth("nic", kind, size) * self.nic_scale * on_node
            speed = min(speed, cards) if on_node > 1 else cards
            latency += 15e-6 * math.log2(ranks / on_node)
        moved = size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        return latency + moved / (speed * 1e9)

    def send(self, size: float, stride: int) -> float:
        """Return the seconds of a point-to-point message between ranks ``stride`` apart."""
        if stride < self.gpus_per_node:
            return 10e-6 + size / (200e9 * self.gpu.nvlink)
        return 20e-6 + size / (45e9 * self.nic_scale)


@cache
def _points(link: str, kind: str) -> tuple[tuple[float, float], ...]:
    return tuple(
        (float(size) * 1e6, float(speed))
        for name, what, size, speed, *_ in table("links.tsv")
        if (name, what) == (link, kind)
    )


def _bus_bandwidth(link: str, kind: str, size: float) -> float:
    """Return GB/s, interpolated in log(size); below the table in proportion to the size, above it constant."""
    points = _points(link, kind)
    if size <= points[0][0]:
        return points[0][1] * size / points[0][0]
    for (low, slow), (high, fast) in zip(points, points[1:]):
        if size <= high:
            return slow + (fast - slow) * math.log(size / low) / math.log(high / low)
    return points[-1][1]


def build_cluster(
    gpu: str, nodes: int, gpus_per_node: int, memory: float | None = None, nic_gbits: float = 400.0
) -> Cluster:
    """Return a checked cluster; ``memory`` overrides GiB per GPU. Raises UserError for impossible values."""
    kind = find_gpu(gpu)
    for flag, value in {"--nodes": nodes, "--gpus-per-node": gpus_per_node, "--nic-gbits": nic_gbits}.items():
        if not 0 < value < 2**20:
            raise UserError(f"{flag} {value:g}: must be positive and below {2**20}")
    if memory is not None:
        if not 0 < memory < 2**20:
            raise UserError(f"--memory {memory:g}: must be a positive number of GiB")
        kind = replace(kind, memory_gib=memory)
    return Cluster(kind, nodes, gpus_per_node, nic_gbits / 400.0)
