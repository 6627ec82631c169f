"""One steady training step from a trace of torch's profiler: its time by class, and the host's operators.

The profiler hook marks iterations as ranges called ``iteration N``. A device span belongs to the iteration in which the
host launched it; the step lasts from its first span to the first span of the next iteration, so that waiting between
steps counts. Every instant of that is attributed once: to the computing kernel that started first, else to a copy,
else to communication (then exposed), else to idleness; the attributed times add up to the step.

Without a GPU the host's operators, without nested ones, take the place of kernels, so that CPU traces work too.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.kernel_classes import CLASSES, COMMUNICATION, COPIES, IDLE, classify

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHERS = ("cuda_runtime", "cuda_driver")
HOST = ("cpu_op", "user_annotation")
ITERATION = re.compile(r"^iteration (\d+)$")
TRANSFER = re.compile(r"^(gloo|nccl):")
"""Ranges from the start to the end of a collective; they nest with nothing."""
LAUNCH = re.compile(r"Launch|cudaMemcpy.*Async|cudaMemset.*Async", re.IGNORECASE)
SYNCHRONIZES = re.compile(r"(Stream|Device|Event|Ctx)Synchronize|^cudaMemcpy(2D)?$|^cuMemcpy(?!.*Async)", re.IGNORECASE)
GEMMS = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::_scaled_mm": 0}
"""Operators of a GEMM -> which input is the left factor."""

Event = dict[str, Any]


class Span(NamedTuple):
    """One piece of work of the device; times in microseconds."""

    start: float
    end: float
    name: str
    scope: str
    kind: str
    """Its class."""
    launched: float
    """When the host launched it."""
    thread: Any


@dataclass
class Profile:
    """Milliseconds of one step."""

    step_ms: float
    ms: dict[str, float]
    """Class -> time attributed to it, ``idle`` included; adds up to ``step_ms``."""
    busy_ms: dict[str, float]
    """Class -> sum of its spans' lengths, also where they overlap others."""
    launches: int
    """Kernels, copies and fills of the device."""
    host_calls: dict[str, int]
    """Launching calls of the host, by name."""
    synchronizations: list[dict[str, Any]]
    """Calls in which the host waited: name, scope, count, ms."""
    device_to_host_copies: int
    gaps: list[dict[str, Any]]
    """The longest times of idleness, and what the host did in the middle of each."""
    slowest: list[dict[str, Any]] = field(default_factory=list)
    """Kernels by name with the largest sums: class, calls, ms."""
    iteration: int | None = None

    @property
    def exposed_communication_ms(self) -> float:
        return self.ms.get(COMMUNICATION, 0.0)

    @property
    def idle_ms(self) -> float:
        return self.ms.get(IDLE, 0.0)

    @property
    def num_synchronizations(self) -> int:
        return sum(each["count"] for each in self.synchronizations)

    def as_dict(self) -> dict[str, Any]:
        rounded = {name: round(value, 3) for name, value in self.ms.items() if value}
        return {
            "iteration": self.iteration, "step_ms": round(self.step_ms, 3), "ms": rounded,
            "busy_ms": {name: round(value, 3) for name, value in self.busy_ms.items() if value},
            "exposed_communication_ms": round(self.exposed_communication_ms, 3), "idle_ms": round(self.idle_ms, 3),
            "launches": self.launches, "host_calls": self.host_calls, "synchronizations": self.synchronizations,
            "device_to_host_copies": self.device_to_host_copies, "gaps": self.gaps, "slowest": self.slowest,
        }  # fmt: skip


