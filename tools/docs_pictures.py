"""Pictures of the documentation, drawn from the code: ``python tools/generate_docs.py`` writes them to docs/pictures.

Layouts come from :class:`RankGrid` and the stages of a model, schedules from the pipeline simulator, memory from the
estimate of the dry run, and the package diagram from the imports that the tests allow. SVG is written here, because
its text must be the same on every machine: the tests compare it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from xml.sax.saxutils import escape

from megatron.core.groups.process_groups import RankGrid
from megatron.core.pipeline_parallel.choose import choose_schedule
from megatron.core.pipeline_parallel.simulate import Timeline, simulate, unit_costs
from megatron.training.arguments import parse_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import resolve
from megatron.training.report.memory import estimate_memory, stage_activations
from megatron.training.report.pipeline import run_schedule, run_stages, simulated_timeline

ROOT = Path(__file__).resolve().parents[1]
BLUE, GREEN, YELLOW, RED, GRAY, VIOLET = "#4c78a8", "#54a24b", "#e8b23a", "#d6604d", "#9d9da1", "#8868a8"
ACTIONS = {"F": BLUE, "B": GREEN, "W": YELLOW}
PARTS = {"weights": BLUE, "gradients": GREEN, "optimizer": YELLOW, "activations": RED, "working": GRAY}
LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu --normalization RMSNorm"
    " --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --bf16"
    " --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 64 --train-iters 1 --lr 1e-4"
    " --vocab-size 128256 --tokenizer-type NullTokenizer --mock-data --dry-run"
)
VOCABULARY = 128256


class Svg:
    """Shapes of a picture; positions in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        font = 'font-family="Helvetica, Arial, sans-serif"'
        self.lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">']
        self.lines += [f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" fill="white"/>']

    def box(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        """Add a filled rectangle with a white edge."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        look = f'fill="{fill}" fill-opacity="{opacity:.2f}" stroke="white" stroke-width="0.6"'
        self.lines.append(f"<rect {place} {look}/>")

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "start", fill: str = "#222") -> None:
        """Add a line of text whose baseline is at ``y``."""
        look = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>')

    def path(self, points: Sequence[tuple[float, float]], color: str, width: float = 1.5) -> None:
        """Add a line through ``points``."""
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.lines.append(f'<polyline points="{steps}" fill="none" stroke="{color}" stroke-width="{width}"/>')

    def legend(self, x: float, y: float, colors: Mapping[str, str], step: float = 110) -> None:
        """Add a row of colored squares with their names."""
        for index, (name, color) in enumerate(colors.items()):
            self.box(x + step * index, y - 10, 12, 12, color)
            self.text(x + step * index + 17, y, name, 11)

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>"]) + "\n"


def resolved(flags: str, world_size: int) -> PretrainConfig:
    """Return the settings of ``flags`` on ``world_size`` GPUs."""
    return resolve(parse_args(f"{LLAMA_8B} {flags}".split(), needs_data=False), world_size, gpus=True)


# ---- layouts


def layout_picture() -> str:
    """Sixteen ranks with tensor, context, data and pipeline parallelism of 2, and what each holds."""
    grid = RankGrid.from_world(16, tp=2, cp=2, pp=2)
    where = {
        axis: {rank: ranks.index(rank) for ranks in grid.rank_lists(axis) for rank in ranks}
        for axis in ("tp", "cp", "dp", "pp")
    }
    stages = run_stages(resolved("--pipeline-model-parallel-size 2", 2), VOCABULARY)
    svg = Svg(980, 420, "What each of 16 ranks holds")
    svg.text(20, 26, "LLaMA-3-8B on 16 ranks: tensor 2 x context 2 x data 2 x pipeline 2", 15)
    for rank in range(grid.world_size):
        tp, cp, dp, pp = (where[axis][rank] for axis in ("tp", "cp", "dp", "pp"))
        x, y = 20 + 236 * (2 * dp + cp) + 4 * dp, 66 + 174 * pp + 80 * tp
        svg.box(x, y, 228, 74, BLUE if pp == 0 else GREEN, 0.28 if tp == 0 else 0.5)
        svg.text(x + 8, y + 17, f"rank {rank}", 13)
        svg.text(x + 220, y + 17, f"samples: half {dp + 1}", 11, "end")
        svg.text(x + 8, y + 34, f"stage {pp}: {stages[pp]}", 10)
        svg.text(x + 8, y + 50, f"half {tp + 1} of every matrix and of the heads", 11)
        svg.text(x + 8, y + 66, f"quarters {cp + 1} and {4 - cp} of every sequence", 11)
    for dp in range(2):
        svg.text(20 + 476 * dp, 54, f"model replica {dp + 1}", 12)
    svg.text(20, 412, "Consecutive ranks are a tensor-parallel group, so that its messages stay inside a host.", 12)
    return str(svg)


# ---- schedules

SCHEDULES = {
    "1f1b (default)": (None, 1, 8),
    "interleaved, 2 chunks per rank": ("interleaved", 2, 8),
    "zero-bubble": ("zero-bubble", 1, 8),
    "zero-bubble-h2": ("zero-bubble-h2", 1, 8),
}
"""Title -> (name, chunks, micro-batches) on four ranks."""
BACKWARD, WEIGHT = 2.07, 0.87
"""Costs of a backward pass and of its weight gradients, in forward passes: a layer of LLaMA-3-8B with 8,192 tokens has
436 MFLOP of GEMMs per token in each of F, B and W, and 67 (F) and 168 (B) MFLOP of causal attention, which has no W."""


def schedule_picture() -> str:
    """Return the timeline of each schedule, with the costs of stages of one layer of LLaMA-3-8B."""
    timelines = {}
    for title, (name, chunks, microbatches) in SCHEDULES.items():
        schedule, unit = choose_schedule(name, 4, chunks, microbatches), 1 / chunks
        weight = WEIGHT * unit if schedule.splits_backward else None
        timelines[title] = simulate(schedule, unit_costs(unit, BACKWARD * unit, weight))
    longest = max(each.duration for each in timelines.values())
    svg = Svg(980, 20 + 128 * len(timelines), "Pipeline schedules of four ranks and eight micro-batches")
    for index, (title, timeline) in enumerate(timelines.items()):
        _draw_timeline(svg, timeline, title, 128 * index + 18, 860 / longest)
    colors = {"F forward": BLUE, "B backward": GREEN, "W weight gradients": YELLOW}
    svg.legend(560, 16, colors, 120)
    return str(svg)


def _draw_timeline(svg: Svg, timeline: Timeline, title: str, top: float, scale: float) -> None:
    svg.text(20, top, f"{title}: {timeline.duration:g} units of time, {timeline.bubble:.0%} waiting", 13)
    for rank, events in enumerate(timeline.events):
        y = top + 8 + 24 * rank
        svg.text(20, y + 16, f"rank {rank}", 11)
        for event in events:
            x, width = 70 + event.start * scale, (event.end - event.start) * scale
            svg.box(x, y, width, 22, ACTIONS[event.action.kind], 1.0 - 0.45 * event.action.chunk)
            if width > 12:
                svg.text(x + width / 2, y + 15, str(event.action.microbatch + 1), 10, "middle", "white")


# ---- memory

SETTINGS = {
    "data parallel": "",
    "+ --use-distributed-optimizer": "--use-distributed-optimizer",
    "+ selective recomputation": "--use-distributed-optimizer --recompute-granularity selective"
    " --recompute-modules layernorm mlp_act",
    "tensor 2, sequence parallel": "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline 4": "--use-distributed-optimizer --pipeline-model-parallel-size 4",
    "context 2": "--use-distributed-optimizer --context-parallel-size 2",
    "FSDP2": "--use-torch-fsdp2",
    "FSDP2, full recomputation": "--use-torch-fsdp2 --recompute-granularity full --recompute-method uniform"
    " --recompute-num-layers 1",
}
"""Title -> flags on eight GPUs."""


def memory_picture() -> str:
    """GiB on the fullest rank by part, for several layouts of one model on eight GPUs."""
    rows = {
        name: max(estimate_memory(resolved(flags, 8), VOCABULARY), key=lambda each: each.total)
        for name, flags in SETTINGS.items()
    }
    scale = 640 / (max(each.total for each in rows.values()) / 2**30)
    svg = Svg(980, 70 + 36 * len(rows), "Memory by part")
    svg.text(
        20, 24, "LLaMA-3-8B in bf16, one sequence of 8,192 tokens per micro-batch, eight GPUs: GiB on the fullest", 14
    )
    svg.legend(220, 48, PARTS)
    for index, (name, memory) in enumerate(rows.items()):
        x, y = 220.0, 60 + 36 * index
        svg.text(210, y + 19, name, 12, "end")
        for part, color in PARTS.items():
            gib = getattr(memory, part) / 2**30
            svg.box(x, y, gib * scale, 28, color)
            if gib * scale > 24:
                svg.text(x + gib * scale / 2, y + 19, f"{gib:.0f}", 11, "middle", "white")
            x += gib * scale
        svg.text(x + 6, y + 19, f"{memory.total / 2**30:.1f}", 12)
    return str(svg)


def memory_over_time_picture() -> str:
    """GiB on the first and the last of four pipeline ranks during a step: state plus activations that wait for their
    backward pass."""
    svg = Svg(980, 380, "Memory over time")
    svg.text(20, 24, "LLaMA-3-8B on four pipeline ranks, 16 micro-batches: GiB during a step", 14)
    runs = {"1f1b": "1f1b", "zero-bubble-h2": "zero-bubble-h2"}
    curves = {
        (name, rank): curve
        for name, flag in runs.items()
        for rank, curve in enumerate(_memory_curves(f"--pipeline-model-parallel-size 4 --pipeline-schedule {flag}"))
    }
    end = max(curve[-1][0] for curve in curves.values())
    top = max(value for curve in curves.values() for _, value in curve)
    for gib in range(0, int(top) + 1, 20):
        y = 340 - 270 * gib / top
        svg.path([(60, y), (960, y)], "#ddd", 0.8)
        svg.text(52, y + 4, str(gib), 11, "end")
    shown = {("1f1b", 0): BLUE, ("1f1b", 3): GREEN, ("zero-bubble-h2", 0): RED, ("zero-bubble-h2", 3): VIOLET}
    for key, color in shown.items():
        svg.path([(60 + 900 * time / end, 340 - 270 * gib / top) for time, gib in curves[key]], color)
    svg.text(510, 360, "time of one step", 11, "middle")
    svg.legend(120, 48, {f"{name}, rank {rank}": color for (name, rank), color in shown.items()}, 200)
    return str(svg)


def _memory_curves(flags: str) -> Iterator[list[tuple[float, float]]]:
    """Yield, per pipeline rank, (time, GiB) at every change."""
    cfg = resolved(f"--use-distributed-optimizer --global-batch-size 16 {flags}", 4)
    model, stages = cfg.describe(VOCABULARY), run_stages(cfg, VOCABULARY)
    last = "W" if run_schedule(cfg, 16).splits_backward else "B"
    timeline = simulated_timeline(cfg, 16, VOCABULARY)
    for rank, memory in enumerate(estimate_memory(cfg, VOCABULARY)):
        size = stage_activations(cfg, model, stages[rank]) / 2**30
        now = (memory.weights + memory.gradients + memory.optimizer) / 2**30
        curve = [(0.0, now)]
        for event in timeline.events[rank]:
            change = {"F": (event.start, size), last: (event.end, -size)}.get(event.action.kind)
            if change:
                curve += [(change[0], now), (change[0], now + change[1])]
                now += change[1]
        yield [*curve, (timeline.duration, now)]


# ---- packages


def architecture_picture() -> str:
    """The packages of the library in layers: each imports only packages of lower layers."""
    packages = importlib.import_module("tests.unit_tests.test_architecture").PACKAGES

    graph = {name: sorted(each for each in needs if each != "*") for name, needs in packages.items()}
    depth: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        depth[name] = 1 + max((depth[each] for each in graph.get(name, ())), default=-1)
    layers: dict[int, list[str]] = {}
    for name in sorted(depth):
        if packages.get(name) != {"*"} and name != "megatron.version":
            layers.setdefault(depth[name], []).append(name.removeprefix("megatron."))
    colors = {"core": BLUE, "training": GREEN}
    svg = Svg(980, 92 + 30 * len(layers), "Packages in layers")
    svg.text(20, 24, "A package imports only packages in rows below it", 14)
    svg.legend(420, 24, {"megatron/core": BLUE, "megatron/training": GREEN, "other": GRAY}, 150)
    svg.box(20, 40, 940, 26, GRAY, 0.25)
    svg.text(490, 58, "tools (programs) and compat (Megatron-LM's names) import any package", 12, "middle")
    for row, level in enumerate(sorted(layers, reverse=True)):
        names, y = layers[level], 72 + 30 * row
        widths = [14 + 6.4 * len(name.partition(".")[2] or name) for name in names]
        x = 490 - (sum(widths) + 8 * (len(names) - 1)) / 2
        for name, width in zip(names, widths):
            first, _, rest = name.partition(".")
            svg.box(x, y, width, 24, colors.get(first, GRAY), 0.35)
            svg.text(x + width / 2, y + 16, rest or first, 11, "middle")
            x += width + 8
    return str(svg)


PICTURES: dict[str, Callable[[], str]] = {
    "layout.svg": layout_picture,
    "schedules.svg": schedule_picture,
    "memory.svg": memory_picture,
    "memory_over_time.svg": memory_over_time_picture,
    "packages.svg": architecture_picture,
}
