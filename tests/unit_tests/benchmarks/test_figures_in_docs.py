"""README.md and docs/ show the figures of benchmarks/results and the sizes of the table of layouts."""

import json
import re
from pathlib import Path

import pytest

from tests.test_utils.layout_suite import IN_THE_SUITE
from tests.test_utils.layout_table import TABLE

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def rows(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def speed(name):
    return f"{rows('training')[name]['tflops_per_gpu']:.0f}"


def speeds(*names):
    first, second = (rows("training")[name]["tokens_per_second_per_gpu"] for name in names)
    return f"| {first:,.0f} | {second:,.0f} | {first / second:.2f} x |"


def memory(name):
    return f"{rows('training')[name]['peak_memory_gb']:.0f}"


def pair(side):
    return " / ".join(f"{row[side]:.0f}" for name, row in rows("side_by_side").items() if "parallel" in name)


ONE = rows("side_by_side")["1 GPU"]
SIDE_BY_SIDE = (
    f"{ONE['theirs']:.0f} TFLOP/s, {ONE['theirs_gb']} GB | **{ONE['ours']:.0f} TFLOP/s, {ONE['ours_gb']} GB**",
    f"{pair('theirs')} TFLOP/s | **{pair('ours')}**",
)
GRAPHS = rows("side_by_side")["GPT-345M, CUDA graphs"]
FLASH = " with flash-attn-4"
PRUNING = json.loads((RESULTS / "pruning.json").read_text(encoding="utf-8"))["validation loss"]
CLAIMS = {
    "docs/guides/smaller_models.md": (
        f"| parent | {PRUNING['parent']:.3f} |",
        f"| pruned, before training | {PRUNING['pruned']:.3f} |",
        f"| random weights, trained on the text | {PRUNING['random weights']['mean']:.3f} |",
        f"| pruned, trained on the text | {PRUNING['pruned, trained on the text']['mean']:.3f} |",
        f"| pruned, distilled from the parent | {PRUNING['pruned, distilled from the parent']['mean']:.3f} |",
    ),
    "README.md": SIDE_BY_SIDE,
    "docs/compared_with.md": (
        *SIDE_BY_SIDE, f"{GRAPHS['theirs']:.0f} TFLOP/s | **{GRAPHS['ours']:.0f} TFLOP/s**",
    ),
    "docs/guides/performance.md": (
        f"{speed('one')} to {speed('one+fp8-tensorwise')} TFLOP/s",
        f"TFLOP/s, {memory('one')} to {memory('one+fp8-tensorwise')} GB",
        f"{memory('one')} to {memory('one+precision-aware')} GB",
        f"{memory('one')} to {memory('one+recompute-act')} GB",
        f"{speed('pp4-zero-bubble')} to {speed('pp4-zero-bubble-h2')} TFLOP/s",
        f"{speed('tp2-sp-overlap')} to {speed('tp2-sp-overlap+four-sequences')} TFLOP/s",
        f"{speed('cp4-s32768')} to {speed('cp4-s32768+a2a')} TFLOP/s",
    ),
    "docs/guides/images.md": (f"reach {speed('one-images')} TFLOP/s", f"of the {speed('one next to gdn')} of"),
    "docs/guides/linear_attention.md": (
        speeds("gdn", "one next to gdn"), speeds("gdn-s32768", "dense-s32768"), speeds("gdn-s131072", "dense-s131072"),
    ),
    "docs/guides/fp8.md": (
        f"| TFLOP/s (bf16: {speed('one')}) | {speed('one+fp8-delayed')} | {speed('one+fp8-tensorwise')} |"
        f" {speed('one+fp8-blockwise')} |",
        f"| bf16 | {speed('one')} |",
        f"| `tensorwise` | {speed('one+fp8-tensorwise')} | **{speed(f'one+fp8-tensorwise{FLASH}')}** |",
        f"| `delayed` | {speed('one+fp8-delayed')} | **{speed(f'one+fp8-delayed{FLASH}')}** |",
        f"| training, Mixtral 8x7B shape | {speed('mixtral')} | **{speed('mixtral+fp8-tensorwise')}** |",
        f"Peak memory of the runs below on one GPU: {memory('one+fp8-tensorwise')} GB, in bf16 {memory('one')} GB.",
        f"`--fp8-param-gather`: {memory('dp2+fp8-param-gather')} GB, in bf16 {memory('dp2')} GB",
        f"| data parallel, `--fp8-param-gather` | {speed('dp2+fp8-param-gather')} |",
        f"| BERT-large (hidden size 1,024) | {speed('bert-large')} | {speed('bert-large+fp8-tensorwise')} |"
        f" **{speed('bert-large+fp8-tensorwise+cuda-graph')}** |",
    ),
}  # fmt: skip
"""Texts with figures, by page, made from the results."""


@pytest.mark.parametrize("page", CLAIMS)
def test_figures_of_pages_are_those_of_the_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [claim for claim in CLAIMS[page] if claim not in text] == [], "write these figures"


def test_counts_of_layouts_are_true():
    text = (ROOT / "docs" / "guides" / "layouts.md").read_text(encoding="utf-8")
    in_suite, in_table = map(int, re.search(r"more than (\d+) of more than (\d+) layouts", text).groups())
    assert in_suite < len(IN_THE_SUITE) < in_suite + 100 and in_table < len(TABLE) < in_table + 100