def read_events(path: Path) -> list[Event]:
    """The complete events of a trace file, gzipped or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


# ---- what the host was doing


class Scopes:
    """The operators and ranges open on each thread at any time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.by_thread: dict[Any, list[Event]] = {}
        for event in events:
            if event.get("cat") in HOST and not ITERATION.match(event["name"]) and not TRANSFER.match(event["name"]):
                self.by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
        for own in self.by_thread.values():
            own.sort(key=lambda event: (event["ts"], -event["dur"]))
        self.by_number = {
            event["args"]["External id"]: event
            for own in self.by_thread.values() for event in own if "External id" in event.get("args", {})
        }  # fmt: skip

    def place(self, work: Event, launch: Event | None) -> tuple[Any, float]:
        """(thread, time) at which the host launched ``work``: where the call was, else the operator it belongs to."""
        operator = self.by_number.get(work.get("args", {}).get("External id"))
        for event in (launch, operator):
            if event and (event["pid"], event["tid"]) in self.by_thread:
                return (event["pid"], event["tid"]), event["ts"]
        return None, 0.0

    def stacks(self, queries: Sequence[tuple[Any, float]]) -> list[list[Event]]:
        """For each (thread, time): the open events, outermost first."""
        found: list[list[Event]] = [[] for _ in queries]
        by_thread: dict[Any, list[int]] = {}
        for index, (thread, _) in enumerate(queries):
            by_thread.setdefault(thread, []).append(index)
        for thread, indices in by_thread.items():
            own, at, stack = self.by_thread.get(thread, []), 0, []
            for index in sorted(indices, key=lambda each: queries[each][1]):
                time = queries[index][1]
                while at < len(own) and own[at]["ts"] <= time:
                    stack = [event for event in stack if event["ts"] + event["dur"] > own[at]["ts"]]
                    stack.append(own[at])
                    at += 1
                stack = [event for event in stack if event["ts"] + event["dur"] >= time]
                found[index] = list(stack)
        return found

    def segments(self) -> Iterator[tuple[Event, list[Event], float, float]]:
        """The times in which an operator, and nothing inside of it, ran, with those around it: the work, on a CPU."""
        for own in self.by_thread.values():
            stack: list[Event] = []
            now = -math.inf
            for until, opened in [*((event["ts"], event) for event in own), (math.inf, None)]:
                while stack and (end := stack[-1]["ts"] + stack[-1]["dur"]) <= until:
                    if end > now:
                        yield stack[-1], stack[:-1], now, end
                    now = max(now, end)
                    stack.pop()
                if stack and until > now:
                    yield stack[-1], stack[:-1], now, until
                if opened is not None:
                    stack.append(opened)
                    now = until


def path_of(stack: Sequence[Event]) -> str:
    return "/".join(event["name"] for event in stack)


def gemm_shape(stack: Sequence[Event]) -> tuple[int, int, int] | None:
    """(m, k, n) of the GEMM that the innermost such operator of ``stack`` computes."""
    for event in reversed(stack):
        first = GEMMS.get(event["name"])
        sizes = event.get("args", {}).get("Input Dims", [])
        if first is not None and len(sizes) > first + 1 and len(sizes[first]) == len(sizes[first + 1]) == 2:
            (m, k), (_, n) = sizes[first], sizes[first + 1]
            return m, k, n
    return None


# ---- what the device was doing


def device_spans(events: Sequence[Event], scopes: Scopes, weights: Collection[tuple[int, int]]) -> list[Span]:
    """Every piece of work, by start."""
    work = [event for event in events if event.get("cat") in DEVICE]
    if not work:
        spans = []
        for event, stack, start, end in scopes.segments():
            if event["cat"] == "cpu_op":
                whole = [*stack, event]
                kind = classify(event["name"], path_of(whole), gemm_shape(whole), weights)
                spans.append(Span(start, end, event["name"], path_of(stack), kind, start, (event["pid"], event["tid"])))
        for event in events:
            if event["name"].startswith("gloo:"):
                start, thread = event["ts"], (event["pid"], event["tid"])
                spans.append(Span(start, start + event["dur"], event["name"], "", COMMUNICATION, start, thread))
        return sorted(spans)
    launchers = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCHERS and "correlation" in event.get("args", {})
    }
    launches = [launchers.get(event.get("args", {}).get("correlation")) for event in work]
    unknown = -math.inf if launchers else 0.0  # launched before the trace began: work of an earlier iteration
    queries = [scopes.place(event, launch) for event, launch in zip(work, launches)]
    spans = []
    for event, launch, (thread, _), stack in zip(work, launches, queries, scopes.stacks(queries)):
        scope = path_of(stack)
        kind = classify(event["name"], scope, gemm_shape(stack), weights)
        launched = launch["ts"] if launch else unknown
        spans.append(Span(event["ts"], event["ts"] + event["dur"], event["name"], scope, kind, launched, thread))
    return sorted(spans, key=lambda span: (span.start, span.end))


