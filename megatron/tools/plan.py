"""Find the fastest layouts of a model on a cluster: memory, tokens per second, MFU, days, GPU-hours and cost.

    python tools/plan.py --gpu H100 --nodes 8 --tokens 1e12 --num-layers 32 ... --global-batch-size 512

Accepts all flags of pretrain_gpt.py (of another program with --program); sizes and options of the layout that are given
stay fixed. Layouts that contradict the rules or do not fit are left out. Times come from a model of kernels and links
(docs/guides/planning.md); layouts whose difference is below its error are called ties. Needs no GPU and no torch; with
``--try`` the best layouts are run on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from megatron.core.config.cli import ConfigError, Problem
from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.core.models.registry import find_program
from megatron.core.schedules.batch_size import samples_from_iters
from megatron.training.arguments import parse_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolve import resolve, smallest_world_size
from megatron.training.notices import unfused_attention
from megatron.training.report.dry_run import known_vocab_size
from megatron.training.report.plan.cluster import Cluster, build_cluster
from megatron.training.report.plan.search import Layout, Search, search
from megatron.training.report.plan.summary import goodput_rows, layout_record, layout_table
from megatron.training.report.plan.trials import try_layout
from megatron.training.rules.run_all import check


def tool_flags() -> argparse.ArgumentParser:
    """Return the parser of the flags of this tool."""
    parser = tool_parser(__doc__)
    parser.add_argument("--gpu", default="H100", help="GPU kind (H100, H200, ...) or a .json file of measured rates")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the cluster")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs per node")
    parser.add_argument("--memory", type=float, help="GiB per GPU; default: of the GPU kind")
    parser.add_argument("--nic-gbits", type=float, default=400.0, help="network bandwidth per GPU in Gb/s")
    parser.add_argument(
        "--tokens", type=parse_count, help="training tokens, such as 1e12 or 1T; default: from the iterations"
    )
    parser.add_argument("--gpu-hour-price", type=float, help="price of a GPU-hour, for the cost")
    parser.add_argument("--best", type=int, default=8, help="layouts to print")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--try", type=int, default=0, dest="trials", help="run the best N for eight iterations here")
    parser.add_argument("--save-stall", type=float, default=1.0, help="seconds that a save stops training")
    parser.add_argument("--restart-seconds", type=float, default=300.0, help="seconds from a failure to the next step")
    parser.add_argument(
        "--program", default="pretrain_gpt.py", help="program of these flags, or a model family's module"
    )
    return parser


SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_count(text: str) -> float:
    """Return the number in ``text``, which may end with a suffix of :data:`SUFFIXES`, such as 1.5T."""
    number, factor = (text[:-1], SUFFIXES[text[-1].upper()]) if text[-1:].upper() in SUFFIXES else (text, 1.0)
    try:
        return float(number) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, such as 1e12, 500B or 1T") from None


def check_numbers(options: argparse.Namespace) -> None:
    """Raise UserError for the first number outside of its range."""
    lowest = {"tokens": 1.0, "gpu_hour_price": 0.0, "best": 1, "trials": 0, "save_stall": 0.001, "restart_seconds": 0.0}
    for name, low in lowest.items():
        value, flag = getattr(options, name), "--try" if name == "trials" else f"--{name.replace('_', '-')}"
        if value is not None and not low <= value < 1e18:
            raise UserError(f"{flag} {value:g}: must be at least {low:g} and below 1e18")


VARIED = ("parallel", "overlap", "pipeline", "recompute", "distributed-optimizer", "fsdp", "comm-type", "micro-batch")
"""Parts of the flags that layouts set: their rules apply to each layout."""


def read_model(program: str, flags: Sequence[str]) -> PretrainConfig:
    """Return the settings of a training run, whose learning rate, length and micro-batch size are optional, with those
    of --load-hf or a checkpoint. Imports torch for these only. Raises ConfigError with all problems of the model."""
    defaults = {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-4, "bf16": True}
    if any(word.split("=")[0] == "--fp16" for word in flags):
        del defaults["bf16"]
    cfg = parse_args(flags, args_defaults=defaults, needs_data=False, model_family=find_program(program)[0].name)
    if cfg.checkpoint.load_hf or cfg.checkpoint.use_checkpoint_args:
        from megatron.training.checkpoint.other_formats import apply_hf_settings
        from megatron.training.checkpoint.settings import apply_checkpoint_args

        cfg = apply_hf_settings(apply_checkpoint_args(cfg))
    problems = check(resolve(cfg, smallest_world_size(cfg), gpus=True).with_settings(dry_run=True))
    problems = [problem for problem in problems if not any(part in problem.flag for part in VARIED)]
    if cfg.training.global_batch_size is None:
        reason = "is required: layouts are compared at equal batches"
        problems.append(Problem("--global-batch-size", reason, fix="for example --global-batch-size 512"))
    if known_vocab_size(cfg.tokenizer)[0] is None:
        reason = "is required: the output layer is part of the time"
        problems.append(Problem("--vocab-size", reason, fix="for example --vocab-size 128256"))
    if problems:
        raise ConfigError(problems)
    return cfg.with_settings(explicit=cfg.explicit - {"train_iters"}) if cfg.training.train_samples else cfg


def none_found(result: Search, cluster: Cluster) -> str:
    """Return the reason for an empty result."""
    at = f"--gpu {cluster.gpu.name} --nodes {cluster.nodes} --gpus-per-node {cluster.gpus_per_node}"
    if result.too_large:
        need = f"the smallest of {result.tried:,} layouts needs {result.smallest / 2**30:.1f} GiB per GPU"
        return f"{at}: no layout fits: {need}, of {cluster.gpu.memory_gib:g}; add nodes"
    why = result.reason or "no sizes divide the cluster, the layers, the heads and --global-batch-size"
    return f"{at}: no layout is possible: {why}"


def main(argv: Sequence[str]) -> int:
    """Print the best layouts, and with --tokens the length and cost of the run. Raises UserError if no layout fits."""
    options, flags = tool_flags().parse_known_args(argv)
    check_numbers(options)
    cluster = build_cluster(options.gpu, options.nodes, options.gpus_per_node, options.memory, options.nic_gbits)
    cfg = read_model(options.program, flags)
    vocab_size = known_vocab_size(cfg.tokenizer)[0]
    assert vocab_size is not None, "checked by read_model"
    result = search(cfg, cluster, vocab_size, lambda text: print(text, file=sys.stderr))
    for sentence in unfused_attention(resolve(cfg, cluster.world_size, gpus=True)):
        print(sentence, file=sys.stderr)
    if not result.layouts:
        raise UserError(none_found(result, cluster))
    best = result.layouts[: options.best]
    tokens = options.tokens or samples_from_iters(cfg.flat, cfg.training.train_iters or 0) * cfg.data.seq_length
    if "train_iters" not in cfg.explicit and not options.tokens:
        tokens = 0
    records = [layout_record(layout, cluster, vocab_size, tokens, options.gpu_hour_price) for layout in best]
    if options.trials:
        add_trials(records, best[: options.trials], cluster, options.program, flags)
    losses = goodput_rows(cluster, options.save_stall, options.restart_seconds)
    if options.json:
        goodput = [row._asdict() for row in losses]
        print(json.dumps({"layouts": records, "goodput": goodput, "candidates": result.tried}, indent=1))
        return 0
    print(
        f"{cluster.world_size} x {cluster.gpu.name}: {result.tried:,} candidates, {result.rejected:,} rejected by"
        f" rules, {result.too_large:,} too large for {cluster.gpu.memory_gib:g} GiB, {result.slower:,} slower"
    )
    print(layout_table(records, len(result.ties())))
    for row in losses:
        print(
            f"failures {row.failures:<7} every {row.hours_between:,.1f} h: save every"
            f" {row.save_every_seconds / 60:.1f} min, goodput {row.goodput:.1%}"
        )
    return 0


def add_trials(
    records: list[dict[str, object]], best: Sequence[Layout], cluster: Cluster, program: str, flags: Sequence[str]
) -> None:
    """Run the layouts on this machine, add measured seconds to ``records``, and sort these first, fastest first."""
    if cluster.nodes > 1:
        raise UserError(f"--try {len(best)}: runs on one node only; remove it or use --nodes 1")
    for record, layout in zip(records, best):
        record["measured_seconds"] = try_layout(layout, cluster.gpus_per_node, program, flags)
    records.sort(key=lambda record: record.get("measured_seconds") or float("inf"))  # type: ignore[arg-type, return-value]
