"""Measure a cluster before training: collectives per group of a layout, links between ranks, GEMM rate, host settings.

Bandwidths are bus bandwidths as nccl-tests defines them: bytes of the larger buffer / seconds x :func:`bus_factor`, so
that numbers of different group sizes compare with the speed of a link. All groups of an axis run at the same time, as
in training; the slowest member counts. Every pair of ranks of a node, and of ranks with the same place on different
nodes, exchanges a message: a slow rank is slow with all its partners."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.collective_names import all_gather, reduce_scatter
from megatron.core.groups.process_groups import RankGrid
from megatron.version import version_text

AXES = ("tp", "cp", "ep", "dp", "pp")
REPEATS = 5
Value = TypeVar("Value")


@dataclass(frozen=True)
class Result:
    """One measured quantity of one rank, link or group; a higher ``rate`` is better."""

    kind: str
    """Compared with the median of the same kind, such as ``tp all-reduce``."""
    ranks: tuple[int, ...]
    rate: float
    """GB/s (bus bandwidth), or TFLOP/s of a GEMM."""
    latency: float = 0.0
    """Microseconds of the smallest message; 0 for a GEMM."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks separated by commas; of more than eight, the first two and the last."""
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]},{ranks[1]}..{ranks[-1]}"


def bus_factor(operation: str, size: int) -> float:
    """Return bytes that cross each rank's link per byte of the larger buffer, in a group of ``size`` ranks."""
    return {"all-reduce": 2 * (size - 1) / size, "p2p": 1.0}.get(operation, (size - 1) / size)


def outliers(results: Sequence[Result], tolerance: float) -> list[tuple[Result, float]]:
    """Return the results below ``tolerance`` x the median of their kind, each with that median."""
    medians = {
        kind: statistics.median(result.rate for result in results if result.kind == kind)
        for kind in {result.kind for result in results}
    }
    return [(result, medians[result.kind]) for result in results if result.rate < tolerance * medians[result.kind]]


def rank_rates(links: Sequence[Result]) -> list[Result]:
    """Return one result per kind and rank: the median over its links, which one slow partner does not change."""
    rates: dict[tuple[str, int], list[float]] = {}
    for link in links:
        for rank in link.ranks:
            rates.setdefault((link.kind, rank), []).append(link.rate)
    return [Result(f"{kind} of rank", (rank,), statistics.median(values)) for (kind, rank), values in rates.items()]


