"""Figures inside sentences and handwritten tables of the pages: each one is copied from benchmarks/results.

A run has one figure in one result file. ``side_by_side`` holds pairs (Megatron-LM and this project on the same GPUs on
the same day) and is quoted where the two are compared; everything else quotes ``training``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

TFLOPS, GB, SECONDS = "tflops_per_gpu", "peak_memory_gb", "seconds_per_iteration"
PAIR = tuple(f"side_by_side/1 GPU/{key}" for key in ("theirs", "theirs_gb", "ours", "ours_gb"))
TWO = ("data parallel 2, distributed optimizer", "tensor parallel 2, sequence parallel", "pipeline parallel 2",
       "context parallel 2")  # fmt: skip
PAIRS_OF_TWO = tuple(f"side_by_side/{name}/{side}" for side in ("theirs", "ours") for name in TWO)
ROWS = {"generation": "rows", "pairs": "pairs"}
"""Files with a list of results, and its key."""
ONE, TENSORWISE, DELAYED = (f"training/one{kind}" for kind in ("", "+fp8-tensorwise", "+fp8-delayed"))
OFFLOADED_8B = "training/one-8b+optimizer-offload+recompute-act+--exp-avg-dtype fp32 --exp-avg-sq-dtype fp32 on an H100"
FLASH_4 = " with flash-attn-4"
SPEEDS_OF_ONE_GPU = r"H200[^|]*\| (\d+) TFLOP/s, (\d+) GB \| \*\*(\d+) TFLOP/s, (\d+) GB\*\*"
SPEEDS_OF_ONE_GPU_2 = r"one H200, LLaMA-3-8B shape, bf16 \| (\d+) TFLOP/s, (\d+) GB \| \*\*(\d+) TFLOP/s, (\d+) GB\*\*"
SPEEDS_OF_TWO_GPUS = (
    r"context parallel \| (\d+) / (\d+) / (\d+) / (\d+) TFLOP/s \| \*\*(\d+) / (\d+) / (\d+) / (\d+)\*\*"
)
FIGURES: dict[str, list[tuple[str, Sequence[str]]]] = {
    "README.md": [(SPEEDS_OF_ONE_GPU, PAIR), (SPEEDS_OF_TWO_GPUS, PAIRS_OF_TWO)],
    "docs/compared_with.md": [
        (SPEEDS_OF_ONE_GPU_2, PAIR),
        (SPEEDS_OF_TWO_GPUS, PAIRS_OF_TWO),
        (r"with CUDA graphs \| (\d+) TFLOP/s \| \*\*(\d+) TFLOP/s\*\*",
         [f"side_by_side/GPT-345M, CUDA graphs/{side}" for side in ("theirs", "ours")]),
    ],
    "docs/STATUS.md": [
        (r"BERT-large (\d+) TFLOP/s \(target", [f"training/bert-large+fp8-tensorwise+cuda-graph/{TFLOPS}"]),
        (r"T5-3B (\d+) \(540\)", [f"training/t5-3b+fp8-tensorwise+cuda-graph/{TFLOPS}"]),
        (r"LLaMA-3-8B's shape (\d+) \(`tensorwise`; with flash-attn-4 (\d+),",
         [f"{TENSORWISE}/{TFLOPS}", f"{TENSORWISE}{FLASH_4}/{TFLOPS}"]),
        (r"peak memory\s+(\d+) GB against (\d+) GB in bf16", [f"{TENSORWISE}/{GB}", f"{ONE}/{GB}"]),
    ],
    "docs/guides/performance.md": [
        (r"recipe tensorwise` \(\[fp8\]\(fp8.md\)\) \| (\d+) to (\d+) TFLOP/s, (\d+) to (\d+) GB",
         [f"{ONE}/{TFLOPS}", f"{TENSORWISE}/{TFLOPS}", f"{ONE}/{GB}", f"{TENSORWISE}/{GB}"]),
        (r"exp-avg-sq-dtype bf16` \| (\d+) to (\d+) GB", [f"{ONE}/{GB}", f"training/one+precision-aware/{GB}"]),
        (r"mlp_act` \| (\d+) to (\d+) GB", [f"{ONE}/{GB}", f"training/one+recompute-act/{GB}"]),
        (r"zero-bubble-h2` if its activations fit \| (\d+) to (\d+) TFLOP/s",
         [f"training/pp4-zero-bubble{kind}/{TFLOPS}" for kind in ("", "-h2")]),
        (r"(\d+) to (\d+) TFLOP/s \(TP 4, 8 layers",
         [f"training/tp4-sp{kind}+--num-layers 8/{TFLOPS}" for kind in ("", "-overlap")]),
        (r"(\d+) to (\d+) TFLOP/s \(CP 4, s 32768\)",
         [f"training/cp4-s32768{kind}/{TFLOPS}" for kind in ("", "+a2a")]),
        (r"(\d+) to (\d+) TFLOP/s \(TP 2\)",
         [f"training/tp2-sp-overlap{kind}/{TFLOPS}" for kind in ("", "+four-sequences")]),
    ],
    "docs/guides/generation.md": [
        (r"decodes at (\d+) tokens/s on an H200, 256 at ([\d,]+) together",
         [f"generation/{row}/tokens_per_second" for row in (3, 12)]),
    ],
    "docs/guides/images.md": [
        (r"reach (\d+) TFLOP/s \(93 % of the (\d+) of",
         [f"training/one{kind}/{TFLOPS}" for kind in ("-images", " next to gdn")]),
    ],
    "docs/guides/kernels.md": [
        (r"8192 tokens, TFLOP/s \| (\d+) \| (\d+) \|\n.*?, same memory, TFLOP/s \| (\d+) \| (\d+) \|",
         [f"pairs/{row}/{side}/{TFLOPS}" for row in (7, 8) for side in ("second", "first")]),
    ],
    "docs/guides/memory.md": [
        *((rf"\| {share} \| ([\d.]+) s \| \d+ % \| (\d+) GB \|", [f"training/one{kind}/{key}" for key in (SECONDS, GB)])
          for share, kind in ((0, ""), (0.45, "+offload-45"), (1.0, "+optimizer-offload"))),
        (r"`--recompute-modules layernorm mlp_act`: ([\d.]+) s per\s+step of 65,536 tokens, (\d+) GB",
         [f"{OFFLOADED_8B}/{key}" for key in (SECONDS, GB)]),
    ],
    "docs/guides/moe.md": [
        (r"(\d+) to (\d+) TFLOP/s per GPU, (\d+) as CUDA graphs; (\d+) on one GPU without EP",
         [f"training/qwen3-moe{kind}/{TFLOPS}"
          for kind in ("-ep2+gather-tokens", "-ep2+static-rows", "-ep2-no-overlap+static-rows+cuda-graph", "")]),
    ],
    "docs/guides/optimizers.md": [
        (r"([\d.]+) s with AdamW, ([\d.]+) s with Muon; 0.48",
         [f"training/one{kind}/{SECONDS}" for kind in ("", "+muon")]),
        (r"two kernels it was ([\d.]+) s", [f"training/one+muon with separate torch operations/{SECONDS}"]),
        (r"sharded state: ([\d.]+) s with AdamW, ([\d.]+) s with Muon",
         [f"training/dp2{kind}/{SECONDS}" for kind in ("", "+muon")]),
    ],
    "docs/guides/fp8.md": [
        (r"8,192 tokens: (\d+)\s+against (\d+) TFLOP/s; measured before",
         [f"training/{row}+fp8-delayed-param-gather/{TFLOPS}" for row in ("fsdp2-dp2", "dp2")]),
        (r"TFLOP/s \(bf16: (\d+)\) \| (\d+) \| (\d+) \| (\d+) \|",
         [f"{name}/{TFLOPS}" for name in (ONE, DELAYED, TENSORWISE, "training/one+fp8-blockwise")]),
        (r"on one GPU: (\d+) GB, in bf16 (\d+) GB", [f"{TENSORWISE}/{GB}", f"{ONE}/{GB}"]),
        (r"`--fp8-param-gather`: (\d+) GB, in bf16 (\d+) GB",
         [f"training/dp2+fp8-param-gather/{GB}", f"training/dp2/{GB}"]),
        (r"\| bf16 \| (\d+) \| 1\.3 to [^|]*\| (\d+) \|", [f"{ONE}/{TFLOPS}", "side_by_side/1 GPU/theirs"]),
        (r"\| `tensorwise` \| (\d+) \| \*\*(\d+)\*\* \|",
         [f"{TENSORWISE}/{TFLOPS}", f"{TENSORWISE}{FLASH_4}/{TFLOPS}"]),
        (r"\| `delayed` \| (\d+) \| \*\*(\d+)\*\* \|", [f"{DELAYED}/{TFLOPS}", f"{DELAYED}{FLASH_4}/{TFLOPS}"]),
        (r"\| `blockwise` \| (\d+) \| not measured", [f"training/one+fp8-blockwise/{TFLOPS}"]),
        (r"Mixtral 8x7B shape \| (\d+) \| \*\*(\d+)\*\*",
         [f"training/mixtral{kind}/{TFLOPS}" for kind in ("", "+fp8-tensorwise")]),
        (r"`--fp8-param-gather` \| (\d+) \| \|", [f"training/dp2+fp8-param-gather/{TFLOPS}"]),
        *((rf"{label} \| (\d+) \| (\d+) \|",
           [f"training/tp2-sp-overlap{kind}+fp8-{recipe}/{TFLOPS}" for recipe in ("tensorwise", "delayed")])
          for label, kind in (("2 sequences per micro-batch", ""), ("the same, 4 sequences", "+four-sequences"))),
        (r"BERT-large \(hidden size 1,024\) \| (\d+) \| (\d+) \| \*\*(\d+)\*\*",
         [f"training/bert-large{kind}/{TFLOPS}" for kind in ("", "+fp8-tensorwise", "+fp8-tensorwise+cuda-graph")]),
        (r"parameters \(hidden size 1,024\) \| (\d+) \| not stored \| \*\*(\d+)\*\*",
         [f"training/t5-3b{kind}/{TFLOPS}" for kind in ("", "+fp8-tensorwise+cuda-graph")]),
    ],
}  # fmt: skip
"""Page -> patterns and, for each group, FILE/ROW/KEY of the result that it shows: seconds with two decimals, else
rounded to a whole number. A row is a name, or an index of the list of rows or pairs."""


def filled(name: str, text: str, stored: Callable[[str], dict[str, Any]]) -> str:
    """Return ``text`` of the page ``name`` with the figures of :data:`FIGURES`. ``stored`` reads a result file. Raises
    ValueError if a pattern does not occur exactly once, KeyError for an unknown row."""
    for pattern, keys in FIGURES.get(name, ()):
        matches = list(re.finditer(pattern, text))
        if len(matches) != 1:
            raise ValueError(f"{name}: {len(matches)} places match {pattern!r}, not 1; correct FIGURES")
        match, values = matches[0], []
        for key in keys:
            file, row, *fields = key.split("/")
            content = stored(file)
            value = content["rows"][row] if isinstance(content.get("rows"), dict) else content[ROWS[file]][int(row)]
            for field in fields:
                value = value[field]
            values.append(format(value, {SECONDS: ".2f", "tokens_per_second": ",.0f"}.get(fields[-1], ".0f")))
        for group in reversed(range(1, len(values) + 1)):
            text = text[: match.start(group)] + values[group - 1] + text[match.end(group) :]
    return text