def step_of(events: Sequence[Event], spans: Sequence[Span]) -> tuple[int | None, list[Span], float, float]:
    """Return (iteration, its spans, start, end) of the last iteration that another one follows, or the full trace."""
    marks = sorted(
        (event["ts"], int(match[1])) for event in events
        if event.get("cat") == "user_annotation" and (match := ITERATION.match(event["name"]))
    )  # fmt: skip
    if not marks:
        return None, list(spans), spans[0].start, max(span.end for span in spans)
    times = [time for time, _ in marks]
    by_mark: dict[int, list[Span]] = {}
    for span in spans:
        index = sum(time <= span.launched for time in times) - 1
        if index >= 0:
            by_mark.setdefault(index, []).append(span)
    complete = [index for index in by_mark if index + 1 in by_mark]
    chosen = max(complete or by_mark)
    own = by_mark[chosen]
    start = min(span.start for span in own)
    following = by_mark.get(chosen + 1)
    end = min(span.start for span in following) if following else max(span.end for span in own)
    return marks[chosen][1], own, start, max(end, start)


def priority(kind: str) -> int:
    """Return the priority of a class: concurrent time is attributed to the smallest value."""
    return {COMMUNICATION: 2, COPIES: 1}.get(kind, 0)


class Attribution(NamedTuple):
    """Microseconds by class, and the intervals with no work."""

    time: Counter[str]
    idle: list[tuple[float, float]]


def attribute(spans: Sequence[Span], start: float, end: float) -> Attribution:
    """Gives every instant between ``start`` and ``end`` to one class or to idleness."""
    edges = sorted(
        [(span.start, 1, index) for index, span in enumerate(spans)]
        + [(span.end, 0, index) for index, span in enumerate(spans)]
    )
    time: Counter[str] = Counter()
    idle: list[tuple[float, float]] = []
    active: dict[int, tuple[int, float]] = {}
    now = start
    for edge, opens, index in [*edges, (end, 0, -1)]:
        until = min(max(edge, start), end)
        if until > now:
            if active:
                owner = min(active, key=active.__getitem__)
                time[spans[owner].kind] += until - now
            else:
                time[IDLE] += until - now
                idle.append((now, until))
            now = until
        if opens:
            active[index] = (priority(spans[index].kind), spans[index].start)
        else:
            active.pop(index, None)
    return Attribution(time, idle)


# ---- the report


def profile(events: Sequence[Event], weights: Collection[tuple[int, int]] = (), num_gaps: int = 5) -> Profile | None:
    """The steady step of a trace; None where there is nothing in it. ``weights``: their (output, input) sizes here."""
    scopes = Scopes(events)
    spans = device_spans(events, scopes, weights)
    if not spans:
        return None
    iteration, own, start, end = step_of(events, spans)
    # work of other iterations that runs within this step's time still occupies the device
    around = [span for span in spans if span.start < end and span.end > start]
    found = attribute(around, start, end)
    busy: Counter[str] = Counter()
    by_name: dict[tuple[str, str], list[float]] = {}
    for span in own:
        busy[span.kind] += span.end - span.start
        by_name.setdefault((short_name(span.name), span.kind), []).append(span.end - span.start)
    host_start, host_end = host_window(events, iteration, start, end)
    calls = [
        event for event in events if event.get("cat") in LAUNCHERS and host_start <= event["ts"] < host_end
    ]  # fmt: skip
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:15]
    return Profile(
        step_ms=(end - start) / 1e3,
        ms={name: found.time[name] / 1e3 for name in (*CLASSES, IDLE)},
        busy_ms={name: busy[name] / 1e3 for name in CLASSES},
        launches=len(own),
        host_calls=dict(Counter(event["name"] for event in calls if LAUNCH.search(event["name"])).most_common()),
        synchronizations=synchronizations(calls, scopes),
        device_to_host_copies=sum("DtoH" in span.name for span in own),
        gaps=describe_gaps(found.idle, spans, events, scopes, num_gaps),
        slowest=[
            {"kernel": name, "class": kind, "calls": len(times), "ms": round(sum(times) / 1e3, 3)}
            for (name, kind), times in largest
        ],
        iteration=iteration,
    )