def pairings(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs that together hold every pair once (circle method)."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle.insert(1, circle.pop())


class ClusterCheck:
    """Measurements of this rank; all methods are collective over the world and run in the same order on all ranks."""

    def __init__(self, device: torch.device, num_bytes: int, deadline: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.num_bytes, self.deadline = device, num_bytes, deadline
        self.store = dist.PrefixStore("check-cluster", dist.distributed_c10d._get_default_store())
        self.num_started: Counter[str] = Counter()

    @contextmanager
    def limit(self, name: str, ranks: Sequence[int]) -> Iterator[None]:
        """End this process with exit code 1 and a message that names ``ranks``, and those of them that have not
        started, if the block takes longer than the deadline: a blocked collective cannot be interrupted."""
        key = f"{name}/{ranks[0]}-{ranks[-1]}"
        self.num_started[key] += 1
        step = f"{key}/{self.num_started[key]}"  # equal on all of ``ranks``, which start the same blocks in one order
        self.store.set(f"{step}/{self.rank}", "")

        def expire() -> None:
            absent = [rank for rank in ranks if not self.store.check([f"{step}/{rank}"])]
            cause = f"ranks without a start: {ranks_text(absent)}" if absent else "all of them started it"
            sys.stderr.write(
                f"error: {name} of ranks {ranks_text(ranks)}: rank {self.rank} ({socket.gethostname()}) did not finish"
                f" within {self.deadline:g} s; {cause}\n"
            )
            sys.stderr.flush()
            os._exit(1)

        timer = threading.Timer(self.deadline, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def seconds(self, work: Callable[[], object]) -> float:
        """Median of single calls after one to warm up."""
        times = []
        for _ in range(REPEATS + 1):
            self._synchronize()
            start = time.perf_counter()
            work()
            self._synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks."""
        values = [value] * self.world_size
        with self.limit("gathering results", range(self.world_size)):
            dist.all_gather_object(values, value)
        return values

    def gemm(self) -> list[Result]:
        """TFLOP/s of each rank: bf16 8,192 x 8,192 on GPUs, fp32 256 x 256 on CPUs."""
        n, dtype = (8192, torch.bfloat16) if self.device.type == "cuda" else (256, torch.float32)
        x = torch.randn(n, n, device=self.device, dtype=dtype)
        with self.limit("GEMM", [self.rank]):
            local = self.seconds(lambda: x @ x)
        return [Result("GEMM", (rank,), 2 * n**3 / time / 1e12) for rank, time in enumerate(self.gather(local))]

    def collectives(self, axis: str, rank_lists: list[list[int]]) -> list[Result]:
        """All collectives of the groups ``rank_lists``, which partition the world and have equal sizes."""
        ranks = next(ranks for ranks in rank_lists if self.rank in ranks)
        with self.limit(f"creating {axis} groups", ranks):
            group, _ = dist.new_subgroups_by_enumeration(rank_lists)
        size = len(ranks)
        results = []
        for operation in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
            times = []
            for numel in (max(self.num_bytes // 4 // size, 1), 1):
                part = torch.ones(numel, device=self.device)
                full = torch.ones(numel * size, device=self.device)
                with self.limit(f"{axis} {operation}", ranks):
                    dist.barrier(group)
                    times.append(self.seconds(lambda: _collective(operation, full, part, group)))  # noqa: B023
            num_bytes = 4 * size * max(self.num_bytes // 4 // size, 1)
            everyone = self.gather(times)
            for members in rank_lists:
                slowest, latency = (max(everyone[rank][i] for rank in members) for i in range(2))
                rate = num_bytes / slowest * bus_factor(operation, size) / 1e9
                results.append(Result(f"{axis} {operation}", tuple(members), rate, latency * 1e6))
        return results

    def links(self, kind: str, rank_lists: list[list[int]]) -> list[Result]:
        """Measure pairs of ``rank_lists`` (a partition of the world), half the time there and back."""
        local: list[tuple[tuple[int, int], float, float]] = []
        rounds = [list(pairings(ranks)) for ranks in rank_lists]
        for i in range(max(map(len, rounds))):
            for pair in (pair for pairs in rounds if i < len(pairs) for pair in pairs[i]):
                if self.rank in pair:
                    with self.limit(f"{kind} p2p", pair):
                        large, small = (self._exchange(pair, size) for size in (self.num_bytes, 4))
                    local.append((pair, large, small))
            self.gather(None)  # pairs of the next round start together
        links = {pair: (large, small) for times in self.gather(local) for pair, large, small in times}
        return [
            Result(f"{kind} p2p", pair, self.num_bytes / large / 1e9, small * 1e6)
            for pair, (large, small) in sorted(links.items())
        ]

    def _exchange(self, pair: tuple[int, int], num_bytes: int) -> float:
        """Seconds of one direction between this rank and the other rank of ``pair``."""
        other = pair[0] if self.rank == pair[1] else pair[1]
        message = torch.ones(max(num_bytes // 4, 1), device=self.device)

        def there_and_back() -> None:
            for sends in (self.rank < other, self.rank > other):
                if sends:
                    dist.send(message, other)
                else:
                    dist.recv(message, other)

        return self.seconds(there_and_back) / 2

    def clock_skews(self) -> list[float]:
        """Seconds that each rank's clock is ahead of rank 0's, from the fastest of several messages there and back;
        the error is at most half that time. The values are on rank 0 only; zeros elsewhere."""
        skews = [0.0] * self.world_size
        for rank in range(1, self.world_size):
            if self.rank not in (0, rank):
                continue
            answers = []
            with self.limit("clock", (0, rank)):
                for _ in range(REPEATS):
                    clock = torch.zeros(1, dtype=torch.float64, device=self.device)
                    if self.rank == 0:
                        start = time.time()
                        dist.send(clock, rank)
                        dist.recv(clock, rank)
                        remote, end = clock.item(), time.time()
                        answers.append((end - start, remote - (start + end) / 2))
                    else:
                        dist.recv(clock, 0)
                        clock.fill_(time.time())
                        dist.send(clock, 0)
            if answers:
                skews[rank] = min(answers)[1]
        return skews


def _collective(operation: str, full: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    if operation == "all-reduce":
        dist.all_reduce(full, group=group)
    elif operation == "all-gather":
        all_gather(full, part, group=group)
    elif operation == "reduce-scatter":
        reduce_scatter(part, full, group=group)
    else:
        dist.all_to_all_single(torch.empty_like(full), full, group=group)


def layout_groups(grid: RankGrid) -> dict[str, list[list[int]]]:
    """Return axis -> rank lists of its groups of more than one rank, with ``world``, each once."""
    lists, groups = grid.all_rank_lists(), dict[str, list[list[int]]]()
    for axis in (*AXES, "world"):
        if len(lists[axis][0]) > 1 and lists[axis] not in groups.values():
            groups[axis] = lists[axis]
    return groups


def node_groups(hosts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of each host, and the ranks with the same place on different hosts; both partition the world."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    places = max(map(len, nodes.values()))
    return list(nodes.values()), [[ranks[i] for ranks in nodes.values() if i < len(ranks)] for i in range(places)]


def host_facts() -> dict[str, str]:
    """Return settings of this process's host."""
    return {
        "host": socket.gethostname(),
        "CPUs": f"{os.cpu_count()} {platform.machine()}",
        "/dev/shm": f"{shutil.disk_usage('/dev/shm').total / 2**30:.1f} GiB" if os.path.isdir("/dev/shm") else "none",
        "open files": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks."""
    gpus = torch.cuda.is_available()
    driver = "/proc/driver/nvidia/version"
    first = ""
    if os.path.exists(driver):
        with open(driver, encoding="utf-8") as file:
            first = file.readline().strip()
    return {
        "package": version_text(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "driver": first or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none",
        "GPU": torch.cuda.get_device_name() if gpus else "none",
    }


def differing_versions(versions_of_ranks: Sequence[dict[str, str]]) -> list[str]:
    """Return one sentence per version that is not equal on all ranks."""
    sentences = []
    for name in versions_of_ranks[0]:
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(versions_of_ranks):
            ranks.setdefault(values[name], []).append(rank)
        if len(ranks) > 1:
            sentences.append(f"{name} differs: " + ", ".join(f"{value} on ranks {on}" for value, on in ranks.items()))
    return sentences
