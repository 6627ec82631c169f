"""Draws one iteration of a pipeline, for the flags of a training run, and says how much of it is spent waiting.

    python tools/draw_schedule.py --pipeline-model-parallel-size 4 --num-layers 32 ... --output schedule.svg

All flags are those of pretrain_gpt.py; what only training needs may be left out. ``--output`` names a picture (.png,
.svg, .pdf; needs matplotlib); without it a table of text is printed. No GPU and no torch are needed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config.cli import ConfigError
from megatron.core.pipeline_parallel.simulate import Timeline
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.dry_run import vocab_size_of
from megatron.training.report.pipeline import microbatches_of, peak_layers, pipeline_rows, timeline_of

COLORS = {"F": "#4c78a8", "B": "#54a24b", "W": "#e8b23a"}
DEFAULTS = {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-4}


def text_table(timeline: Timeline, width: int) -> str:
    """One line per rank; every column is the same stretch of time: F, B or W of what runs in its middle, else a dot."""
    column = timeline.duration / width
    lines = []
    for rank, events in enumerate(timeline.events):
        row = ["."] * width
        for event in events:
            for at in range(int(event.start / column + 0.5), min(int(event.end / column + 0.5), width)):
                letter = event.action.kind
                row[at] = letter.lower() if event.action.chunk % 2 else letter
        lines.append(f"rank {rank:<3} {''.join(row)}")
    return "\n".join([*lines, "F forward, B backward, W weight gradients, . waiting; small letters: odd chunks"])


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """A bar per action: color by kind, paler for later chunks, the micro-batch's number inside."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks = timeline.schedule.num_ranks
    figure, axes = plt.subplots(figsize=(16, 0.6 * ranks + 1.4))
    for rank, events in enumerate(timeline.events):
        for event in events:
            length, chunk = event.end - event.start, event.action.chunk
            shade = 1.0 - 0.6 * chunk / timeline.schedule.num_chunks
            axes.barh(
                rank, length, left=event.start, height=0.9, color=COLORS[event.action.kind], alpha=shade,
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            if length > timeline.duration / 160:
                middle = event.start + length / 2
                axes.text(middle, rank, str(event.action.microbatch), ha="center", va="center", fontsize=6)
    axes.set(yticks=range(ranks), yticklabels=[f"rank {rank}" for rank in range(ranks)], title=title)
    axes.set_xlabel("time, in forward passes of one layer")
    axes.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    axes.legend(
        handles, ["F forward", "B backward", "W weight gradients"], loc="lower right", ncols=3, fontsize=7,
        bbox_to_anchor=(1.0, 1.0), frameon=False,
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def own_flags(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group("Drawing")
    group.add_argument("--output", type=Path, default=None, help="picture to write; without it, text is printed")
    group.add_argument("--width", type=int, default=120, help="columns of the text")
    return parser


def configuration(argv: list[str]) -> PretrainConfig:
    """Flags as of a run on as many ranks as one model needs (or WORLD_SIZE)."""
    cfg = parse_args(argv, extra_args_provider=own_flags, args_defaults=DEFAULTS, needs_data=False)
    sizes = (cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size, cfg.context_parallel_size)
    return validate_args(cfg, max(sizes[0] * sizes[1] * sizes[2], 1))


def main(argv: list[str]) -> int:
    try:
        cfg = configuration(argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if cfg.pipeline_model_parallel_size == 1:
        sys.stderr.write("--pipeline-model-parallel-size 1: there is no pipeline to draw; give more than one\n")
        return 2
    vocab_size, output = vocab_size_of(cfg)[0], cfg.extra["output"]
    timeline = timeline_of(cfg, microbatches_of(cfg), vocab_size)
    for name, value in pipeline_rows(cfg, vocab_size):
        print(f"{name:<30} {value}")
    if output is None:
        print(text_table(timeline, max(cfg.extra["width"], 1)))
        return 0
    peak = max(peak_layers(cfg, timeline.schedule, vocab_size))
    draw(timeline, f"{timeline.schedule.name}: bubble {timeline.bubble:.1%}, {peak:g} layers alive at most", output)
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