def host_window(events: Iterable[Event], iteration: int | None, start: float, end: float) -> tuple[float, float]:
    """When the host worked on the step; the device's times where iterations are not marked."""
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] == f"iteration {iteration}":
            return event["ts"], event["ts"] + event["dur"]
    return start, end


def short_name(kernel: str) -> str:
    """A kernel's name without what templates add."""
    name = re.sub(r"^void ", "", kernel)
    base, _, arguments = name.partition("<")
    base = base.split("(", 1)[0].rsplit("::", 1)[-1]
    functor = re.search(r"(\w+(?:Functor|_kernel_cuda|_kernel_impl|Ops))\b", arguments)
    return (f"{base}<{functor[1]}>" if functor else base)[:100]


def synchronizations(calls: Iterable[Event], scopes: Scopes) -> list[dict[str, Any]]:
    """Calls that wait for the device, by name and by the innermost operator they were made for."""
    waits = [event for event in calls if SYNCHRONIZES.search(event["name"])]
    stacks = scopes.stacks([((event["pid"], event["tid"]), event["ts"]) for event in waits])
    found: dict[tuple[str, str], list[float]] = {}
    for event, stack in zip(waits, stacks):
        found.setdefault((event["name"], path_of(stack[-3:])), []).append(event["dur"])
    return [
        {"name": name, "scope": scope, "count": len(times), "ms": round(sum(times) / 1e3, 3)}
        for (name, scope), times in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]


def describe_gaps(
    idle: Sequence[tuple[float, float]], spans: Sequence[Span], events: Sequence[Event], scopes: Scopes, count: int
) -> list[dict[str, Any]]:
    """The ``count`` longest gaps: between which kernels, what the launching thread did halfway, how long it waited."""
    described = []
    for start, end in sorted(idle, key=lambda gap: gap[0] - gap[1])[:count]:
        before = max((span for span in spans if span.end <= start), key=lambda span: span.end, default=None)
        after = min((span for span in spans if span.start >= end), key=lambda span: span.start, default=None)
        thread = after.thread if after else before.thread if before else None
        (stack,) = scopes.stacks([(thread, (start + end) / 2)])
        calls = [
            event for event in events
            if event.get("cat") in LAUNCHERS and event["ts"] < end and event["ts"] + event["dur"] > start
        ]  # fmt: skip
        waiting = sum(
            min(end, event["ts"] + event["dur"]) - max(start, event["ts"])
            for event in calls if SYNCHRONIZES.search(event["name"])
        )  # fmt: skip
        described.append({
            "ms": round((end - start) / 1e3, 3),
            "after": short_name(before.name) if before else None,
            "before": short_name(after.name) if after else None,
            "host": path_of(stack[-4:]) or "outside of any operator",
            "host_waited_ms": round(waiting / 1e3, 3),
        })  # fmt: skip
    return described


def text(found: Profile) -> str:
    """The table of one profile."""
    lines = [f"one step: {found.step_ms:.1f} ms" + (f" (iteration {found.iteration})" if found.iteration else "")]
    lines.append(f"{'class':<24}{'ms':>10}{'share':>8}{'busy ms':>10}")
    for name, value in sorted(found.ms.items(), key=lambda item: -item[1]):
        if value:
            busy = f"{found.busy_ms[name]:10.2f}" if name in found.busy_ms else ""
            lines.append(f"{name:<24}{value:10.2f}{value / found.step_ms:8.1%}{busy}")
    lines.append(
        f"launches {found.launches}; host waits {found.num_synchronizations} "
        f"({sum(each['ms'] for each in found.synchronizations):.1f} ms); "
        f"copies to the host {found.device_to_host_copies}"
    )
    for gap in found.gaps:
        lines.append(f"gap {gap['ms']:.2f} ms, {gap['after']} -> {gap['before']}; host: {gap['host']}")
    return "\n".join(lines)
