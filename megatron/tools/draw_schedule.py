"""Draw the pipeline schedule of one iteration for the flags of a training run, and print its bubble fraction.

    python tools/draw_schedule.py --pipeline-model-parallel-size 4 --num-layers 32 ... --output schedule.svg

Accepts all flags of pretrain_gpt.py; flags that only training needs are optional. ``--output`` writes a picture (.png,
.svg, .pdf; needs matplotlib); without it a text table is printed. Needs no GPU and no torch."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.pipeline_parallel.simulate import Timeline
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.report.dry_run import known_vocab_size
from megatron.training.report.pipeline import count_microbatches, peak_layers, pipeline_rows, simulated_timeline

COLORS = {"F": "#4c78a8", "B": "#54a24b", "W": "#e8b23a"}
DEFAULTS = {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-4}

PICTURES = (".png", ".svg", ".pdf")
"""Endings of --output."""


def text_table(timeline: Timeline, width: int) -> str:
    """One line per rank: a column shows the action (F, B, W; lower case: odd chunks) at its midpoint, or a dot."""
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
    """Draw one bar per action and write the figure to ``path``: colored by F/B/W, paler for later chunks. Bars that are
    wide enough show the micro-batch index. Creates the folder of ``path``. Raises UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(f"drawing needs matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    ranks = timeline.schedule.num_ranks
    figure, axes = plt.subplots(figsize=(16, 0.6 * ranks + 1.4))
    for rank, events in enumerate(timeline.events):
        for event in events:
            length, chunk = event.end - event.start, event.action.chunk
            shade = 1.0 - 0.6 * chunk / timeline.schedule.num_chunks
            axes.barh(
                rank,
                length,
                left=event.start,
                height=0.9,
                color=COLORS[event.action.kind],
                alpha=shade,
                edgecolor="white",
                linewidth=0.4,
            )
            if length > timeline.duration / 160:
                middle = event.start + length / 2
                axes.text(middle, rank, str(event.action.microbatch), ha="center", va="center", fontsize=6)
    axes.set(yticks=range(ranks), yticklabels=[f"rank {rank}" for rank in range(ranks)], title=title)
    axes.set_xlabel("time, in forward passes of one layer")
    axes.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    axes.legend(
        handles,
        ["F forward", "B backward", "W weight gradients"],
        loc="lower right",
        ncols=3,
        fontsize=7,
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def tool_flags(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group("Drawing")
    group.add_argument("--output", type=Path, default=None, help="picture to write; without it, text is printed")
    group.add_argument("--width", type=int, default=120, help="columns of the text")
    return parser


def configuration(argv: Sequence[str]) -> PretrainConfig:
    """Parse and validate ``argv`` for a world size of TP x PP x CP, or WORLD_SIZE if it is set."""
    cfg = parse_args(argv, extra_args_provider=tool_flags, args_defaults=DEFAULTS, needs_data=False)
    model = cfg.model
    ranks = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    return validate_args(cfg, max(ranks, 1))


def main(argv: Sequence[str]) -> int:
    """Print the pipeline rows (stages, bubble) of the flags ``argv``, then the schedule, simulated by the FLOPs of each
    stage's layers without communication. Raises UserError for a pipeline of one rank, and for wrong flags."""
    cfg = configuration(argv)
    if cfg.model.pipeline_model_parallel_size == 1:
        raise UserError("--pipeline-model-parallel-size 1: there is no pipeline to draw; give more than one")
    vocab_size, output = known_vocab_size(cfg.tokenizer)[0], cfg.extra["output"]
    timeline = simulated_timeline(cfg, count_microbatches(cfg), vocab_size)
    for name, value in pipeline_rows(cfg, vocab_size):
        print(f"{name:<30} {value}")
    if output is not None and output.suffix not in PICTURES:
        raise UserError(f"--output {output}: must end with {', '.join(PICTURES)}")
    if output is None:
        print(text_table(timeline, max(cfg.extra["width"], 1)))
        return 0
    peak = max(peak_layers(cfg, timeline.schedule, vocab_size))
    draw(timeline, f"{timeline.schedule.name}: bubble {timeline.bubble:.1%}, {peak:g} layers alive at most", output)
    print(f"wrote {output}")
    return 0
