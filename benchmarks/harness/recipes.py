"""Memory and cost of the recipes in examples/, from their ``--dry-run`` and measured speeds.

A step is estimated by the FLOPs of a rank at the rate that a row of results/training.json reached with the same kind of
layout, on H200s of one host.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Choice:
    """A recipe on some GPUs."""

    recipe: str
    """Below examples/, without train_ and .sh."""
    gpus: str
    settings: str = ""
    """Variables of the environment that are set otherwise than by default."""
    flags: str = ""
    like: str = ""
    """Row of training.json whose rate is taken; empty: none was measured."""


PRECISION_AWARE = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
MIXTRAL, QWEN3 = (f"{row}-ep2 with quack-kernels and flash-attn-4" for row in ("mixtral", "qwen3-moe"))
CHOICES = (
    Choice("gpt3/gpt3_175b_distributed", "80 GB", like="tp4-sp-overlap"),
    Choice("gpt3/gpt3_175b_distributed", "80 GB", "NNODES=8 PP=8", like="tp4-sp-overlap"),
    Choice("gpt3/gpt3_175b_distributed", "141 GB", "NNODES=4 PP=4", like="tp4-sp-overlap"),
    Choice("llama/llama3_8b", "80 GB", like="pp2-zero-bubble"),
    Choice("llama/llama3_8b", "80 GB", "GPUS_PER_NODE=4 PP=4", like="pp4-zero-bubble"),
    Choice("llama/llama3_8b", "141 GB", "PP=1", like="dp4"),
    Choice("llama/llama3_8b", "141 GB", "GPUS_PER_NODE=2", like="pp2-zero-bubble"),
    Choice("llama/llama3_8b", "141 GB", "GPUS_PER_NODE=1 PP=1", PRECISION_AWARE, like="one-8b"),
    Choice("llama/llama3_8b_fp8", "80 GB", like="one+fp8-tensorwise with flash-attn-4"),
    Choice("llama/llama3_70b", "80 GB", like="tp4-sp-overlap"),
    Choice("llama/llama3_70b", "80 GB", "NNODES=4 TP=8 PP=2", like="tp4-sp-overlap"),
    Choice("llama/llama3_70b", "141 GB", "NNODES=2 TP=8 PP=2", like="tp4-sp-overlap"),
    Choice("llama/llama3_405b", "80 GB", like="tp4-sp-overlap"),
    Choice("llama/llama3_405b", "141 GB", "NNODES=16 PP=8", like="tp4-sp-overlap"),
    Choice("nemotron4/nemotron4_340b", "80 GB", like="tp4-sp-overlap"),
    Choice("nemotron4/nemotron4_340b", "141 GB", "NNODES=12 PP=6", like="tp4-sp-overlap"),
    Choice("mixtral/mixtral_8x7b_distributed", "80 GB", like=MIXTRAL),
    Choice("mixtral/mixtral_8x7b_distributed", "141 GB", "NNODES=2 PP=2", like=MIXTRAL),
    Choice("mixtral/mixtral_8x7b_distributed", "141 GB", "NNODES=1 PP=1", PRECISION_AWARE, like=MIXTRAL),
    Choice("qwen3_moe/qwen3_30b_a3b", "80 GB", like=QWEN3),
    Choice("qwen3_moe/qwen3_30b_a3b", "141 GB", "NNODES=1 PP=1", like=QWEN3),
    Choice("qwen3_moe/qwen3_30b_a3b", "141 GB", "NNODES=1 GPUS_PER_NODE=4 PP=1 EP=4", PRECISION_AWARE, QWEN3),
    Choice("qwen3_vl/qwen3_vl_8b", "80 GB"),
    Choice("qwen3_vl/qwen3_vl_8b", "141 GB", "TP=1"),
    Choice("qwen35/qwen35_9b", "80 GB"),
    Choice("qwen35/qwen35_9b", "141 GB", "TP=1"),
    Choice("qwen35/qwen35_35b_a3b", "80 GB"),
    Choice("qwen35/qwen35_35b_a3b", "141 GB", "NNODES=2 PP=1"),
    Choice("nemotron3/nemotron3_nano_30b_a3b", "80 GB"),
    Choice("nemotron3/nemotron3_nano_30b_a3b", "141 GB", "NNODES=1 PP=1"),
    Choice("deepseek_v3/deepseek_v3_671b", "80 GB"),
    Choice("deepseek_v3/deepseek_v3_671b", "80 GB", "NNODES=32 EP=16"),
    Choice("bert/bert_340m_distributed", "80 GB"),
    Choice("bert/bert_340m_distributed", "80 GB", "GPUS_PER_NODE=1"),
    Choice("t5/t5_220m_distributed", "80 GB"),
    Choice("t5/t5_220m_distributed", "80 GB", "GPUS_PER_NODE=1"),
)


@functools.cache  # a recipe appears in its page's table and in the complete table
def dry_run(choice: Choice) -> str:
    """Return the dry-run report of the recipe with these settings. Raises RuntimeError with its output on failure."""
    folder, _, name = choice.recipe.partition("/")
    script = ROOT / "examples" / folder / f"train_{name}.sh"
    settings = dict(pair.split("=") for pair in choice.settings.split())
    command = ["bash", str(script), *choice.flags.split(), "--dry-run"]
    env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **settings}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{choice}: {result.stderr}")
    return result.stdout


def matches(pattern: str, report: str) -> list[str]:
    """Return all matches of ``pattern``, with ^ and $ at line ends."""
    return re.findall(pattern, report, re.MULTILINE)


def rows(folder: str, measured: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return a row for every choice of one folder of examples/ ("": of all), with the cells of ``HEADER``."""
    lines: list[tuple[object, ...]] = []
    for choice in CHOICES:
        if folder not in ("", choice.recipe.split("/")[0]):
            continue
        report = dry_run(choice)
        ((ranks, layout),) = re.findall(r"^  ranks +(\d+) = (.*)$", report, re.MULTILINE)
        experts = "".join(f", {axis}" for axis in matches(r"^  ranks of experts .*(expert \d+)", report))
        totals = matches(r"^ +(?:pipeline rank \d+|every rank) +(?:[\d.]+ +){5}([\d.]+)", report)
        (flops,), tokens = matches(r"([\d.e+]+) per rank and iteration", report), matches(r", ([\d,]+) tokens$", report)
        rate = measured.get(choice.like, {}).get("tflops_per_gpu")
        seconds = float(flops) / rate / 1e12 if rate else None
        per_second = round(int(tokens[0].replace(",", "")) / seconds) if seconds else None
        changed = f"{choice.settings} {choice.flags}".strip()
        lines.append((
            f"`train_{choice.recipe.split('/')[1]}.sh`", f"`{changed}`" if changed else "defaults",
            f"{ranks} of {choice.gpus}",
            (" x ".join(axis for axis in layout.split(" x ") if not axis.endswith(" 1")) or "one") + experts,
            f"{max(map(float, totals)):.0f}", seconds and f"{seconds:.3g}", per_second and f"{per_second:,}",
            rate and f"{rate:.0f} (`{choice.like}`)",
        ))  # fmt: skip
    return lines


HEADER = ("recipe", "set", "GPUs", "layout", "GiB per rank", "s per step", "tokens/s", "at TFLOP/s per GPU")
